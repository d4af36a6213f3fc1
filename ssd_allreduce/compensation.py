"""The GLU rules: how the global gradient enters the local updates, and the rebase after a completion.

One class per form of rule. Sections named are those of the SSD-SGD paper (doi 10.1145/3563038), whose
local update is the ``displacement`` rule; the others read the global gradient off other quantities.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.global_model import StepOptions
from ssd_allreduce.ops import Accumulation, Correction
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.settings import Settings


class LocalRule(abc.ABC):
    """A GLU rule over all parameters.

    Args:
        parameters: the trained parameters, whose local weights the rule updates.
        gradient_scale: factor on local gradients; the world size where the user chose ``op=Sum``.
    """

    correction = Correction.NONE

    def __init__(self, parameters: Parameters, gradient_scale: float) -> None:
        self._parameters = parameters
        self._gradient_scale = gradient_scale
        self._weight_snapshots: list[Tensor] | None = None

    @property
    def corrections(self) -> list[Tensor] | None:
        """Tensors that the replay fills for this rule, if it reads any."""
        return None

    @abc.abstractmethod
    def seed(self, momenta: Sequence[Tensor | None]) -> None:
        """Take the rule's state from the global state. Called when local equals global weights."""

    def observe_warmup(self, before: Sequence[Tensor] | None, options: StepOptions) -> None:  # noqa: B027
        """Follow a step of the warm-up stage; ``before`` holds the weights before it if asked for."""

    @property
    def wants_weights_before_warmup_step(self) -> bool:
        """Whether :meth:`observe_warmup` needs the weights before the step."""
        return False

    def local_step(
        self,
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        already_accumulated: frozenset[int],
        accumulation: Accumulation,
    ) -> None:
        """Update the local weights and accumulate, in one pass over memory.

        Args:
            options: options in force.
            gradients: local gradient of every parameter.
            accumulators: where gradients are summed.
            already_accumulated: indices whose gradient is in the accumulator already.
            accumulation: how the others are accumulated.
        """
        for group, indices, mode in self._passes(already_accumulated, accumulation):
            self._update(group, indices, options, gradients, accumulators, mode)

    def _passes(
        self, already_accumulated: frozenset[int], accumulation: Accumulation
    ) -> Iterator[tuple[int, list[int], Accumulation]]:
        for batch in self._parameters.batches:
            if not already_accumulated:
                yield batch.group, list(batch.indices), accumulation
                continue
            done = [i for i in batch.indices if i in already_accumulated]
            rest = [i for i in batch.indices if i not in already_accumulated]
            if done:
                yield batch.group, done, Accumulation.NONE
            if rest:
                yield batch.group, rest, accumulation

    @abc.abstractmethod
    def _update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        """Update the parameters at the given indices."""

    def _sign(self, group: int, options: StepOptions) -> float:
        return -1.0 if options(group, "maximize") else 1.0

    def snapshot(self) -> None:
        """Remember the local state of the sync point, for the rebase."""
        if self._weight_snapshots is None:
            self._weight_snapshots = self._parameters.new_accumulators()
        torch._foreach_copy_(self._weight_snapshots, self._parameters.tensors)

    def follow(self, weights: Sequence[Tensor], momenta: Sequence[Tensor | None]) -> None:
        """Copy the global state: no local step has been made since the sync point."""
        torch._foreach_copy_(self._parameters.tensors, list(weights))
        self.seed(momenta)

    def rebase(
        self,
        weights: Sequence[Tensor],
        momenta: Sequence[Tensor | None],
        steps: Sequence[StepOptions],
    ) -> None:
        """Move the local steps made since the sync point to the new global state.

        Args:
            weights: the new global weights.
            momenta: the new global momenta.
            steps: the options of the local steps since the sync point.
        """
        self._shift(range(len(self._parameters)), weights)

    def _shift(self, indices: Container[int], weights: Sequence[Tensor]) -> None:
        assert self._weight_snapshots is not None
        snapshots = self._weight_snapshots
        for batch in self._parameters.batches:
            chosen = [i for i in batch.indices if i in indices]
            if chosen:
                ops.rebase_shift_(
                    [self._parameters.tensors[i] for i in chosen],
                    [weights[i] for i in chosen],
                    [snapshots[i] for i in chosen],
                )

    def export_state(self) -> dict[str, Any]:
        """The rule's tensors, for a checkpoint."""
        return {"weight_snapshots": self._weight_snapshots}

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo :meth:`export_state`."""
        self._weight_snapshots = self._copied(state["weight_snapshots"])

    def _copied(self, tensors: Sequence[Tensor | None] | None) -> Any:
        """Copies of stored tensors in the layout and dtype of this rule's own."""
        if tensors is None:
            return None
        return [
            None if tensor is None else layout.empty_like(p, layout.compute_dtype(p.dtype)).copy_(tensor)
            for tensor, p in zip(tensors, self._parameters.tensors, strict=True)
        ]


