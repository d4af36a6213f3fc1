"""What a rank says of itself before training: the sections that all ranks must have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ssd_allreduce import agreement, ops
from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.global_model import GlobalModel
from ssd_allreduce.group_options import GroupOptions
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.schedule import Schedule
from ssd_allreduce.settings import Settings
from ssd_allreduce.wire import WireFormat


def describe_settings(
    settings: Settings, wire: WireFormat, units: Sequence[Sequence[str]], device_types: Iterable[str]
) -> tuple[str, agreement.Lines]:
    """The options of the algorithm and of the wire, which tensors travel together, and what updates them."""
    kernels = [(f"kernels for {kind}", ops.implementation(kind)) for kind in sorted(set(device_types))]
    lines = [*settings.describe(), *wire.describe(), *kernels]
    if wire.grouped:
        lines += [(f"group {number} of tensors", ", ".join(unit)) for number, unit in enumerate(units)]
    return "settings", lines


def describe_base(base: BaseOptimizer, options: GroupOptions) -> tuple[str, agreement.Lines]:
    """The optimizer's class and the options that are no numbers of a schedule."""
    lines = [("class", f"{base.kind.__module__}.{base.kind.__qualname__}")]
    for index, group in enumerate(base.groups):
        lines += [
            (f"param_groups[{index}][{option!r}]", repr(value))
            for option, value in sorted(group.items())
            if isinstance(value, bool) and option in base.option_names
        ]
    columns = ", ".join(options.name(column) for column in range(len(options)))
    return "the optimizer", [*lines, ("numeric options", columns)]


def describe_parameters(parameters: Parameters) -> tuple[str, agreement.Lines]:
    """Names, shapes, dtypes, layouts and groups of what is trained."""
    trainable = [(name, True) for name in parameters.names]
    frozen = [(name, False) for name in parameters.frozen_names]
    lines = [(f"requires_grad of {name!r}", str(flag)) for name, flag in sorted(trainable + frozen)]
    triples = zip(parameters.names, parameters.tensors, parameters.group_of, strict=True)
    for name, parameter, group in triples:
        lines += [
            (f"the shape of {name!r}", str(tuple(parameter.shape))),
            (f"the dtype of {name!r}", str(parameter.dtype)),
            (f"the strides of {name!r}", str(parameter.stride())),
            (f"the param group of {name!r}", str(group)),
        ]
    return "the parameters", lines


def describe_progress(schedule: Schedule) -> tuple[str, agreement.Lines]:
    """How far training has come, and the period in force."""
    lines = [
        ("the number of sync events", str(schedule.events)),
        ("the delay_steps in force", str(schedule.delay_steps)),
        ("the overlap_steps in force", str(schedule.overlap_steps)),
    ]
    return "progress", lines


def describe_weights(names: Sequence[str], weights: Sequence[Tensor]) -> tuple[str, agreement.Lines]:
    """Digests of the weights."""
    return "the weights", _digests(names, weights)


def describe_state(names: Sequence[str], model: GlobalModel) -> tuple[str, agreement.Lines]:
    """Digests of the base optimizer's state."""
    lines = []
    for name, entry in zip(names, model.entries(), strict=True):
        lines += [(f"the {key} of {name!r}", _text(value)) for key, value in sorted(entry.items())]
    shared = sorted(model.shared_state().items(), key=repr)
    lines += [(f"the state under {key!r}", _text(value)) for key, value in shared]
    return "the optimizer's state", lines


def _text(value: object) -> str:
    """A piece of state as ranks compare it: its tensors by their digests, however deep they lie."""
    if isinstance(value, Tensor):
        return agreement.tensor_digest(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _digests(names: Sequence[str], tensors: Sequence[Tensor]) -> agreement.Lines:
    return [
        (f"the digest of {name!r}", agreement.tensor_digest(tensor))
        for name, tensor in zip(names, tensors, strict=True)
    ]
