"""The user's optimizer under the wrapper: its own step code, and one state for all who hold it.

Up to three optimizer objects stand for the same training: the user's own, Horovod's wrapper of it, and
ours. Schedulers and checkpoint code may hold any of them, and torch's ``load_state_dict`` replaces the
``param_groups`` and ``state`` of the one it is called on. All of them share one list of groups and one
state here, also after a load.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssd_allreduce.communicators import horovod
from ssd_allreduce.errors import UsageError

ENTRY = "ssd_allreduce"
"""Key of the wrapper's own entry in an optimizer's state, where all other keys are parameters."""

InitialState: TypeAlias = Callable[[Tensor, dict[str, Any]], dict[str, Any]]
"""Gives the state that a first step would create, of a parameter and its group."""


def optimizers_sharing_groups(optimizer: Optimizer) -> list[Optimizer]:
    """Other optimizer objects in this process that hold the same param group dictionaries.

    Horovod's wrapper keeps no reference to the optimizer that it wraps, only the groups, so the
    user's own object is found through them.
    """
    lists = [holder for holder in gc.get_referrers(*optimizer.param_groups) if type(holder) is list]
    owners = gc.get_referrers(*lists) if lists else []
    attributes = [owner for owner in owners if type(owner) is dict]
    # Where an object's attributes lie in a dictionary, that refers to the list in the object's place.
    owners += gc.get_referrers(*attributes) if attributes else []
    found = {id(owner): owner for owner in owners if issubclass(type(owner), Optimizer)}
    return [
        candidate
        for candidate in found.values()
        if candidate is not optimizer and _shares_a_group(candidate, optimizer)
    ]


def _shares_a_group(one: Optimizer, other: Optimizer) -> bool:
    groups = {id(group) for group in other.param_groups}
    return any(id(group) in groups for group in one.__dict__.get("param_groups", ()))


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """An optimizer class's step without the hook machinery that torch wraps around it."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class BaseOptimizer:
    """The optimizer that was given to the wrapper.

    Args:
        given: the user's optimizer, or Horovod's wrapper of it.

    Attributes:
        kind: the user's optimizer class.
        groups: the shared param groups.
        state: the shared optimizer state, keyed by parameter.
    """

    def __init__(self, given: Optimizer) -> None:
        self.given = given
        self.kind = horovod.base_class(given)
        refuse_differentiable(given.param_groups)
        self.groups: list[dict[str, Any]] = given.param_groups
        self.state: Any = given.state
        self.on_load: Callable[[dict[str, Any] | None], None] = lambda _: None
        """Called after a load through an object under the wrapper, with the wrapper's own entry if any."""
        self.before_load: Callable[[dict[str, Any]], None] = lambda _: None
        """Called before such a load, with the state dict; may refuse it."""
        self._horovod_wrapped = horovod.is_wrapped(given)
        self._relatives: list[Optimizer] = []
        self._step = plain_step(self.kind)
        self._materialised: dict[Tensor, dict[str, Any]] = {}
        self._undo: list[Callable[[], None]] = []

    def attach(self, relatives: Iterable[Optimizer]) -> None:
        """Take the optimizer and its relatives, which share its groups, under the wrapper."""
        self._relatives = [self.given, *relatives]
        for relative in self._relatives:
            self.share_with(relative)
            before = relative.register_load_state_dict_pre_hook(self._before_load)
            after = relative.register_load_state_dict_post_hook(self._after_load)
            self._undo += [before.remove, after.remove]
        self._shadow_methods()

    def _shadow_methods(self) -> None:
        message = (
            "This optimizer is driven by ssd_allreduce.DistributedOptimizer. Call {} on that one, or "
            "call its close() to get this optimizer's own behaviour back."
        )
        methods = ("step", "synchronize") if self._horovod_wrapped else ("step",)
        for method in methods:
            refusal = message.format(method + "()")
            self._undo.append(refusing(self.given, method, refusal))
        for relative in self._relatives:
            self._undo.append(refusing(relative, "add_param_group", message.format("add_param_group()")))
        if self._horovod_wrapped:
            horovod.silence(self.given)
            self._undo.append(lambda: horovod.restore(self.given))

    def share_with(self, optimizer: Optimizer) -> None:
        """Make an optimizer object hold the shared groups and state."""
        optimizer.param_groups = self.groups
        optimizer.state = self.state

    def _before_load(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        self.before_load(state_dict)

    def _after_load(self, optimizer: Optimizer) -> None:
        entry = self.take_over(optimizer.param_groups, optimizer.state)
        self.share_with(optimizer)
        if self._horovod_wrapped:
            horovod.silence(self.given)
        self.on_load(entry)

    def take_over(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> dict[str, Any] | None:
        """Put loaded groups and state into the shared ones, so that every holder sees them.

        Returns:
            The wrapper's own entry, if the loaded state has one.
        """
        entry = state.pop(ENTRY, None)
        if groups is not self.groups:
            for mine, loaded in zip(self.groups, groups, strict=True):
                mine.clear()
                mine.update(loaded)
        if state is not self.state:
            entries = {key: owned(value) for key, value in state.items()}
            self.state.clear()
            self.state.update(entries)
        self._materialised = {}
        return None if entry is None else dict(entry)

    def complete_loaded_state(self) -> None:
        """Let the user's class mend what was loaded, as the end of its own ``load_state_dict()`` does.

        torch's classes give groups of older checkpoints the options that these lack, make tensors of
        step counts, and AdamW marks its groups as its own, from whichever class they come.
        """
        self.given.__setstate__({"state": self.state, "param_groups": self.groups})

    def step(self, instance: Optimizer | None = None) -> None:
        """One step of the user's own optimizer code; runs no hooks.

        Args:
            instance: what the code runs on; by default the user's optimizer itself.
        """
        self._step(self.given if instance is None else instance)

    def state_tensors(self, parameters: Iterable[Tensor], key: str) -> list[Tensor | None]:
        """One kind of state of each parameter, None where there is none."""
        return [self.state[p].get(key) if p in self.state else None for p in parameters]

    def run_hooks(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the step hooks (``"pre"`` or ``"post"``) registered on the objects under the wrapper."""
        attribute = f"_optimizer_step_{kind}_hooks"
        for relative in self._relatives:
            hooks = getattr(relative, attribute)
            if hooks:
                for hook in list(hooks.values()):
                    hook(relative, args, kwargs)

    def mark_stepped(self) -> None:
        """Tell schedulers attached to the objects under the wrapper that a step was made."""
        for relative in self._relatives:
            relative._opt_called = True  # type: ignore[attr-defined]

    @property
    def own_attributes(self) -> dict[str, Any]:
        """What the user's class may have put into its instance, beside groups and state."""
        others = {"param_groups", "state", "defaults", *(horovod.ATTRIBUTES if self._horovod_wrapped else ())}
        return {name: value for name, value in self.given.__dict__.items() if name not in others}

    @property
    def shared_state(self) -> dict[Any, Any]:
        """State that belongs to no single parameter, which some optimizers keep under keys of their own."""
        return without_parameters(self.state)

    @property
    def option_names(self) -> tuple[str, ...]:
        """The options that the optimizer's code reads from its groups."""
        if self.kind.__module__.startswith("torch."):
            return tuple(self.given.defaults)
        # Others may declare only some of their options, and find the rest in the groups they are given.
        found = dict.fromkeys(self.given.defaults)
        for group in self.groups:
            found.update(dict.fromkeys(name for name in group if not _is_for_others(name)))
        return tuple(found)

    def materialise_state(self, initial: InitialState) -> None:
        """Create the state that the first step would create, so that a broadcast finds it.

        ``hvd.broadcast_optimizer_state`` sends what ``state_dict()`` holds; a rank with no state yet
        would send nothing while another, resumed from a checkpoint, sends its own.

        Args:
            initial: the state of a parameter, given it and its group.
        """
        for group in self.groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not self.state.get(parameter):
                    entry = initial(parameter, group)
                    if entry:
                        self.state[parameter] = entry
                        self._materialised[parameter] = owned(entry)

    def initial_state_places(self) -> list[int]:
        """The parameters, as state dicts number them, whose state was created and never overwritten."""
        return [place for place, p in enumerate(self._all_parameters()) if self._is_as_created(p)]

    def regard_state_as_initial(self, places: Iterable[int]) -> None:
        """The present state of these parameters is what was created for a broadcast, stored and loaded."""
        parameters = self._all_parameters()
        for parameter in (parameters[place] for place in places):
            if parameter in self.state:
                self._materialised[parameter] = owned(self.state[parameter])

    def places_with_state_like(self, initial: InitialState) -> list[int]:
        """The parameters whose state is what :meth:`materialise_state` would create."""
        members = [(p, group) for group in self.groups for p in group["params"]]
        return [
            place
            for place, (p, group) in enumerate(members)
            if p in self.state and _same_entry(self.state[p], initial(p, group))
        ]

    @property
    def has_materialised_state(self) -> bool:
        """Whether state was created for a broadcast, and no step has been made since."""
        return bool(self._materialised)

    def has_real_state(self) -> list[bool]:
        """Of each parameter: whether it has state that was not just created here."""
        return [bool(self.state.get(p)) and not self._is_as_created(p) for p in self._all_parameters()]

    def discard_materialised_state(self, keep: Collection[int] = ()) -> None:
        """Drop created state that nothing has overwritten: first steps tell none from zero.

        Args:
            keep: places of parameters whose state is real on another rank, which may have sent zeros.
        """
        for place, parameter in enumerate(self._all_parameters()):
            if place not in keep and self._is_as_created(parameter):
                del self.state[parameter]
        self._materialised = {}

    def _is_as_created(self, parameter: Tensor) -> bool:
        created = self._materialised.get(parameter)
        return created is not None and _same_entry(self.state.get(parameter, {}), created)

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def release(self) -> None:
        """Give the objects under the wrapper their own behaviour back."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []


_OF_SCHEDULERS = ("initial_", "max_", "min_", "base_", "swa_")


def _is_for_others(name: str) -> bool:
    """Whether an entry of a group is no option of the optimizer's, but torch's own or a scheduler's."""
    return name in ("params", "param_names") or name.startswith(_OF_SCHEDULERS)


def without_parameters(state: dict[Any, Any]) -> dict[Any, Any]:
    """The part of an optimizer's state that lies under keys that are no parameters."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def owned(value: Any) -> Any:
    """A copy of state, with all tensors in it, however deep its lists and dictionaries are."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: owned(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(owned(item) for item in value)
    return copy.deepcopy(value)


def _same_entry(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)


def same_value(one: Any, other: Any) -> bool:
    """Whether two pieces of state are equal, however deep their lists and dictionaries are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # Step counts may lie on another device after a load.
        return one.shape == other.shape and torch.equal(one, other.to(one))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return _same_entry(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other)


def refuse_differentiable(groups: Iterable[dict[str, Any]]) -> None:
    """Raise where a group asks for steps that autograd can follow.

    Raises:
        ValueError: it does.
    """
    if any(group.get("differentiable") for group in groups):
        raise ValueError(
            "differentiable=True is not supported: steps are made outside of autograd. Allowed: "
            "differentiable=False."
        )


def refusing(optimizer: Any, method: str, message: str) -> Callable[[], None]:
    """Shadow a method of one optimizer instance by a refusal; returns what undoes it."""
    had = method in optimizer.__dict__
    before = optimizer.__dict__.get(method)

    def refuse(*args: object, **kwargs: object) -> None:
        raise UsageError(message)

    # A learning rate scheduler looks for this mark, and warns when it is gone.
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(optimizer, method, refuse)

    def undo() -> None:
        if had:
            setattr(optimizer, method, before)
        else:
            optimizer.__dict__.pop(method, None)

    return undo