class PlainRule(LocalRule):
    """``none``: ``w -= lr (g + wd w)``, local SGD without compensation."""

    def seed(self, momenta: Sequence[Tensor | None]) -> None:
        pass

    def _update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        ops.local_plain_(
            [self._parameters.tensors[i] for i in indices],
            [gradients[i] for i in indices],
            [accumulators[i] for i in indices] if accumulation != Accumulation.NONE else [],
            step_size=options(group, "lr"),
            gradient_weight=self._gradient_scale * self._sign(group, options),
            weight_decay=options(group, "weight_decay"),
            accumulation=accumulation,
        )


class CorrectedRule(LocalRule):
    """``gradient`` and ``displacement``: ``w -= c lr (alpha g + beta s + wd w)``.

    ``s`` is the last global mean gradient, or the last displacement of the global weights over the sum
    of its learning rates (the paper's form). Both are zero until the first global update.
    """

    def __init__(self, parameters: Parameters, gradient_scale: float, settings: Settings) -> None:
        super().__init__(parameters, gradient_scale)
        self._settings = settings
        self.correction = Correction.MEAN_GRADIENT if settings.glu == "gradient" else Correction.DISPLACEMENT
        self._corrections = [tensor.zero_() for tensor in parameters.new_accumulators()]

    @property
    def corrections(self) -> list[Tensor]:
        return self._corrections

    @property
    def wants_weights_before_warmup_step(self) -> bool:
        return self.correction == Correction.DISPLACEMENT

    def seed(self, momenta: Sequence[Tensor | None]) -> None:
        pass

    def observe_warmup(self, before: Sequence[Tensor] | None, options: StepOptions) -> None:
        if before is None:
            gradients = [p.grad for p in self._parameters.tensors]
            for correction, gradient in zip(self._corrections, gradients, strict=True):
                if gradient is not None:
                    correction.copy_(gradient)
            return
        for batch in self._parameters.batches:
            lr = options(batch.group, "lr")
            for i in batch.indices if lr != 0.0 else ():
                now = self._parameters.tensors[i]
                self._corrections[i].copy_(before[i]).sub_(now).div_(lr)

    def _update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        settings, sign = self._settings, self._sign(group, options)
        # A displacement already has the direction in which the optimizer moves.
        correction_sign = sign if self.correction == Correction.MEAN_GRADIENT else 1.0
        ops.local_corrected_(
            [self._parameters.tensors[i] for i in indices],
            [gradients[i] for i in indices],
            [self._corrections[i] for i in indices],
            [accumulators[i] for i in indices] if accumulation != Accumulation.NONE else [],
            step_size=settings.local_lr_scale * options(group, "lr"),
            gradient_weight=settings.alpha * self._gradient_scale * sign,
            correction_weight=settings.beta * correction_sign,
            weight_decay=options(group, "weight_decay"),
            accumulation=accumulation,
        )

    def export_state(self) -> dict[str, Any]:
        return {**super().export_state(), "corrections": self._corrections}

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        self._corrections = self._copied(state["corrections"])


