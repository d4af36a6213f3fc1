"""What the user wants, read from the optimizer that was given and from the wrapper's own options."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce.communicators import horovod
from ssd_allreduce.communicators.choice import NAMES, choose_communicator
from ssd_allreduce.communicators.protocol import Communicator
from ssd_allreduce.errors import UsageError
from ssd_allreduce.parameters import Parameters, name_parameters
from ssd_allreduce.settings import check_backward_passes
from ssd_allreduce.wire import NoCompression, WireFormat


@dataclass(frozen=True)
class Request:
    """What the user wants, wherever it was said: to Horovod's wrapper or to this one."""

    names: dict[Tensor, str]
    wire: WireFormat
    groups: list[tuple[Tensor, ...]] | None
    process_set: Any
    backward_passes_per_step: int
    sparse_as_dense: bool
    horovod_wrapped: bool

    def group_indices(self, parameters: Parameters) -> list[tuple[int, ...]] | None:
        """The groups as positions in the list of parameters; what is frozen is in none."""
        if self.groups is None:
            return None
        index_of = parameters.index_of
        indices = [tuple(index_of[p] for p in group if p in index_of) for group in self.groups]
        return [group for group in indices if group]


def read_request(optimizer: torch.optim.Optimizer, **given: Any) -> Request:
    if horovod.is_wrapped(optimizer):
        return _read_wrapped_request(optimizer, given)
    passes = given["backward_passes_per_step"]
    compression = NoCompression if given["compression"] is None else given["compression"]
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise TypeError(
                f"compression={compression!r} has no method {method}(). Allowed: hvd.Compression.none, "
                "hvd.Compression.fp16, or an object with compress() and decompress()."
            )
    return Request(
        names=name_parameters(optimizer.param_groups, given["named_parameters"]),
        wire=WireFormat(compression=compression),
        groups=None,
        process_set=given["process_set"],
        backward_passes_per_step=1 if passes is None else check_backward_passes(passes),
        sparse_as_dense=bool(given["sparse_as_dense"]),
        horovod_wrapped=False,
    )


def _read_wrapped_request(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> Request:
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        raise ValueError(
            f"{', '.join(twice)} given for an optimizer that Horovod has wrapped. Give it to "
            "hvd.DistributedOptimizer, whose options are honoured."
        )
    options = horovod.read_wrapped(optimizer)
    return Request(
        names=options.names,
        wire=WireFormat(options.op, options.predivide, options.compression, options.groups is not None),
        groups=options.groups,
        process_set=options.process_set,
        backward_passes_per_step=options.backward_passes_per_step,
        sparse_as_dense=options.sparse_as_dense,
        horovod_wrapped=True,
    )


def refuse_other_engines(parameters: Parameters) -> None:
    """Raise where something else reduces these gradients too, or changes the number of ranks.

    Raises:
        UsageError: naming it, and what to do instead.
    """
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UsageError(
            "Elastic Horovod changes the number of ranks while training, which a period cannot follow. "
            "Launch without --min-np/--max-np, and restart from the last checkpoint with another number "
            "of ranks: load_state_dict() allows it."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for module in _data_parallel_modules():
            if any(parameter in parameters.index_of for parameter in module.parameters()):
                raise UsageError(
                    f"The model is wrapped by {type(module).__name__}, which reduces every gradient in every "
                    "backward. Train the module inside it (its .module) and let this optimizer "
                    "communicate."
                )


def _data_parallel_modules() -> list[torch.nn.Module]:
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel)
    return [thing for thing in gc.get_objects() if issubclass(type(thing), wrappers)]


def read_communicator(request: Request, communicator: Communicator | str) -> Communicator | None:
    """The engine, or None for one rank."""
    if isinstance(communicator, str):
        if request.horovod_wrapped:
            if communicator not in ("auto", "horovod"):
                raise ValueError(
                    f"communicator={communicator!r} was given for an optimizer that Horovod has wrapped, "
                    "which only Horovod serves. Leave it out, or pass the bare optimizer with "
                    "named_parameters=."
                )
            if not request.process_set.included():
                return None
        chosen = choose_communicator(communicator, request.process_set)
    elif isinstance(communicator, Communicator):
        chosen = communicator
    else:
        raise TypeError(
            f"communicator={communicator!r} is no engine's name and lacks methods of ssd_allreduce."
            f"communicators.Communicator. Allowed: {', '.join(map(repr, NAMES))}, ssd_allreduce."
            "Loopback(size), or such an object."
        )
    return chosen if chosen.size > 1 else None
