"""Makes an engine that matches by name serve tensors on devices whose memory it does not read."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ssd_allreduce.communicators.progress import ProgressThread
from ssd_allreduce.communicators.protocol import (
    Capabilities,
    Communicator,
    Handle,
    ReduceOp,
    wait_until,
)
from ssd_allreduce.communicators.staging import HostStage, StagedRow

_POLL_SECONDS = 5e-4


@dataclass
class _Operation:
    """An allreduce through copies in host memory; its handle once the engine has been given them."""

    rows: list[StagedRow]
    name: str
    op: ReduceOp
    factors: tuple[float, float]
    submitted: bool = False
    handle: Handle = None

    @property
    def ready(self) -> bool:
        return all(row.ready for row in self.rows)


class ThroughHost:
    """An engine, with copies in host memory of the tensors that it does not read where they are.

    A tensor is copied beside the stream that computes, and handed to the engine by a thread of ours
    when the copy has been made: nobody waits before the result is asked for.

    Args:
        engine: matches by name, and may be called from any thread.
        stage: makes the copies.
    """

    def __init__(self, engine: Communicator, stage: HostStage | None = None) -> None:
        self._engine = engine
        self._stage = stage or HostStage()
        self._lock = threading.RLock()
        self._waiting: list[_Operation] = []
        self._progress = ProgressThread(self._advance, self._lock)

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def size(self) -> int:
        return self._engine.size

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def key(self) -> str:
        return self._engine.key

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        if all(tensor.device.type in self.capabilities.devices for tensor in tensors):
            return self._engine.allreduce_async(tensors, name, op, prescale, postscale)
        with self._lock:
            self._progress.raise_failure()
            after = {device: [moment] for device, moment in self._stage.moments(tensors).items()}
            # ``data``: an engine writes memory behind autograd's back.
            rows = [self._stage.take([tensor.data.view(-1)], tensor.dtype, after) for tensor in tensors]
            operation = _Operation(rows, name, op, (prescale, postscale))
            self._waiting.append(operation)
            self._submit_what_is_ready()
            if self._waiting:
                self._progress.wake(_POLL_SECONDS)
        return operation

    def poll(self, handle: Handle) -> bool:
        if not isinstance(handle, _Operation):
            return self._engine.poll(handle)
        with self._lock:
            self._progress.raise_failure()
            self._submit_what_is_ready()
        return handle.submitted and self._engine.poll(handle.handle)

    def wait(self, handle: Handle, timeout: float) -> None:
        if not isinstance(handle, _Operation):
            self._engine.wait(handle, timeout)
            return
        deadline = time.monotonic() + timeout
        wait_until(lambda: self.poll(handle), timeout)
        self._engine.wait(handle.handle, max(0.0, deadline - time.monotonic()))
        # In the caller's thread, and on its stream: it is about to use the results.
        for row in handle.rows:
            row.bring_back()

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        if tensor.device.type in self.capabilities.devices:
            self._engine.broadcast(tensor, root, name, timeout)
            return
        here = tensor.detach().cpu()
        self._engine.broadcast(here, root, name, timeout)
        tensor.detach().copy_(here)

    def barrier(self, name: str, timeout: float) -> None:
        self._engine.barrier(name, timeout)

    def abort(self) -> None:
        self._progress.stop()
        self._engine.abort()

    def close(self) -> None:
        self._engine.close()

    def _submit_what_is_ready(self) -> None:
        """Any order will do: the engine matches by name."""
        ready = [operation for operation in self._waiting if operation.ready]
        for operation in ready:
            self._waiting.remove(operation)
            rows = [row.row for row in operation.rows]
            operation.handle = self._engine.allreduce_async(
                rows, operation.name, operation.op, *operation.factors
            )
            operation.submitted = True

    def _advance(self) -> bool:
        self._submit_what_is_ready()
        return bool(self._waiting)
