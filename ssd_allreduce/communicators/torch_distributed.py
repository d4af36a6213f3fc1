"""``torch.distributed`` as the engine: gloo for CPU memory, NCCL for CUDA memory where it is in use."""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssd_allreduce.communicators.buckets import only_tensor
from ssd_allreduce.communicators.leaving import Leaving, end_process
from ssd_allreduce.communicators.protocol import Capabilities, Handle, ReduceOp, wait_until
from ssd_allreduce.errors import CommunicationError, UsageError

# Backends count from the start of an operation, which may rightly be in flight for hours while a rank
# evaluates. Waits are bounded by those who wait.
_OPERATION_LIMIT = datetime.timedelta(days=7)
_BOTH = "cpu:gloo,cuda:nccl"
_START_SECONDS = 600.0
_LINGERING_SECONDS = 5.0

_leaving: Leaving | None = None
_communicators: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()
_in_flight: dict[int, Any] = {}
"""Operations of all channels that were not seen to have ended."""


def torch_distributed_is_running() -> bool:
    """Whether this process has initialised ``torch.distributed``."""
    return bool(dist.is_available() and dist.is_initialized())


class TorchCommunicator:
    """Allreduce through ``torch.distributed``, in process groups of its own.

    ``torch.distributed`` is initialised from the launcher's environment (``torchrun``) if it has not been.
    All ranks of the job take part. The first operation is collective: it makes a process group. Tensors in
    CUDA memory are handed to NCCL, or copied if the user's code has initialised ``torch.distributed``
    without it (``init_process_group("gloo")``).

    Raises:
        UsageError: torch was built without ``torch.distributed``, or the environment names no job.
    """

    def __init__(self, *, _group: Any = None) -> None:
        if not dist.is_available():
            raise UsageError("This torch was built without torch.distributed. Install another build of it.")
        if not dist.is_initialized():
            _initialise()
        self._group = _group
        _communicators.add(self)
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        global _leaving
        if _leaving is None:
            # At exit torch waits for what is in flight, and that may never arrive.
            _leaving = Leaving(end_process, _finish)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
        devices = {"cpu", "cuda"} if _uses_nccl() else {"cpu"}
        return Capabilities("order", dtypes, frozenset(devices), threads=True)

    @property
    def key(self) -> str:
        return "torch"

    def open_channel(self, timeout: float) -> TorchCommunicator:
        return TorchCommunicator(_group=_new_group(timeout))

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        tensor = only_tensor(tensors, op, prescale, postscale)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if op is ReduceOp.MAX else dist.ReduceOp.SUM)
        options.timeout = _OPERATION_LIMIT
        with _TranslatedErrors(f"allreduce of {name!r}"):
            handle = self._opened().allreduce([tensor], options)
        _in_flight[id(handle)] = handle
        return handle

    def poll(self, handle: Handle) -> bool:
        with _TranslatedErrors("allreduce"):
            done = bool(handle.is_completed())
        if done:
            _in_flight.pop(id(handle), None)
        return done

    def wait(self, handle: Handle, timeout: float) -> None:
        wait_until(lambda: self.poll(handle), timeout)
        with _TranslatedErrors("allreduce"):
            # Raises what went wrong; on CUDA also makes the current stream wait.
            handle.wait()

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = _OPERATION_LIMIT
        contiguous = tensor.detach().contiguous()
        with _TranslatedErrors(f"broadcast of {name!r}"):
            handle = self._opened().broadcast([contiguous], options)
        self.wait(handle, timeout)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)

    def barrier(self, name: str, timeout: float) -> None:
        self.wait(self.allreduce_async([torch.zeros(1)], name, ReduceOp.SUM), timeout)

    def abort(self) -> None:
        # gloo cannot take back what is in flight. The others see this process end; its launcher ends them.
        assert _leaving is not None
        _leaving.failed()

    def close(self) -> None:
        group, self._group = self._group, None
        # torch keeps every group that is not destroyed, with its threads and connections.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _opened(self) -> Any:
        if self._group is None:
            self._group = _new_group(_START_SECONDS)
        return self._group


def _finish() -> None:
    """End torch's threads: one that asks for the interpreter after its end aborts the process."""
    deadline = time.monotonic() + _LINGERING_SECONDS
    while any(not handle.is_completed() for handle in list(_in_flight.values())):
        if time.monotonic() > deadline:
            # torch would wait for ranks that may never submit their part.
            end_process()
        time.sleep(1e-3)
    _in_flight.clear()
    for communicator in _communicators:
        communicator.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _uses_nccl() -> bool:
    return _has_nccl() and "nccl" in dist.get_backend_config()


def _initialise() -> None:
    try:
        dist.init_process_group(_BOTH if _has_nccl() else "gloo")
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"torch.distributed is not initialised, and could not be from the environment: {error} Launch "
            "with torchrun, or call torch.distributed.init_process_group() first."
        ) from error


def _new_group(timeout: float) -> Any:
    began = time.monotonic()
    try:
        group = dist.new_group(
            backend=_BOTH if _uses_nccl() else "gloo", timeout=datetime.timedelta(seconds=timeout)
        )
        # NCCL knows no limit of an operation's own: when the group's is up, it ends the process.
        untyped: Any = dist.distributed_c10d
        untyped._set_pg_timeout(_OPERATION_LIMIT, group)
        return group
    except RuntimeError as error:
        assert _leaving is not None
        _leaving.failed()
        if time.monotonic() - began >= timeout:
            raise TimeoutError(str(error)) from error
        raise CommunicationError(f"torch.distributed could not make a process group: {error}") from error


class _TranslatedErrors:
    """Context manager that turns torch's exceptions into ours."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, UsageError):
            assert _leaving is not None
            _leaving.failed()
            raise CommunicationError(
                f"torch.distributed failed in {self._what}: {error}. Another rank has probably ended or "
                "reported an error of its own; see its output."
            ) from error