class MomentumRule(LocalRule):
    """``momentum``: the base optimizer's own update, its momentum seeded with the global one."""

    def __init__(self, parameters: Parameters, gradient_scale: float) -> None:
        super().__init__(parameters, gradient_scale)
        self._plain = PlainRule(parameters, gradient_scale)
        # None until a step with momentum is made: SGD's first momentum is the gradient, undampened.
        self._momenta: list[Tensor | None] = [None] * len(parameters)
        self._momentum_snapshots: list[Tensor | None] = [None] * len(parameters)

    def seed(self, momenta: Sequence[Tensor | None]) -> None:
        for index, momentum in enumerate(momenta):
            own = self._momenta[index]
            if momentum is None:
                self._momenta[index] = None
            elif own is None:
                self._momenta[index] = self._new(index).copy_(momentum)
            else:
                own.copy_(momentum)

    def _new(self, index: int) -> Tensor:
        parameter = self._parameters.tensors[index]
        return layout.empty_like(parameter, layout.compute_dtype(parameter.dtype))

    def _update(
        self,
        group: int,
        indices: list[int],
        options: StepOptions,
        gradients: Sequence[Tensor],
        accumulators: Sequence[Tensor],
        accumulation: Accumulation,
    ) -> None:
        if options(group, "momentum") == 0.0:
            self._plain._update(group, indices, options, gradients, accumulators, accumulation)
            return
        started = [i for i in indices if self._momenta[i] is not None]
        fresh = [i for i in indices if self._momenta[i] is None]
        for index in fresh:
            self._momenta[index] = self._new(index).zero_()
        for chosen, dampening in ((started, options(group, "dampening")), (fresh, 0.0)):
            if not chosen:
                continue
            ops.local_momentum_(
                [self._parameters.tensors[i] for i in chosen],
                [gradients[i] for i in chosen],
                [self._momenta[i] for i in chosen],  # type: ignore[misc]
                [accumulators[i] for i in chosen] if accumulation != Accumulation.NONE else [],
                lr=options(group, "lr"),
                momentum=options(group, "momentum"),
                dampening=dampening,
                weight_decay=options(group, "weight_decay"),
                nesterov=options(group, "nesterov") != 0.0,
                maximize=options(group, "maximize") != 0.0,
                gradient_scale=self._gradient_scale,
                accumulation=accumulation,
            )

    def snapshot(self) -> None:
        super().snapshot()
        for index, momentum in enumerate(self._momenta):
            kept = self._momentum_snapshots[index]
            if momentum is None:
                self._momentum_snapshots[index] = None
            elif kept is None:
                self._momentum_snapshots[index] = momentum.clone()
            else:
                kept.copy_(momentum)

    def rebase(
        self,
        weights: Sequence[Tensor],
        momenta: Sequence[Tensor | None],
        steps: Sequence[StepOptions],
    ) -> None:
        assert self._weight_snapshots is not None
        for batch in self._parameters.batches:
            with_momentum = [i for i in batch.indices if momenta[i] is not None]
            self._shift(frozenset(batch.indices) - frozenset(with_momentum), weights)
            if not with_momentum:
                continue
            decay, reach = _momentum_reach(batch.group, steps)
            for index in with_momentum:
                self._momenta[index] = self._or_zeros(self._momenta[index], index)
                self._momentum_snapshots[index] = self._or_zeros(self._momentum_snapshots[index], index)
            ops.rebase_momentum_(
                [self._parameters.tensors[i] for i in with_momentum],
                [self._momenta[i] for i in with_momentum],  # type: ignore[misc]
                [weights[i] for i in with_momentum],
                [momenta[i] for i in with_momentum],  # type: ignore[misc]
                [self._weight_snapshots[i] for i in with_momentum],
                [self._momentum_snapshots[i] for i in with_momentum],  # type: ignore[misc]
                momentum_decay=decay,
                displacement_factor=reach,
            )

    def _or_zeros(self, tensor: Tensor | None, index: int) -> Tensor:
        return self._new(index).zero_() if tensor is None else tensor

    def export_state(self) -> dict[str, Any]:
        return {
            **super().export_state(),
            "momenta": self._momenta,
            "momentum_snapshots": self._momentum_snapshots,
        }

    def import_state(self, state: dict[str, Any]) -> None:
        super().import_state(state)
        self._momenta = self._copied(state["momenta"])
        self._momentum_snapshots = self._copied(state["momentum_snapshots"])


def _momentum_reach(group: int, steps: Sequence[StepOptions]) -> tuple[float, float]:
    """What is left of a momentum difference after the steps, and how far it moved the weights."""
    decay, reach = 1.0, 0.0
    for options in steps:
        momentum = options(group, "momentum")
        decay *= momentum
        lookahead = momentum if options(group, "nesterov") else 1.0
        reach += options(group, "lr") * decay * lookahead
    return decay, reach


def make_rule(settings: Settings, parameters: Parameters, gradient_scale: float) -> LocalRule:
    """The rule that ``glu`` names."""
    if settings.glu == "momentum":
        return MomentumRule(parameters, gradient_scale)
    if settings.glu == "none":
        return PlainRule(parameters, gradient_scale)
    return CorrectedRule(parameters, gradient_scale, settings)
