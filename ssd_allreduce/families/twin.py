"""Any other ``torch.optim.Optimizer``: its own step code, run on twins that share or copy its state.

State is what the code keeps for each parameter, under other keys of its state, and in its param groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ssd_allreduce import layout
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.base_optimizer import BaseOptimizer, owned, same_value, without_parameters
from ssd_allreduce.compensation import GlobalState, LocalRule
from ssd_allreduce.families import noise
from ssd_allreduce.group_options import GroupOptions, Option, StepOptions
from ssd_allreduce.ops import Accumulation, Correction, accumulate_
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.settings import Settings
from ssd_allreduce.update_family import Family, Replay

_SECOND_MOMENTS: dict[type[Optimizer], tuple[str, str]] = {
    torch.optim.RMSprop: ("square_avg", "alpha"),
    torch.optim.NAdam: ("exp_avg_sq", "betas[1]"),
    torch.optim.RAdam: ("exp_avg_sq", "betas[1]"),
    torch.optim.Adadelta: ("square_avg", "rho"),
}
"""The running mean of squared gradients of classes that have one, and the option that is its decay."""


class TwinFamily(Family):
    """An optimizer that is known only by its ``step()``.

    Attributes:
        kept: options that the global steps have changed: they are state, and set by nobody else.
    """

    reads_lr = False

    def __init__(self, base: BaseOptimizer, parameters: Parameters) -> None:
        super().__init__(base, parameters)
        self.kept: set[Option] = set()
        self._second_moment = next(
            (known for kind, known in _SECOND_MOMENTS.items() if issubclass(base.kind, kind)), None
        )
        self.needs_squares = self._second_moment is not None
        self._global: Optimizer | None = None
        self._stepped_by_global: Sequence[Tensor] | None = None

    def check(self, settings: Settings) -> None:
        super().check(settings)
        name = attribute_with_parameters(self.base)
        if name is not None:
            raise TypeError(
                f"{self.base.kind.__module__}.{self.base.kind.__qualname__} is not supported: its attribute "
                f"{name!r} holds parameters, or another optimizer, and its step would find them there when "
                "it has to step the global weights. Allowed: optimizers that take parameters from their "
                "param groups alone."
            )

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """What a step with a zero gradient on a copy leaves behind."""
        probe = torch.nn.Parameter(parameter.detach().clone())
        probe.grad = torch.zeros_like(probe)
        twin = make_twin(self.base, [{**_group_state(group), "params": [probe]}])
        twin.state.update(owned(self.base.shared_state))
        self.base.step(twin)
        return dict(twin.state[probe])

    def momentum_rule(self, gradient_scale: float) -> LocalRule:
        return TwinRule(self, gradient_scale)

    def replay(self, weights: Sequence[Tensor], replay: Replay) -> None:
        twin = self._global_twin(weights)
        state = self.base.state
        twin.state.update(self.base.shared_state)
        for parameter, weight in zip(self.parameters.tensors, weights, strict=True):
            if parameter in state:
                twin.state[weight] = state[parameter]
        before = None
        if replay.correction == Correction.DISPLACEMENT:
            before = [weight.clone() for weight in weights]
        for position, options in enumerate(replay.steps):
            self._put_back_noise(twin, weights, replay, position)
            # Some optimizers edit their gradients, so each step gets its own.
            for index, weight in enumerate(weights):
                weight.grad = layout.empty_like(weight).copy_(noise.mean_gradient(replay, index))
            step_twin(self.base, twin, options, self.kept)
        state.update(without_parameters(twin.state))
        self._keep_groups(twin, replay.steps[-1].layout)
        for parameter, weight in zip(self.parameters.tensors, weights, strict=True):
            weight.grad = None
            if weight in twin.state:
                state[parameter] = twin.state[weight]
        self._store_corrections(weights, before, replay)

    def _global_twin(self, weights: Sequence[Tensor]) -> Optimizer:
        if self._global is None or self._stepped_by_global is not weights:
            self._stepped_by_global = weights
            members: list[list[Tensor]] = [[] for _ in self.base.groups]
            for weight, group in zip(weights, self.parameters.group_of, strict=True):
                members[group].append(weight)
            groups = [{**g, "params": m} for g, m in zip(self.base.groups, members, strict=True)]
            self._global = make_twin(self.base, groups)
        self._global.state = defaultdict(dict)
        take_groups(self._global, self.base.groups)
        return self._global

    def _keep_groups(self, twin: Optimizer, layout: GroupOptions) -> None:
        """Store in the user's groups what the steps have put into the twin's."""
        options = layout.options - self.kept
        for index, (own, stepped) in enumerate(zip(self.base.groups, twin.param_groups, strict=True)):
            for name, value in stepped.items():
                # What a row has set is the scheduler's, which may be ahead of the row.
                is_state = name != "params" and (index, name) not in options
                if is_state and not (name in own and same_value(own[name], value)):
                    own[name] = value

    def _put_back_noise(
        self, twin: Optimizer, weights: Sequence[Tensor], replay: Replay, position: int
    ) -> None:
        """Raise the second moment beforehand by what the step's own ``G ** 2`` will lack."""
        if self._second_moment is None:
            return
        key, decay_option = self._second_moment
        for index, weight in enumerate(weights):
            moment = twin.state[weight].get(key) if weight in twin.state else None
            decay = replay.steps[position](self.parameters.group_of[index], decay_option)
            if moment is not None and decay > 0.0:
                extra = noise.gradient_variance(replay, index) * noise.missing_noise(replay, position)
                moment.add_(extra, alpha=(1.0 - decay) / decay)

    def _store_corrections(
        self, weights: Sequence[Tensor], before: Sequence[Tensor] | None, replay: Replay
    ) -> None:
        for index, correction in enumerate(replay.corrections or ()):
            if before is None:
                correction.copy_(noise.mean_gradient(replay, index))
                continue
            group = self.parameters.group_of[index]
            rate = sum(options(group, "lr") for options in replay.steps)
            if rate != 0.0:
                correction.copy_(before[index]).sub_(weights[index]).div_(rate)


