"""Local update, replay and rebase of Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_allreduce.reference.lists import (
    Accumulation,
    Correction,
    Lists,
    Tensors,
    accumulate,
    check_step_options,
    choice,
    store,
    store_corrections,
    to_compute,
)


@dataclass(frozen=True)
class _Options:
    """The options of one group in one step, as the user gave them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    def advance(
        self, step: int, w: Tensors, m: Tensors, u: Tensors, gradients: Tensors, variances: Tensors | None
    ) -> None:
        """One step on tensors of the compute dtype; ``step`` counts from 1."""
        coupled_decay = 0.0 if self.decoupled else self.weight_decay
        direction = torch._foreach_add(gradients, w, alpha=coupled_decay)
        if self.decoupled:
            torch._foreach_mul_(w, 1 - self.lr * self.weight_decay)
        torch._foreach_mul_(m, self.beta1)
        torch._foreach_add_(m, direction, alpha=1 - self.beta1)
        square = torch._foreach_mul(direction, direction)
        if variances is not None:
            torch._foreach_add_(square, variances)
        torch._foreach_mul_(u, self.beta2)
        torch._foreach_add_(u, square, alpha=1 - self.beta2)
        step_size = self.lr / (1 - self.beta1**step)
        update = torch._foreach_div(m, _denominators(u, self.beta2, self.eps, step))
        torch._foreach_add_(w, update, alpha=-step_size)


def _denominators(u: Tensors, beta2: float, eps: float, step: int) -> tuple[Tensor, ...]:
    roots = torch._foreach_sqrt(u)
    torch._foreach_mul_(roots, 1 / math.sqrt(1 - beta2**step))
    torch._foreach_add_(roots, eps)
    return roots


def _check_step(op: str, step: int, least: int) -> None:
    if step < least:
        raise ValueError(f"ssd_allreduce::{op}: step is {step}; allowed are integers of at least {least}")


@torch.no_grad()
def local_adam_(
    weights: Tensors,
    gradients: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    accumulators: Tensors,
    squares: Tensors,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    gradient_scale: float,
    step: int,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    accumulation = choice("local_adam_", "accumulation", accumulation, Accumulation)
    _check_step("local_adam_", step, 1)
    lists = Lists("local_adam_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("firsts", firsts)
    lists.state("seconds", seconds)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    lists.state("squares", squares, optional=accumulation == Accumulation.NONE)
    if not weights or lists.is_closed(found_inf):
        return
    w, g = to_compute(weights), to_compute(gradients)
    if accumulation != Accumulation.NONE:
        accumulate(accumulators, g, accumulation)
        accumulate(squares, torch._foreach_mul(g, g), accumulation)
    scaled = torch._foreach_mul(g, -gradient_scale if maximize else gradient_scale)
    options = _Options(lr, beta1, beta2, eps, weight_decay, decoupled)
    options.advance(step, w, firsts, seconds, scaled, None)
    store(weights, w)


@torch.no_grad()
def replay_adam_(
    weights: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    sums: Tensors,
    squares: Tensors,
    corrections: Tensors,
    count: int,
    divisor: float,
    steps_before: int,
    lrs: Sequence[float],
    beta1s: Sequence[float],
    beta2s: Sequence[float],
    epsilons: Sequence[float],
    weight_decays: Sequence[float],
    missing_noises: Sequence[float],
    decoupled: bool,
    maximize: bool,
    correction: int,
) -> None:
    if count < 1:
        raise ValueError(
            f"ssd_allreduce::replay_adam_: count is {count}; give the number of gradients, at least 1"
        )
    if divisor == 0:
        raise ValueError(
            "ssd_allreduce::replay_adam_: divisor is 0; give the number of gradients over the factor on "
            "their mean"
        )
    _check_step("replay_adam_", steps_before, 0)
    per_step = {
        "lrs": lrs,
        "beta1s": beta1s,
        "beta2s": beta2s,
        "epsilons": epsilons,
        "weight_decays": weight_decays,
        "missing_noises": missing_noises,
    }
    check_step_options("replay_adam_", per_step)
    correction = choice("replay_adam_", "correction", correction, Correction)
    lists = Lists("replay_adam_", "weights", weights)
    lists.parameters("firsts", firsts)
    lists.parameters("seconds", seconds)
    lists.state("sums", sums)
    lists.state("squares", squares)
    lists.state("corrections", corrections, optional=correction == Correction.NONE)
    if not weights:
        return
    w, m, u = to_compute(weights), to_compute(firsts), to_compute(seconds)
    before = [t.clone() for t in w] if correction == Correction.DISPLACEMENT else []
    mean = torch._foreach_div(sums, divisor)
    ascent = torch._foreach_neg(mean) if maximize else mean
    variances = _variances(sums, squares, count, divisor)
    for index, (lr, beta1, beta2, eps, weight_decay, missing_noise) in enumerate(
        zip(*per_step.values(), strict=True)
    ):
        extra = None if variances is None else torch._foreach_mul(variances, missing_noise)
        options = _Options(lr, beta1, beta2, eps, weight_decay, decoupled)
        options.advance(steps_before + index + 1, w, m, u, ascent, extra)
    store_corrections(corrections, correction, mean, before, w, sum(lrs))
    store(weights, w)
    store(firsts, m)
    store(seconds, u)


def _variances(sums: Tensors, squares: Tensors, count: int, divisor: float) -> tuple[Tensor, ...] | None:
    """The variance of a single gradient, scaled; None where only one was summed."""
    if count == 1:
        return None
    means = torch._foreach_div(sums, count)
    torch._foreach_mul_(means, means)
    variances = torch._foreach_div(squares, count)
    torch._foreach_sub_(variances, means)
    torch._foreach_clamp_min_(variances, 0.0)
    torch._foreach_mul_(variances, (count / divisor) ** 2 * count / (count - 1))
    return variances


@torch.no_grad()
def rebase_adam_(
    weights: Tensors,
    firsts: Tensors,
    seconds: Tensors,
    global_weights: Tensors,
    global_firsts: Tensors,
    global_seconds: Tensors,
    weight_snapshots: Tensors,
    first_snapshots: Tensors,
    second_snapshots: Tensors,
    first_decay: float,
    second_decay: float,
    displacement_factor: float,
    beta2: float,
    eps: float,
    step: int,
) -> None:
    _check_step("rebase_adam_", step, 1)
    lists = Lists("rebase_adam_", "weights", weights)
    lists.state("firsts", firsts)
    lists.state("seconds", seconds)
    lists.parameters("global_weights", global_weights)
    lists.parameters("global_firsts", global_firsts)
    lists.parameters("global_seconds", global_seconds)
    lists.state("weight_snapshots", weight_snapshots)
    lists.state("first_snapshots", first_snapshots)
    lists.state("second_snapshots", second_snapshots)
    if not weights:
        return
    w = to_compute(weights)
    weight_change = torch._foreach_sub(to_compute(global_weights), weight_snapshots)
    first_change = torch._foreach_sub(to_compute(global_firsts), first_snapshots)
    second_change = torch._foreach_sub(to_compute(global_seconds), second_snapshots)
    direction = torch._foreach_div(first_change, _denominators(seconds, beta2, eps, step))
    torch._foreach_add_(weight_change, direction, alpha=-displacement_factor)
    torch._foreach_add_(w, weight_change)
    torch._foreach_add_(firsts, first_change, alpha=first_decay)
    torch._foreach_add_(seconds, second_change, alpha=second_decay)
    torch._foreach_clamp_min_(seconds, 0.0)
    store(weights, w)
