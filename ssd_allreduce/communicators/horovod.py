"""Horovod as the engine, and everything that touches an optimizer which Horovod has wrapped.

This is the only file that uses Horovod's private names.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import Capabilities, Handle, ReduceOp, wait_until
from ssd_allreduce.errors import CommunicationError, UsageError

EVERY_PROCESS = "horovod"
"""Key of the engine of all processes; that of a process set is longer."""

_SHUTDOWN_SECONDS = 10.0


def horovod_is_running() -> bool:
    """Whether this process has initialised Horovod. Does not import it."""
    module = sys.modules.get("horovod.torch")
    return module is not None and bool(module.is_initialized())


class HorovodCommunicator:
    """Allreduce through ``horovod.torch``, which matches tensors by name.

    Args:
        process_set: the ``hvd.ProcessSet`` that trains together; all processes by default.

    Raises:
        UsageError: Horovod has not been initialised, or this process is not in the process set.
    """

    def __init__(self, process_set: Any = None) -> None:
        hvd = _import_horovod()
        if not horovod_is_running():
            raise UsageError("Horovod is not initialised. Call hvd.init() first.")
        from horovod.common.exceptions import HorovodInternalError

        self._hvd = hvd
        self._engine_error = HorovodInternalError
        self._process_set = hvd.global_process_set if process_set is None else process_set
        if not self._process_set.included():
            raise UsageError(
                f"Rank {hvd.rank()} is not in the process set {self._process_set}; only its ranks "
                "can train with it."
            )
        self._rank = int(self._process_set.rank())
        self._size = int(self._process_set.size())
        self._ops = {
            ReduceOp.SUM: hvd.Sum,
            ReduceOp.AVERAGE: hvd.Average,
            ReduceOp.MAX: hvd.Max,
        }

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        dtypes = frozenset({torch.float16, torch.float32, torch.float64})
        devices = {"cpu"}
        if self._hvd.nccl_built() or self._hvd.cuda_built():
            devices.add("cuda")
        return Capabilities("name", dtypes, frozenset(devices))

    @property
    def key(self) -> str:
        if self._process_set is self._hvd.global_process_set:
            return EVERY_PROCESS
        # Not by the set's number, which Horovod gives to another one when the set is removed: of the new
        # set's ranks, those that were in the old one would have counted more optimizers than the others.
        return f"horovod-ranks-{'-'.join(map(str, self._process_set.ranks))}"

    def allreduce_async(
        self,
        tensors: Sequence[Tensor],
        name: str,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Handle:
        arguments = {
            "name": name,
            "op": self._ops[op],
            "prescale_factor": prescale,
            "postscale_factor": postscale,
            "process_set": self._process_set,
        }
        with self._translated_errors(f"allreduce of {name!r}"):
            if len(tensors) == 1:
                return self._hvd.allreduce_async_(tensors[0], **arguments)
            return self._hvd.grouped_allreduce_async_(list(tensors), **arguments)

    def poll(self, handle: Handle) -> bool:
        # Horovod forgets every handle when it shuts down, which another rank can cause at any time.
        with self._translated_errors("poll"):
            return bool(self._hvd.poll(handle))

    def wait(self, handle: Handle, timeout: float) -> None:
        # hvd.synchronize spins on a whole core until the transfer is done; polling leaves the core
        # to the computation, and lets a wait end.
        wait_until(lambda: self.poll(handle), timeout)
        with self._translated_errors("allreduce"):
            self._hvd.synchronize(handle)

    def broadcast(self, tensor: Tensor, root: int, name: str, timeout: float) -> None:
        global_root = self._process_set.ranks[root] if self._process_set.ranks else root
        with self._translated_errors(f"broadcast of {name!r}"):
            handle = self._hvd.broadcast_async_(
                tensor, root_rank=global_root, name=name, process_set=self._process_set
            )
        self.wait(handle, timeout)

    def barrier(self, name: str, timeout: float) -> None:
        token = torch.zeros(1)
        self.wait(self.allreduce_async([token], name, ReduceOp.SUM), timeout)

    def abort(self) -> None:
        # Shutting down is itself negotiated between the ranks, so a rank that is stuck can block it.
        thread = threading.Thread(target=self._hvd.shutdown, daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_SECONDS)
        if thread.is_alive():
            _end_process_without_horovod_at_exit()

    def close(self) -> None:
        return None

    def _translated_errors(self, what: str) -> _TranslatedErrors:
        return _TranslatedErrors(what, (self._engine_error, ValueError))


def _import_horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UsageError(
            f"communicator='horovod' needs Horovod with PyTorch, which cannot be imported ({error}). Install "
            "the extra: pip install 'ssd-allreduce[horovod]', or let scripts/setup.sh build it."
        ) from error
    return hvd


class _TranslatedErrors:
    """Context manager that turns the engine's exceptions into ours."""

    def __init__(self, what: str, errors: tuple[type[BaseException], ...]) -> None:
        self._what = what
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._errors):
            raise CommunicationError(
                f"Horovod failed in {self._what}: {error}. Another rank has probably ended or "
                "reported an error of its own; see its output."
            ) from error