def make_twin(base: BaseOptimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A shallow copy of the user's optimizer with groups and state of its own, and without its hooks."""
    twin: Optimizer = object.__new__(base.kind)
    hidden = ("param_groups", "state", "step", "add_param_group", "synchronize")
    twin.__dict__.update({k: v for k, v in base.given.__dict__.items() if k not in hidden})
    for name, value in twin.__dict__.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            # A step that calls the one of its base class runs them, and they are for the user's steps.
            twin.__dict__[name] = type(value)()
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def _group_state(group: dict[str, Any]) -> dict[str, Any]:
    return {name: owned(value) for name, value in group.items() if name not in ("params", "param_names")}


def take_groups(twin: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Give a twin copies of all that groups hold beside their parameters."""
    for own, group in zip(twin.param_groups, groups, strict=True):
        own.update(_group_state(group))


def step_twin(base: BaseOptimizer, twin: Optimizer, options: StepOptions, kept: set[Option]) -> None:
    """One step of the user's code on a twin.

    Args:
        base: the user's optimizer.
        twin: what its code runs on, with gradients.
        options: of the step.
        kept: options that steps have changed themselves, which are left alone; grows.
    """
    options.write(twin.param_groups, kept)
    before = options.layout.read(twin.param_groups)
    base.step(twin)
    kept |= options.layout.changed(twin.param_groups, before)


def attribute_with_parameters(base: BaseOptimizer) -> str | None:
    """The name of an attribute of the user's optimizer that holds parameters or another optimizer."""
    members = {id(parameter) for group in base.groups for parameter in group["params"]}
    for name, value in base.own_attributes.items():
        if _holds(value, members, _DEPTH):
            return name
    return None


_DEPTH = 3


def _holds(value: Any, members: set[int], depth: int) -> bool:
    if isinstance(value, Optimizer) or id(value) in members:
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return value in members
    if depth == 0 or not isinstance(value, dict | list | tuple | set | frozenset):
        return False
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return any(_holds(item, members, depth - 1) for item in inside)


class TwinRule(LocalRule):
    """The base optimizer's own step on the local weights, its state copied from the global one."""

    can_be_gated = False

    def __init__(self, family: TwinFamily, gradient_scale: float) -> None:
        super().__init__(family.parameters, gradient_scale)
        self._base = family.base
        members: list[list[Tensor]] = [[] for _ in self._base.groups]
        for parameter, group in zip(self.parameters.tensors, self.parameters.group_of, strict=True):
            members[group].append(parameter)
        self._members = members
        # Groups that are added join later, with a rule of their own.
        self._groups = list(self._base.groups)
        self._twin: Optimizer | None = None
        self._family = family
        self._kept: set[Option] = set()

    def seed(self, state: GlobalState) -> None:
        twin = self._local_twin()
        twin.state.update(owned(self._base.shared_state))
        take_groups(twin, self._groups)
        for parameter, entry in zip(self.parameters.tensors, state.entries(), strict=True):
            twin.state[parameter] = owned(entry)

    def _local_twin(self) -> Optimizer:
        if self._twin is None:
            groups = [
                {**group, "params": members}
                for group, members in zip(self._groups, self._members, strict=True)
            ]
            self._twin = make_twin(self._base, groups)
        return self._twin

    def local_step(
        self,
        options: StepOptions,
        gradients: Sequence[Tensor],
        sums: Sums,
        already_accumulated: frozenset[int],
        accumulation: Accumulation,
        found_inf: Tensor | None = None,
    ) -> None:
        rest = [i for i in range(len(self.parameters)) if i not in already_accumulated]
        accumulate_(
            [sums.gradients[i] for i in rest],
            [gradients[i] for i in rest],
            accumulation == Accumulation.OVERWRITE,
        )
        twin = self._local_twin()
        own = [p.grad for p in self.parameters.tensors]
        for parameter, gradient in zip(self.parameters.tensors, gradients, strict=True):
            # A copy: some optimizers edit their gradients, which are the user's.
            parameter.grad = gradient * self.gradient_scale
        try:
            step_twin(self._base, twin, options, self._kept)
        finally:
            for parameter, before in zip(self.parameters.tensors, own, strict=True):
                parameter.grad = before

    def update(self, *args: Any) -> None:
        raise AssertionError("the twin steps all parameters together")

    def rebase(self, weights: Sequence[Tensor], state: GlobalState, steps: Sequence[StepOptions]) -> None:
        super().rebase(weights, state, steps)
        self.seed(state)

    def export_state(self) -> dict[str, Any]:
        twin = self._local_twin()
        return {
            **super().export_state(),
            "twin": [dict(twin.state[p]) for p in self.parameters.tensors],
            "twin_shared": without_parameters(twin.state),
            "twin_groups": [_group_state(group) for group in twin.param_groups],
            "kept": sorted(self._kept),
            "kept_globally": sorted(self._family.kept),
        }

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        twin = self._local_twin()
        for parameter, entry in zip(self.parameters.tensors, state["twin"], strict=True):
            twin.state[parameter] = owned(entry)
        # Older checkpoints lack these.
        twin.state.update(owned(state.get("twin_shared", {})))
        take_groups(twin, state.get("twin_groups", self._groups))
        self._kept = {(int(group), name) for group, name in state.get("kept", ())}
        self._family.kept = {(int(group), name) for group, name in state.get("kept_globally", ())}
