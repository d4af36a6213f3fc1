"""The parameters being trained, under their names, and how they are batched for the kernels."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import layout
from ssd_allreduce.errors import UsageError

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Batch:
    """Parameters that one kernel call can serve: one param group, one dtype, one device.

    Attributes:
        group: index of the param group.
        indices: positions in :attr:`Parameters.tensors`.
    """

    group: int
    indices: tuple[int, ...]


class Parameters:
    """The trainable parameters of an optimizer, in the order of its param groups.

    Args:
        groups: the optimizer's ``param_groups``.
        names: name of each parameter.

    Raises:
        TypeError: a parameter has a dtype or layout that cannot be trained.
        ValueError: nothing is trainable, or a parameter is there twice.
    """

    def __init__(self, groups: list[dict[str, Any]], names: dict[Tensor, str]) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.group_of: list[int] = []
        self.frozen: list[Tensor] = []
        self.frozen_names: list[str] = []
        seen: set[Tensor] = set()
        for group_index, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter in seen:
                    raise ValueError(
                        f"Parameter {names[parameter]!r} is in param_groups[{group_index}] twice, and each "
                        "step would be made twice on it. Allowed: each parameter once."
                    )
                seen.add(parameter)
                if not parameter.requires_grad:
                    self.frozen.append(parameter)
                    self.frozen_names.append(names[parameter])
                    continue
                _refuse_untrainable(names[parameter], parameter)
                self.tensors.append(parameter)
                self.names.append(names[parameter])
                self.group_of.append(group_index)
        if not self.tensors:
            raise ValueError(
                f"None of the optimizer's {len(self.frozen)} parameters requires a gradient. Allowed: at "
                "least one trainable parameter; unfreeze before wrapping."
            )
        self._groups = groups
        self._members = [list(group["params"]) for group in groups]
        self._member_counts = [len(members) for members in self._members]
        self._known_names = names
        self.index_of = {parameter: index for index, parameter in enumerate(self.tensors)}
        self.batches = self._make_batches()

    def __len__(self) -> int:
        return len(self.tensors)

    def _make_batches(self) -> list[Batch]:
        batches: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
        for index, (parameter, group) in enumerate(zip(self.tensors, self.group_of, strict=True)):
            key = (group, parameter.dtype, parameter.device)
            batches.setdefault(key, []).append(index)
        return [Batch(key[0], tuple(indices)) for key, indices in batches.items()]

    def find_newcomer(self, thoroughly: bool = True) -> UsageError | None:
        """An error that says what has become trainable since, or was put into or out of a group.

        Args:
            thoroughly: look at each parameter of the groups, and not only at how many there are.
        """
        edited = self.find_edit() if thoroughly or self._counts_differ() else None
        if edited is not None:
            return edited
        if len(self._groups) != len(self._members):
            return UsageError(
                f"{len(self._groups) - len(self._members)} param groups were added since the ranks agreed "
                "on the tensors that they exchange. Call flush() on all ranks after add_param_group()."
            )
        if not self.frozen:
            return None
        for parameter, name in zip(self.frozen, self.frozen_names, strict=True):
            if parameter.requires_grad:
                return UsageError(
                    f"Parameter {name!r} was frozen (requires_grad=False) when the ranks agreed on the "
                    "tensors that they exchange, and is trainable now. Call flush() on all ranks after "
                    "unfreezing."
                )
        return None

    def _counts_differ(self) -> bool:
        # Asked in every step, so that it may cost no more than this.
        return [len(group["params"]) for group in self._groups] != self._member_counts

    def find_edit(self) -> UsageError | None:
        """An error that says how a group's list of parameters was edited, if one was.

        Groups that ``add_param_group()`` has added since are no edit.
        """
        if len(self._groups) < len(self._members):
            return _edit_error(f"{len(self._members) - len(self._groups)} param groups were removed")
        for index, (group, before) in enumerate(zip(self._groups, self._members, strict=False)):
            now = group["params"]
            # By identity: tensors compare element by element.
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return _edit_error(self._describe_edit(index, now, before))
        return None

    def refuse_edits(self, call: str) -> None:
        """Raise where a group's list of parameters was edited.

        Raises:
            UsageError: saying what was put in or taken out, and what to do instead.
        """
        edit = self.find_edit()
        if edit is not None:
            raise UsageError(f"{call}: {edit}")

    def _describe_edit(self, group: int, now: list[Tensor], before: list[Tensor]) -> str:
        place = f"param_groups[{group}]['params']"
        missing = [repr(self._known_names[p]) for p in before if not any(p is other for other in now)]
        new = [
            f"one of shape {tuple(p.shape)} at [{position}]"
            for position, p in enumerate(now)
            if not any(p is other for other in before)
        ]
        if not missing and not new:
            return f"{place} holds the same parameters in other places, or some of them twice"
        parts = [("is without", missing), ("has new parameters:", new)]
        return f"{place} " + " and ".join(f"{what} {_some(found)}" for what, found in parts if found)

    def have_changed(self) -> bool:
        """Whether other parameters are trainable now: unfrozen, frozen or added since.

        A model that is frozen as a whole, as for another one's step, will be trained again as it was.
        """
        trainable = [p for group in self._groups for p in group["params"] if p.requires_grad]
        if not trainable:
            return False
        if len(self._groups) != len(self._members):
            return True
        return len(trainable) != len(self.tensors) or any(p not in self.index_of for p in trainable)

    def new_accumulators(self) -> list[Tensor]:
        """Uninitialised tensors laid out like the parameters, float32 at least."""
        return [layout.empty_like(p, layout.compute_dtype(p.dtype)) for p in self.tensors]


def _edit_error(found: str) -> UsageError:
    return UsageError(
        f"{found}, compared with when the ranks agreed on the tensors that they exchange. Allowed: the "
        "parameters that were wrapped, in their places, and groups added since. Change a parameter in place "
        "(under torch.no_grad(), and then adopt_weights() on all ranks), add others by add_param_group() "
        "and flush() on all ranks, or close() this optimizer and wrap a new one."
    )


def _some(found: list[str]) -> str:
    """The first few, and how many more there are."""
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _refuse_untrainable(name: str, parameter: Tensor) -> None:
    if parameter.dtype not in _TRAINABLE:
        raise TypeError(
            f"Parameter {name!r} has dtype {parameter.dtype}. Allowed: float16, bfloat16, float32 and "
            "float64. Keep complex parameters as pairs of real ones (torch.view_as_real)."
        )
    grad_dtype = getattr(parameter, "grad_dtype", None)
    if grad_dtype not in (None, parameter.dtype):
        raise TypeError(
            f"Parameter {name!r} has dtype {parameter.dtype} and grad_dtype {grad_dtype}. Allowed: gradients "
            "of the parameter's own dtype; they are summed in float32 at least in any case."
        )
    if type(parameter.data).__module__.startswith("torch.distributed."):
        raise TypeError(
            f"Parameter {name!r} is a {type(parameter.data).__name__}, of which each rank holds a part. "
            "Allowed: models that every rank holds whole (no FSDP, no tensor parallelism)."
        )
    if parameter.layout != torch.strided:
        raise TypeError(
            f"Parameter {name!r} has layout {parameter.layout}. Only strided (dense) parameters can "
            "be trained; convert it with to_dense()."
        )


def name_parameters(
    groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Names from ``named_parameters``, else from the ``param_names`` that torch keeps in the groups.

    Raises:
        ValueError: names are missing or used twice.
        TypeError: ``named_parameters`` is no sequence of (name, parameter) pairs.
    """
    if named_parameters is not None:
        pairs = _checked_pairs(named_parameters)
    else:
        pairs = [
            pair
            for group in groups
            for pair in zip(group.get("param_names", ()), group["params"], strict=False)
        ]
    _refuse_duplicates([name for name, _ in pairs])
    names = {parameter: name for name, parameter in pairs}
    missing = [
        f"param_groups[{group_index}]['params'][{index}] of shape {tuple(parameter.shape)}"
        for group_index, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the optimizer have no name: {', '.join(missing[:5])}. Ranks "
            "match tensors by name. Pass named_parameters=model.named_parameters() with every "
            "parameter that the optimizer trains."
        )
    return names


