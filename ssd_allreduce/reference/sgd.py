"""Local updates, replay and rebase of SGD and of the rules without state of their own."""

from __future__ import annotations

from collections.abc import Sequence

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


@torch.no_grad()
def local_momentum_(
    weights: Tensors,
    gradients: Tensors,
    momenta: Tensors,
    accumulators: Tensors,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    gradient_scale: float,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    accumulation = choice("local_momentum_", "accumulation", accumulation, Accumulation)
    lists = Lists("local_momentum_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("momenta", momenta)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights or lists.is_closed(found_inf):
        return
    w, g = to_compute(weights), to_compute(gradients)
    direction = torch._foreach_mul(g, -gradient_scale if maximize else gradient_scale)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, direction, alpha=1 - dampening)
    if nesterov:
        torch._foreach_add_(direction, momenta, alpha=momentum)
    accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction if nesterov else momenta, alpha=-lr)
    store(weights, w)


@torch.no_grad()
def local_corrected_(
    weights: Tensors,
    gradients: Tensors,
    corrections: Tensors,
    accumulators: Tensors,
    step_size: float,
    gradient_weight: float,
    correction_weight: float,
    weight_decay: float,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    accumulation = choice("local_corrected_", "accumulation", accumulation, Accumulation)
    lists = Lists("local_corrected_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("corrections", corrections)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights or lists.is_closed(found_inf):
        return
    w, g = to_compute(weights), to_compute(gradients)
    direction = torch._foreach_mul(g, gradient_weight)
    torch._foreach_add_(direction, corrections, alpha=correction_weight)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction, alpha=-step_size)
    store(weights, w)


@torch.no_grad()
def local_plain_(
    weights: Tensors,
    gradients: Tensors,
    accumulators: Tensors,
    step_size: float,
    gradient_weight: float,
    weight_decay: float,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    accumulation = choice("local_plain_", "accumulation", accumulation, Accumulation)
    lists = Lists("local_plain_", "weights", weights)
    lists.parameters("gradients", gradients)
    lists.state("accumulators", accumulators, optional=accumulation == Accumulation.NONE)
    if not weights or lists.is_closed(found_inf):
        return
    w, g = to_compute(weights), to_compute(gradients)
    direction = torch._foreach_mul(g, gradient_weight)
    torch._foreach_add_(direction, w, alpha=weight_decay)
    accumulate(accumulators, g, accumulation)
    torch._foreach_add_(w, direction, alpha=-step_size)
    store(weights, w)


@torch.no_grad()
def replay_sgd_(
    weights: Tensors,
    momenta: Tensors,
    sums: Tensors,
    corrections: Tensors,
    divisor: float,
    lrs: Sequence[float],
    momentum_factors: Sequence[float],
    dampenings: Sequence[float],
    weight_decays: Sequence[float],
    nesterov: bool,
    maximize: bool,
    momentum_initialised: bool,
    correction: int,
) -> None:
    correction = choice("replay_sgd_", "correction", correction, Correction)
    per_step = {
        "lrs": lrs,
        "momentum_factors": momentum_factors,
        "dampenings": dampenings,
        "weight_decays": weight_decays,
    }
    check_step_options("replay_sgd_", per_step)
    if divisor == 0:
        raise ValueError("ssd_allreduce::replay_sgd_: divisor is 0; give the number of gradients")
    lists = Lists("replay_sgd_", "weights", weights)
    lists.parameters("momenta", momenta, optional=not any(momentum_factors))
    lists.state("sums", sums)
    lists.state("corrections", corrections, optional=correction == Correction.NONE)
    if not weights:
        return
    w, v = to_compute(weights), to_compute(momenta)
    mean = torch._foreach_div(sums, divisor)
    ascent = torch._foreach_neg(mean) if maximize else mean
    before = [t.clone() for t in w] if correction == Correction.DISPLACEMENT else []
    for lr, momentum, dampening, weight_decay in zip(*per_step.values(), strict=True):
        direction = torch._foreach_add(ascent, w, alpha=weight_decay)
        update = direction
        if momentum != 0:
            if momentum_initialised:
                torch._foreach_mul_(v, momentum)
                torch._foreach_add_(v, direction, alpha=1 - dampening)
            else:
                torch._foreach_copy_(v, direction)
                momentum_initialised = True
            update = torch._foreach_add(direction, v, alpha=momentum) if nesterov else tuple(v)
        torch._foreach_add_(w, update, alpha=-lr)
    store_corrections(corrections, correction, mean, before, w, sum(lrs))
    store(weights, w)
    store(momenta, v)


@torch.no_grad()
def rebase_momentum_(
    weights: Tensors,
    momenta: Tensors,
    global_weights: Tensors,
    global_momenta: Tensors,
    weight_snapshots: Tensors,
    momentum_snapshots: Tensors,
    momentum_decay: float,
    displacement_factor: float,
) -> None:
    lists = Lists("rebase_momentum_", "weights", weights)
    lists.state("momenta", momenta)
    lists.parameters("global_weights", global_weights)
    lists.parameters("global_momenta", global_momenta)
    lists.state("weight_snapshots", weight_snapshots)
    lists.state("momentum_snapshots", momentum_snapshots)
    if not weights:
        return
    w = to_compute(weights)
    momentum_change = torch._foreach_sub(to_compute(global_momenta), momentum_snapshots)
    weight_change = torch._foreach_sub(to_compute(global_weights), weight_snapshots)
    torch._foreach_add_(weight_change, momentum_change, alpha=-displacement_factor)
    torch._foreach_add_(momenta, momentum_change, alpha=momentum_decay)
    torch._foreach_add_(w, weight_change)
    store(weights, w)


@torch.no_grad()
def rebase_shift_(weights: Tensors, global_weights: Tensors, weight_snapshots: Tensors) -> None:
    lists = Lists("rebase_shift_", "weights", weights)
    lists.parameters("global_weights", global_weights)
    lists.state("weight_snapshots", weight_snapshots)
    if not weights:
        return
    w = to_compute(weights)
    torch._foreach_add_(w, torch._foreach_sub(to_compute(global_weights), weight_snapshots))
    store(weights, w)
