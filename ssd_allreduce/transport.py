"""Starting operations on the engine and waiting for them, never without bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.communicators.protocol import Communicator, Handle, ReduceOp
from ssd_allreduce.errors import CommunicationError, CommunicationTimeoutError, SSDError
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.tracing import Tracer


@dataclass
class Pending:
    """An operation in flight: its name for messages, its handle, and the tensors it keeps alive."""

    name: str
    handle: Handle
    tensors: Sequence[Tensor]


_LINGERING_SLEEP = 1e-3


class Transport:
    """One optimizer's access to the engine.

    Args:
        communicator: the engine.
        prefix: put before every operation's name; unique to the optimizer, equal on all ranks.
        timeout: seconds that one wait may last.
        stats: where bytes and waiting are counted.
        tracer: where operations and waiting are recorded.
    """

    def __init__(
        self,
        communicator: Communicator,
        prefix: str,
        timeout: float,
        stats: StatsRecorder,
        tracer: Tracer | None = None,
    ) -> None:
        self.communicator = communicator
        self.progress: Callable[[], str] = lambda: "no step has been made"
        self.prefix = prefix
        self._timeout = timeout
        self._stats = stats
        self.tracer = tracer or Tracer()

    def start(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Pending:
        """Hand contiguous tensors to allreduce, in place.

        Raises:
            CommunicationTimeoutError: a rank did not come to the optimizer's first operation.
            CommunicationError: the engine failed.
        """
        full_name = f"{self.prefix}.{name}"
        try:
            handle = self.communicator.allreduce_async(tensors, full_name, op, prescale, postscale)
        except TimeoutError:
            self._end_engine([name])
        self.tracer.started(name)
        self._stats.sent(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return Pending(name, handle, tensors)

    def announce(self, sequence: Sequence[tuple[str, int]]) -> None:
        """Say which operations start next, by name and bytes: an engine that matches by order needs it.

        All of them must be started, in any order that this rank likes.
        """
        if isinstance(self.communicator, Ordered):
            self.communicator.announce([(f"{self.prefix}.{name}", size) for name, size in sequence])

    def advance(self) -> None:
        """Let an engine make progress that makes none by itself. Short, and for hooks to call."""
        if isinstance(self.communicator, Ordered):
            self.communicator.progress()

    def finish(self, pending: Sequence[Pending]) -> None:
        """Wait for operations.

        Raises:
            CommunicationTimeoutError: they were not done in time. The engine has been shut down, so
                that the other ranks end too.
            CommunicationError: the engine failed.
        """
        deadline = time.monotonic() + self._timeout
        waiting = list(pending)
        with self._stats.waiting():
            try:
                while waiting:
                    with self.tracer.span("wait"):
                        self.communicator.wait(waiting[0].handle, max(0.0, deadline - time.monotonic()))
                    # An engine forgets what has been waited for, so it may not be asked after again.
                    self.tracer.finished(waiting.pop(0).name)
            except TimeoutError:
                self._end_engine([p.name for p in waiting if not self._is_done(p)])

    def observe(self, pending: Sequence[Pending]) -> None:
        """Let a trace know which operations are done by now."""
        for operation in pending:
            if self._is_done(operation):
                self.tracer.finished(operation.name)

    def reduce_now(self, tensor: Tensor, name: str, op: ReduceOp) -> Tensor:
        """Allreduce one vector and wait for it. Collective."""
        self.finish([self.start([tensor], name, op)])
        return tensor

    def linger(self, pending: Sequence[Pending], seconds: float) -> None:
        """Give operations a moment to end, whether or not they do."""
        deadline = time.monotonic() + seconds
        poll = self.communicator.poll
        try:
            while time.monotonic() < deadline and not all(poll(p.handle) for p in pending):
                time.sleep(_LINGERING_SLEEP)
        except SSDError:
            # The engine has gone down, and nobody can be cut off any more.
            return

    def close(self) -> None:
        """Give up the channel that was opened for this optimizer alone. Rank-local."""
        if isinstance(self.communicator, Ordered):
            self.communicator.close()

    def _is_done(self, operation: Pending) -> bool:
        try:
            return self.communicator.poll(operation.handle)
        except CommunicationError:
            return False

    def _end_engine(self, waiting: Sequence[str]) -> NoReturn:
        """Shut the engine down, so that the other ranks end too, and say what was waited for."""
        try:
            raise self._timeout_error(waiting) from None
        finally:
            self.communicator.abort()

    def _timeout_error(self, waiting: Sequence[str]) -> CommunicationTimeoutError:
        communicator = self.communicator
        names = ", ".join(waiting[:5]) + (", ..." if len(waiting) > 5 else "")
        return CommunicationTimeoutError(
            f"Rank {communicator.rank} of {communicator.size} waited {self._timeout:g} seconds for the "
            f"allreduce of {len(waiting)} tensors ({names}). {self.progress()} Another rank has ended, "
            "hangs, or makes fewer steps: ranks with uneven data must all call flush() at the end of "
            "an epoch, and make equally many steps where a script has several optimizers. If ranks are "
            "only slow, raise timeout=. The engine has been shut down so that all ranks end; restart "
            "from the last checkpoint."
        )