def name_new_group(
    group: dict[str, Any], known: dict[Tensor, str], with_names: bool
) -> tuple[dict[str, Any], dict[Tensor, str]]:
    """A param group as torch takes it, and the names of all parameters with those of the group.

    Args:
        group: as given to ``add_param_group``; its parameters may come as (name, parameter) pairs.
        known: names known before.
        with_names: whether the optimizer's groups hold ``param_names``, which torch wants alike in all.

    Raises:
        ValueError: a name is missing or used twice.
        TypeError: a parameter cannot be trained.
    """
    given = group["params"]
    members = [given] if isinstance(given, Tensor) else list(given)
    names = {**known, **{pair[1]: pair[0] for pair in members if isinstance(pair, tuple)}}
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    missing = [tuple(tensor.shape) for tensor in tensors if tensor not in names]
    if missing:
        raise ValueError(
            f"add_param_group(): {len(missing)} parameters have no name (shapes "
            f"{', '.join(map(str, missing[:5]))}). Ranks match tensors by name. Give (name, parameter) "
            "pairs, {'params': module.named_parameters(prefix=...)}, or all of the model's in "
            "named_parameters= when wrapping."
        )
    _refuse_duplicates(list(names.values()))
    for tensor in tensors:
        if tensor.requires_grad:
            _refuse_untrainable(names[tensor], tensor)
    params = [(names[tensor], tensor) for tensor in tensors] if with_names else tensors
    return {**group, "params": params}, names


def _checked_pairs(named_parameters: Iterable[Any]) -> list[tuple[str, Tensor]]:
    pairs = list(named_parameters)
    for pair in pairs:
        valid = (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], Tensor)
        )
        if not valid:
            raise TypeError(
                f"named_parameters must yield (name, parameter) pairs, got {pair!r:.80}. Pass "
                "model.named_parameters()."
            )
    return pairs


def _refuse_duplicates(names: list[str]) -> None:
    seen: set[str] = set()
    twice = sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(
            f"Parameter names must be unique; used more than once: {', '.join(twice[:5])}. When "
            "several models share the optimizer, prefix the names of each."
        )
