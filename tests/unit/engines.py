"""Engines without a network: one that records, refuses and hangs, and several ranks in threads."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import CommunicationError, Loopback
from ssd_allreduce.communicators import Capabilities, Handle, ReduceOp

JOIN_SECONDS = 60.0


@dataclass(frozen=True)
class Sent:
    """One operation that was handed to the engine."""

    name: str
    op: ReduceOp
    prescale: float
    postscale: float
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    contiguous: bool

    @property
    def bytes(self) -> int:
        return sum(n * dtype.itemsize for n, dtype in zip(self.sizes, self.dtypes, strict=True))


class RecordingEngine(Loopback):
    """A Loopback that records what it is given.

    As in Horovod, a handle is gone once it has been waited for: asking for it again is an error.
    """

    def __init__(self, size: int, dtypes: frozenset[torch.dtype] | None = None) -> None:
        super().__init__(size)
        self.sent: list[Sent] = []
        self.waited: list[float] = []
        self.aborted = False
        self.hangs: Callable[[str], bool] = lambda name: False
        self.refuses: Callable[[str], bool] = lambda name: False
        self._dtypes = dtypes
        self._open: dict[int, str] = {}

    @property
    def capabilities(self) -> Capabilities:
        able = super().capabilities
        return able if self._dtypes is None else Capabilities("name", self._dtypes, able.devices)

    @property
    def gradients_sent(self) -> list[Sent]:
        """What was sent beside the control row and the comparison of ranks."""
        return [sent for sent in self.sent if sent.name.endswith((".gradient", ".accumulated"))]

    @property
    def open_operations(self) -> list[str]:
        return list(self._open.values())

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        if self.refuses(name):
            raise CommunicationError(f"the engine refuses {name}")
        assert name not in self._open.values(), f"{name} is in flight already"
        self.sent.append(
            Sent(
                name,
                op,
                prescale,
                postscale,
                tuple(t.numel() for t in tensors),
                tuple(t.dtype for t in tensors),
                all(t.is_contiguous() for t in tensors),
            )
        )
        # Like Horovod, the engine writes memory behind autograd's back.
        super().allreduce_async([t.data for t in tensors], name, op, prescale, postscale)
        handle = len(self.sent)
        self._open[handle] = name
        return handle

    def poll(self, handle: Handle) -> bool:
        if handle not in self._open:
            raise CommunicationError(f"handle {handle} was never given out or has been cleared")
        return not self.hangs(self._open[handle])

    def wait(self, handle: Handle, timeout: float) -> None:
        self.waited.append(timeout)
        if not self.poll(handle):
            raise TimeoutError
        del self._open[handle]

    def abort(self) -> None:
        self.aborted = True


@dataclass
class _Operation:
    op: ReduceOp
    scales: tuple[float, float]
    parts: dict[int, list[Tensor]] = field(default_factory=dict)
    done: bool = False


class ThreadRank:
    """The engine of one of several ranks that run as threads of this process; matches by name."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._submitted: Counter[str] = Counter()
        self.sent: list[str] = []

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    @property
    def capabilities(self) -> Capabilities:
        dtypes = frozenset({torch.float16, torch.float32, torch.float64})
        return Capabilities("name", dtypes, frozenset({"cpu"}))

    @property
    def key(self) -> str:
        return f"threads-{self._world.number}-{self._rank}"

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        self.sent.append(name)
        self._submitted[name] += 1
        key = (name, self._submitted[name])
        self._world.submit(key, self._rank, list(tensors), op, (prescale, postscale))
        return key

    def poll(self, handle: Handle) -> bool:
        return self._world.poll(handle)

    def wait(self, handle: Handle, timeout: float) -> None:
        self._world.wait(handle, timeout)

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        part = tensor if self._rank == root else torch.zeros_like(tensor)
        self.wait(self.allreduce_async([part], name, ReduceOp.SUM), timeout)
        tensor.copy_(part)

    def barrier(self, name: str, timeout: float) -> None:
        self.wait(self.allreduce_async([torch.zeros(1)], name, ReduceOp.SUM), timeout)

    def abort(self) -> None:
        self._world.abort(f"rank {self._rank} shut the engine down")

    def close(self) -> None:
        return None


