"""Makes an engine that matches operations by order match them by name.

Hooks fire in an order of their own on each rank. Two sums submitted in opposite order on two ranks would
add unlike tensors, and most engines do not notice. So whoever is about to start a sequence of operations
announces their names first, equal on all ranks; operations then leave in that order, several small ones
together in a bucket, and one that is ready early waits for its predecessors.

Before each sequence a short header travels: a digest of what is about to be sent. Where the ranks'
digests differ, nothing else leaves, and every rank gets an error.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_allreduce.communicators.buckets import Bucket, Operation, divide
from ssd_allreduce.communicators.progress import ProgressThread
from ssd_allreduce.communicators.protocol import (
    Capabilities,
    Communicator,
    Handle,
    OrderMatching,
    ReduceOp,
    wait_until,
)
from ssd_allreduce.communicators.staging import HostStage
from ssd_allreduce.errors import SequenceMismatchError

_DIGEST_BYTES = 6  # exact in a float64
_HEADER_POLL_SECONDS = 1e-3


@dataclass
class _Header:
    """What this rank is about to send: the digest, its allreduce once started, and a word for messages."""

    digest: int
    about: str
    extremes: Tensor = field(default_factory=lambda: torch.empty(0))
    handle: Handle = None
    started: bool = False

    def start(self, channel: Communicator) -> None:
        self.extremes = torch.tensor([self.digest, -self.digest], dtype=torch.float64)
        self.handle = channel.allreduce_async([self.extremes], "header", ReduceOp.MAX)
        self.started = True

    def check(self) -> None:
        highest, lowest = self.extremes[0].item(), -self.extremes[1].item()
        if highest != lowest:
            raise SequenceMismatchError(
                f"Ranks are about to reduce different tensors: this rank {self.about}, and another rank "
                "others. Nothing was sent. One of them loaded a checkpoint, made a step, or called flush() "
                "or adopt_weights() where the others did not, or steps its optimizers in another order: "
                "do the same on all ranks. The engine cannot be used any more: restart from the last "
                "checkpoint."
            )


class Ordered:
    """One optimizer's use of an engine that matches by order.

    Args:
        engine: the engine; a channel of its own is opened with the first operation, which is collective.
        bucket_bytes: operations of one sequence are put together up to this size; 0 for none together.
        timeout: seconds that opening the channel may take.
    """

    def __init__(self, engine: OrderMatching, bucket_bytes: int, timeout: float) -> None:
        self._engine = engine
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._channel: Communicator | None = None
        # Reentrant: a garbage collection while it is held may call us again.
        self._lock = threading.RLock()
        self._waiting: deque[_Header | Bucket] = deque()
        self._expected: dict[str, Bucket] = {}
        self._in_flight: list[Bucket] = []
        self._stage = HostStage()
        self._progress = ProgressThread(self._advance, self._lock)

    # -- the protocol ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def size(self) -> int:
        return self._engine.size

    @property
    def capabilities(self) -> Capabilities:
        able = self._engine.capabilities
        # Buckets on devices that the engine does not read travel through host memory.
        devices = able.devices | {"cuda"}
        return Capabilities("name", able.dtypes, devices, able.polled_every, able.threads)

    @property
    def key(self) -> str:
        return self._engine.key

    def announce(self, sequence: Sequence[tuple[str, int]]) -> None:
        """Say which operations come next, by name and size in bytes, the same on all ranks.

        All of them must be submitted, in any order; those that are not announced follow them.
        """
        with self._lock:
            self._progress.raise_failure()
            names = [name for name, _ in sequence]
            about = f"announces {names[0]!r} and {len(names) - 1} more"
            self._waiting.append(_Header(_digest(repr(sequence)), about))
            for bucket_names in divide(sequence, self._bucket_bytes):
                bucket = Bucket(bucket_names)
                self._waiting.append(bucket)
                self._expected.update(dict.fromkeys(bucket_names, bucket))
            self._proceed()

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        with self._lock:
            self._progress.raise_failure()
            operation = Operation(list(tensors), op, prescale, postscale, self._stage.moments(tensors))
            if name not in self._expected:
                shape = [(tensor.numel(), str(tensor.dtype)) for tensor in tensors]
                self._waiting.append(_Header(_digest(repr((name, op, shape))), f"submits {name!r}"))
                self._expected[name] = Bucket([name])
                self._waiting.append(self._expected[name])
            self._expected.pop(name).add(name, operation)
            self._proceed()
        return operation

    def poll(self, handle: Handle) -> bool:
        with self._lock:
            self._progress.raise_failure()
            self._proceed()
            bucket: Bucket = handle.bucket
            if bucket.finished:
                return True
            if not bucket.launched or not bucket.poll(self._opened()):
                return False
            # In the caller's thread, and on its stream: it is about to use the results.
            bucket.finish(self._opened(), self._timeout)
            self._in_flight.remove(bucket)
            return True

    def wait(self, handle: Handle, timeout: float) -> None:
        wait_until(lambda: self.poll(handle), timeout)

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        self._opened().broadcast(tensor, root, name, timeout)

    def barrier(self, name: str, timeout: float) -> None:
        self._opened().barrier(name, timeout)

    def abort(self) -> None:
        self._progress.stop()
        (self._channel or self._engine).abort()

    def close(self) -> None:
        with self._lock:
            # What has been submitted must still leave: other ranks may wait for it.
            idle = not self._waiting and all(bucket.arrived for bucket in self._in_flight)
            if idle and self._channel is not None:
                self._channel.close()

    # -- sending in order ------------------------------------------------------------------------

    def progress(self) -> None:
        """Send what may be sent now, where no thread does so. Rank-local and short."""
        if not self.capabilities.threads and (self._waiting or self._in_flight):
            with self._lock:
                self._proceed()
                self._poll_in_flight()

    def _opened(self) -> Communicator:
        if self._channel is None:
            self._channel = self._engine.open_channel(self._timeout)
        return self._channel

    def _proceed(self) -> None:
        """Send as much of what waits as may leave now."""
        try:
            self._send_what_may_leave()
        except Exception as error:
            # Whatever it was (memory that ran out while a bucket was filled): what stopped half-way may
            # not be tried again, by the thread least of all, and then leave incomplete.
            self._progress.fail(error)
            raise
        self._keep_polling()

    def _send_what_may_leave(self) -> None:
        channel = self._opened()
        able = channel.capabilities
        while self._waiting:
            head = self._waiting[0]
            if isinstance(head, Bucket):
                if not head.complete:
                    return
                head.prepare(able, channel.size, self._stage)
                if not head.may_leave(able):
                    return
                head.launch(channel)
                self._in_flight.append(head)
            else:
                if not head.started:
                    head.start(channel)
                if not channel.poll(head.handle):
                    return
                channel.wait(head.handle, self._timeout)
                head.check()
            self._waiting.popleft()

    def _poll_in_flight(self) -> None:
        """Move what is in flight, each of them: polling is what moves them."""
        channel = self._opened()
        for bucket in self._in_flight:
            bucket.poll(channel)

    # -- a thread while something has to be polled -----------------------------------------------

    def _keep_polling(self) -> None:
        if self.capabilities.threads and self._needs_polling():
            self._progress.wake(self.capabilities.polled_every or _HEADER_POLL_SECONDS)

    def _needs_polling(self) -> bool:
        if self._waiting:
            head = self._waiting[0]
            if not isinstance(head, Bucket) or head.complete:
                return True
        return self.capabilities.polled_every is not None and any(not b.arrived for b in self._in_flight)

    def _advance(self) -> bool:
        self._send_what_may_leave()
        if self.capabilities.polled_every is not None:
            self._poll_in_flight()
        return self._needs_polling()


def matched_by_name(engine: Communicator, bucket_bytes: int, timeout: float) -> Communicator:
    """The engine itself if it matches by name, else :class:`Ordered` around it."""
    if engine.capabilities.matches_by == "name":
        return engine
    if not isinstance(engine, OrderMatching):
        raise TypeError(
            f"communicator={engine!r} matches by order and has no method open_channel(timeout), with which "
            "each optimizer gets operations of its own. See ssd_allreduce.communicators.OrderMatching."
        )
    return Ordered(engine, bucket_bytes, timeout)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest(), "big")