def _end_process_without_horovod_at_exit() -> None:
    """Keep Horovod's own exit handler, which would wait without bound, from running."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    # Exit handlers run in reverse order of registration, so this one comes before Horovod's.
    atexit.register(leave)


@dataclass(frozen=True)
class WrappedOptions:
    """What the user asked Horovod for when wrapping an optimizer.

    Attributes:
        names: name of each parameter.
        compression: the ``hvd.Compression`` class.
        op: how gradients are combined.
        predivide: ``gradient_predivide_factor``.
        groups: parameters that are reduced together, or None.
        process_set: the processes that train together.
        backward_passes_per_step: backward passes before ``step()``.
        sparse_as_dense: whether sparse gradients are made dense.
    """

    names: dict[Tensor, str]
    compression: Any
    op: ReduceOp
    predivide: float
    groups: list[tuple[Tensor, ...]] | None
    process_set: Any
    backward_passes_per_step: int
    sparse_as_dense: bool


ATTRIBUTES = frozenset(
    {
        *("_parameter_names", "_allreduce_delay", "_handles", "_grad_accs", "_requires_update"),
        *("_groups", "_p_to_group", "_group_counts"),
    }
)
"""Attributes of a wrapped optimizer in which Horovod itself keeps parameters."""


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``hvd.DistributedOptimizer`` made this optimizer (Adasum included)."""
    methods = type(optimizer).__dict__
    return "_allreduce_grad_async" in methods and hasattr(optimizer, "_parameter_names")


def base_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The user's own optimizer class: Horovod makes a subclass of it, class by class."""
    kind = type(optimizer)
    if is_wrapped(optimizer):
        kind = kind.__mro__[1]
    return kind


def read_wrapped(optimizer: Any) -> WrappedOptions:
    """Take over the options of a wrapped optimizer.

    Raises:
        ValueError: an option that delayed communication cannot honour.
        UsageError: gradients of this optimizer are in flight.
    """
    import horovod.torch as hvd

    op = getattr(optimizer, "op", hvd.Adasum)
    operations = {hvd.Average: ReduceOp.AVERAGE, hvd.Sum: ReduceOp.SUM}
    if op not in operations:
        raise ValueError(
            "hvd.DistributedOptimizer was given op=hvd.Adasum (or another operation), which combines "
            "gradients non-linearly, so that accumulated gradients cannot be sent in its place. "
            "Allowed: op=hvd.Average or op=hvd.Sum."
        )
    if optimizer._handles:
        raise UsageError(
            "Gradients of the Horovod optimizer are in flight. Wrap it before the first backward, or "
            "after step()."
        )
    return WrappedOptions(
        names=dict(optimizer._parameter_names),
        compression=optimizer._compression,
        op=operations[op],
        predivide=float(optimizer.gradient_predivide_factor),
        groups=list(optimizer._group_counts) if optimizer._groups is not None else None,
        process_set=optimizer.process_set,
        backward_passes_per_step=int(optimizer.backward_passes_per_step),
        sparse_as_dense=bool(optimizer.sparse_as_dense),
    )


class _NeverDue(dict[Any, int]):
    """Stands in for the countdown of backward passes that Horovod's hooks keep."""

    def __getitem__(self, key: Any) -> int:
        return 2

    def __setitem__(self, key: Any, value: int) -> None:
        return None


class _Forgetful(dict[Any, Any]):
    """Stands in for the handles that Horovod's hooks record."""

    def __setitem__(self, key: Any, value: Any) -> None:
        return None


def silence(optimizer: Any) -> None:
    """Make a wrapped optimizer's hooks do nothing.

    Horovod keeps no handles to its hooks, so they cannot be removed. Instance attributes that shadow
    what the hooks count with keep them from ever sending.
    """
    optimizer._allreduce_delay = _NeverDue()
    optimizer._handles = _Forgetful()


def restore(optimizer: Any) -> None:
    """Undo :func:`silence`."""
    passes = optimizer.backward_passes_per_step
    optimizer._allreduce_delay = dict.fromkeys(optimizer._parameter_names, passes)
    optimizer._handles = {}
