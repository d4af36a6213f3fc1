"""MPI as the engine, through mpi4py: non-blocking collectives on communicators of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce.communicators.buckets import only_tensor
from ssd_allreduce.communicators.leaving import Leaving
from ssd_allreduce.communicators.protocol import Capabilities, Handle, ReduceOp, wait_until
from ssd_allreduce.errors import CommunicationError, UsageError

_START_SECONDS = 600.0
_ABORT_SECONDS = 10.0
_POLL_SECONDS = 5e-4

_leaving: Leaving | None = None


class MPICommunicator:
    """Allreduce through mpi4py, on duplicates of ``MPI.COMM_WORLD``.

    MPI reduces float32 and float64 here: other types travel as float32. Tensors in CUDA memory are handed
    to an MPI that reads them in non-blocking collectives (:func:`reads_cuda_memory`), and else copied.
    Importing mpi4py initialises MPI, unless the user's code has done so. All ranks of the job take part. The
    first operation is collective: it makes a duplicate.

    Raises:
        UsageError: mpi4py is not installed.
    """

    def __init__(self, *, _own: Any = None) -> None:
        self._mpi = _import_mpi()
        self._own = _own
        self._rank = int(self._mpi.COMM_WORLD.Get_rank())
        self._size = int(self._mpi.COMM_WORLD.Get_size())
        self._threads = self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE
        self._cuda = torch.cuda.is_available() and reads_cuda_memory(self._mpi)
        self._ops = {ReduceOp.SUM: self._mpi.SUM, ReduceOp.MAX: self._mpi.MAX}
        self._types = {torch.float32: self._mpi.FLOAT, torch.float64: self._mpi.DOUBLE}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        # Without THREAD_MULTIPLE no thread of ours may call MPI beside the user's: hooks and waits do.
        return Capabilities(
            "order",
            frozenset(self._types),
            frozenset({"cpu", "cuda"} if self._cuda else {"cpu"}),
            polled_every=_POLL_SECONDS,
            threads=self._threads,
            waits_for_devices=False,
        )

    @property
    def key(self) -> str:
        return "mpi"

    def open_channel(self, timeout: float) -> MPICommunicator:
        with self._translated_errors("making a communicator"):
            duplicate, request = self._mpi.COMM_WORLD.Idup()
        self.wait(request, timeout)
        return MPICommunicator(_own=duplicate)

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        tensor = only_tensor(tensors, op, prescale, postscale)
        # mpi4py takes a CUDA tensor by its own interface, and does not look at streams.
        memory = tensor.detach() if tensor.is_cuda else tensor.detach().numpy()
        buffer = [memory, self._types[tensor.dtype]]
        with self._translated_errors(f"allreduce of {name!r}"):
            return self._opened().Iallreduce(self._mpi.IN_PLACE, buffer, self._ops[op])

    def poll(self, handle: Handle) -> bool:
        with self._translated_errors("allreduce"):
            return bool(handle.Test())

    def wait(self, handle: Handle, timeout: float) -> None:
        wait_until(lambda: self.poll(handle), timeout)

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        staged = tensor.detach().cpu().contiguous().reshape(-1)
        with self._translated_errors(f"broadcast of {name!r}"):
            request = self._opened().Ibcast([staged.view(torch.uint8).numpy(), self._mpi.BYTE], root)
        self.wait(request, timeout)
        tensor.detach().copy_(staged.view(tensor.shape))

    def barrier(self, name: str, timeout: float) -> None:
        with self._translated_errors(f"barrier {name!r}"):
            request = self._opened().Ibarrier()
        self.wait(request, timeout)

    def abort(self) -> None:
        # MPI knows one way to end ranks that wait: to end the job. The error that led here gets the time
        # to be reported first.
        assert _leaving is not None
        _leaving.failed()
        timer = threading.Timer(_ABORT_SECONDS, self._mpi.COMM_WORLD.Abort, (1,))
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        return None

    def _opened(self) -> Any:
        if self._own is None:
            self._own = self.open_channel(_START_SECONDS)._own
        return self._own

    def _translated_errors(self, what: str) -> _TranslatedErrors:
        return _TranslatedErrors(what, self._mpi.Exception)


class _TranslatedErrors:
    """Context manager that turns MPI's exceptions into ours."""

    def __init__(self, what: str, kind: type[BaseException]) -> None:
        self._what = what
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kind):
            assert _leaving is not None
            _leaving.failed()
            raise CommunicationError(
                f"MPI failed in {self._what}: {error}. Another rank has probably ended or reported an error "
                "of its own; see its output."
            ) from error


def reads_cuda_memory(mpi: Any) -> bool:
    """Whether this MPI was built, and has been started, to reduce in CUDA memory without blocking.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """
    # Open MPI says yes for its blocking operations. Its non-blocking reductions take the device's addresses
    # for the host's, and crash: https://github.com/open-mpi/ompi/issues/9845.
    if mpi.Get_library_version().startswith("Open MPI"):
        return False
    # Open MPI, MPICH and what derives from them say so by a function that mpi4py does not wrap.
    library = ctypes.CDLL(mpi.__file__)
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return query is not None and query() == 1


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(
            f"communicator='mpi' needs mpi4py, which cannot be imported ({error}). Install the extra: pip "
            "install 'ssd-allreduce[mpi]'."
        ) from error
    global _leaving
    if _leaving is None:
        # MPI waits for all ranks at exit: one that has failed would wait for those that wait for it.
        _leaving = Leaving(lambda: MPI.COMM_WORLD.Abort(1))
    return MPI
