"""Where the time of each step goes, as a trace in Chrome's format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

LOOP, WIRE = 0, 1
"""Rows of a rank: what the training loop does, and what is in flight."""
_ROWS = {LOOP: "training loop", WIRE: "in flight"}
_KEPT_EVENTS = 500_000
_NOTHING = nullcontext()


class Tracer:
    """Records nothing; what :class:`FileTracer` does is asked for with ``trace=``."""

    active = False

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record how long the training loop is inside."""
        return _NOTHING

    def computed(self) -> None:
        """A step begins: what lies since the last one's end was forward and backward."""

    def step_ended(self) -> None:
        """A step has ended."""

    def first_hook(self) -> None:
        """Backward has come to a gradient."""

    def started(self, operation: str) -> None:
        """An operation was handed to the engine."""

    def finished(self, operation: str) -> None:
        """An operation was seen to be done."""

    def align(self, rank: int) -> None:
        """All ranks come here at the same moment: times count from the first one."""

    def write(self) -> None:
        """Bring the file up to date."""


class FileTracer(Tracer):
    """Keeps events in memory and writes them to a file of this rank's own.

    Args:
        path: the file's name, into which the rank's number is put: ``trace.json`` becomes
            ``trace.rank0.json``.
        label: put behind the rank's number, for names that are unique where several optimizers
            or process sets share a path.

    Raises:
        OSError: nothing can be written there.
    """

    active = True

    def __init__(self, path: Path, label: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"trace={str(path)!r}: {path.parent} cannot be written. Give another path.")
        self._path = path
        self._label = label
        self._rank: int | None = None
        self._zero = 0
        # Of a long training the last events are kept.
        self._events: deque[tuple[str, int, int, int]] = deque(maxlen=_KEPT_EVENTS)
        self._open: dict[str, int] = {}
        self._step_end: int | None = None
        self._backward: int | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._events.append((name, LOOP, began, time.perf_counter_ns()))

    def computed(self) -> None:
        now = time.perf_counter_ns()
        if self._step_end is not None:
            middle = now if self._backward is None else self._backward
            self._events.append(("forward", LOOP, self._step_end, middle))
            if self._backward is not None:
                self._events.append(("backward", LOOP, middle, now))
        self._backward = None

    def step_ended(self) -> None:
        self._step_end, self._backward = time.perf_counter_ns(), None

    def first_hook(self) -> None:
        if self._backward is None:
            self._backward = time.perf_counter_ns()

    def started(self, operation: str) -> None:
        self._open[operation] = time.perf_counter_ns()

    def finished(self, operation: str) -> None:
        began = self._open.pop(operation, None)
        if began is not None:
            self._events.append((operation, WIRE, began, time.perf_counter_ns()))

    def align(self, rank: int) -> None:
        if self._rank is None:
            self._rank = rank
            self._zero = time.perf_counter_ns()
            self._events.clear()

    def write(self) -> None:
        if self._rank is None:
            return
        try:
            self._write_events(self._rank)
        except OSError as error:
            # Training is worth more than its trace, and must not end on one rank alone.
            warnings.warn(f"the trace cannot be written: {error}", stacklevel=2)

    def _write_events(self, rank: int) -> None:
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        ]
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            for row, name in _ROWS.items()
        ]
        for index, (name, row, began, ended) in enumerate(self._events):
            place = {"name": name, "pid": rank, "tid": row}
            start, duration = (began - self._zero) / 1e3, (ended - began) / 1e3
            if row == LOOP:
                events.append({"ph": "X", **place, "ts": start, "dur": duration})
                continue
            # Operations in flight overlap, which only asynchronous events may.
            place |= {"cat": "allreduce", "id": index}
            events.append({"ph": "b", **place, "ts": start})
            events.append({"ph": "e", **place, "ts": start + duration})
        path = self._path.with_suffix(f".rank{rank}{self._label}{self._path.suffix}")
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