class OrderedThreadRank(ThreadRank):
    """The same, matching the n-th operations of a channel's ranks, whatever they are called.

    Unlike tensors of equal size are added without a word, as real engines do.
    """

    def __init__(self, world: World, rank: int, channel: int = 0) -> None:
        super().__init__(world, rank)
        self._channel = channel
        self._opened = 0
        self._count = 0
        self.channels: list[OrderedThreadRank] = []

    @property
    def capabilities(self) -> Capabilities:
        dtypes = frozenset({torch.float32, torch.float64})
        return Capabilities("order", dtypes, frozenset({"cpu"}), threads=True)

    def open_channel(self, timeout: float) -> OrderedThreadRank:
        self._opened += 1
        self.channels.append(OrderedThreadRank(self._world, self._rank, self._opened))
        return self.channels[-1]

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        assert len(tensors) == 1
        assert op is not ReduceOp.AVERAGE
        assert (prescale, postscale) == (1.0, 1.0)
        self.sent.append(name)
        self._count += 1
        key = (self._channel, self._count)
        self._world.submit(key, self._rank, list(tensors), op, (1.0, 1.0))
        return key


class World:
    """Where the threads meet."""

    _numbers = itertools.count()

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = next(self._numbers)
        self._changed = threading.Condition()
        self._operations: dict[Any, _Operation] = {}
        self._aborted: str | None = None

    def submit(
        self, key: Any, rank: int, tensors: list[Tensor], op: ReduceOp, scales: tuple[float, float]
    ) -> None:
        with self._changed:
            if self._aborted is not None:
                raise CommunicationError(self._aborted)
            operation = self._operations.setdefault(key, _Operation(op, scales))
            shapes = [[(t.numel(), t.dtype) for t in part] for part in operation.parts.values()]
            mine = [(t.numel(), t.dtype) for t in tensors]
            if (op, scales) != (operation.op, operation.scales) or any(s != mine for s in shapes):
                self._aborted = f"ranks submitted different operations as {key}"
                self._changed.notify_all()
                raise CommunicationError(self._aborted)
            assert all(t.is_contiguous() for t in tensors)
            # ``data``: an engine writes memory behind autograd's back.
            operation.parts[rank] = [t.data for t in tensors]
            if len(operation.parts) == self.size:
                _reduce(operation, self.size)
                operation.done = True
                self._changed.notify_all()

    def poll(self, key: Any) -> bool:
        with self._changed:
            return self._is_done(key)

    def _is_done(self, key: Any) -> bool:
        if self._operations[key].done:
            return True
        if self._aborted is not None:
            raise CommunicationError(self._aborted)
        return False

    def wait(self, key: Any, timeout: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done(key), timeout):
                raise TimeoutError

    def abort(self, reason: str) -> None:
        with self._changed:
            self._aborted = self._aborted or reason
            self._changed.notify_all()


def _reduce(operation: _Operation, size: int) -> None:
    prescale, postscale = operation.scales
    parts = [operation.parts[rank] for rank in range(size)]
    for tensors in zip(*parts, strict=True):
        if operation.op is ReduceOp.MAX:
            result = torch.stack(tensors).amax(dim=0)
        else:
            result = tensors[0] * prescale
            for tensor in tensors[1:]:
                result = result + tensor * prescale
            result = result * (postscale / size if operation.op is ReduceOp.AVERAGE else postscale)
        for tensor in tensors:
            tensor.copy_(result)


@dataclass
class Outcome:
    """What one rank's program returned, or the error that ended it."""

    value: Any = None
    error: BaseException | None = None


def run_ranks(
    size: int, program: Callable[[Any], Any], engine: type[ThreadRank] = ThreadRank
) -> list[Outcome]:
    """Run a program on every rank, and return how each ended. A rank that ends by an error ends the
    engine, as a process that dies does.
    """
    world = World(size)
    outcomes = [Outcome() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            outcomes[rank].value = program(engine(world, rank))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcomes[rank].error = error
            world.abort(f"rank {rank} has ended")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    world.abort("all ranks have ended")
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks returned; an error of any of them is the test's."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def on_ranks(size: int, program: Callable[[Any], Any], engine: type[ThreadRank] = ThreadRank) -> list[Any]:
    """:func:`run_ranks` for programs that end well."""
    return values(run_ranks(size, program, engine))


class SlowLoopback(Loopback):
    """A Loopback whose gradients take a while to arrive."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__(size)
        self.seconds = seconds

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> float:
        super().allreduce_async(tensors, name, op, prescale, postscale)
        return time.monotonic() + (self.seconds if name.endswith(".accumulated") else 0.0)

    def poll(self, handle: float) -> bool:
        return time.monotonic() >= handle

    def wait(self, handle: float, timeout: float) -> None:
        time.sleep(max(0.0, handle - time.monotonic()))
