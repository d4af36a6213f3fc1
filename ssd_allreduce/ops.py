"""``torch.ops.ssd_allreduce``: the elementwise work of SSD-SGD over lists of tensors.

Each operation makes one pass over memory, changes its tensors in place, records no autograd graph
and bumps the version counter of what it changed, so that a weight stepped between forward and
backward is noticed. It takes parameters that require grad, on any device and in any memory layout.

All lists of one call have equal length, and the tensors at one index have the same shape. Weights
and gradients may be float16, bfloat16, float32 or float64; global weights, momenta and moments, the
base optimizer's own, have the weight's dtype. Local momenta and moments, accumulators, squares, sums,
corrections and snapshots are float64 for float64 weights, else float32, and so is the arithmetic.

Local updates and accumulations take ``found_inf``, one float32 on the tensors' device, as torch's
GradScaler hands it to optimizers: where it is not 0, the call changes nothing. Compiled kernels read it
where they compute, so that nobody waits for a GPU; plain torch reads it on the host.

``IMPLEMENTATION`` says which kernels serve CPU tensors: ``"compiled"`` (``ssd_allreduce._C``) or
``"reference"`` (:mod:`ssd_allreduce.reference`, plain torch, several passes). The environment
variable ``SSD_ALLREDUCE_KERNELS`` demands one of the two; without it the compiled kernels are taken
where they are built, and a warning says so where they are not. :func:`implementation` says it of tensors on
any type of device, and :func:`check_kernels` warns, or fails, for those that an optimizer has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_allreduce.operator_library import (
    IMPLEMENTATION,
    ExtensionNotBuiltWarning,
    check_kernels,
    implementation,
)
from ssd_allreduce.reference import Accumulation, Correction

__all__ = [
    "IMPLEMENTATION",
    "Accumulation",
    "Correction",
    "ExtensionNotBuiltWarning",
    "accumulate_",
    "accumulate_squares_",
    "check_kernels",
    "checksum",
    "implementation",
    "local_adam_",
    "local_corrected_",
    "local_momentum_",
    "local_plain_",
    "rebase_adam_",
    "rebase_momentum_",
    "rebase_shift_",
    "replay_adam_",
    "replay_sgd_",
]

_ops = torch.ops.ssd_allreduce


def local_momentum_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    accumulators: Sequence[Tensor],
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
    """Local update of the ``momentum`` rule: SGD with momentum on the local weights.

    With ``g' = gradient_scale * g``, negated for ``maximize``::

        d = g' + weight_decay * w
        v = momentum * v + (1 - dampening) * d
        w = w - lr * (d + momentum * v if nesterov else v)

    ``accumulation`` (:class:`Accumulation`) says what becomes of the accumulators: they stay (and
    may be an empty list), ``A += g``, or ``A = g`` without reading them; ``g`` is the gradient as
    given, neither scaled nor negated.
    """
    _ops.local_momentum_.default(
        weights,
        gradients,
        momenta,
        accumulators,
        lr,
        momentum,
        dampening,
        weight_decay,
        nesterov,
        maximize,
        gradient_scale,
        int(accumulation),
        found_inf,
    )


def local_corrected_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    corrections: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    step_size: float,
    gradient_weight: float,
    correction_weight: float,
    weight_decay: float,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    """Local update of the ``gradient`` and ``displacement`` rules (SSD-SGD's GLU).

    ``w = w - step_size * (gradient_weight * g + correction_weight * s + weight_decay * w)``, with
    ``s`` the correction that the last :func:`replay_sgd_` left. ``accumulation`` as in
    :func:`local_momentum_`.
    """
    _ops.local_corrected_.default(
        weights,
        gradients,
        corrections,
        accumulators,
        step_size,
        gradient_weight,
        correction_weight,
        weight_decay,
        int(accumulation),
        found_inf,
    )


def local_plain_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    step_size: float,
    gradient_weight: float,
    weight_decay: float,
    accumulation: int,
    found_inf: Tensor | None = None,
) -> None:
    """Local update of the ``none`` rule, plain local SGD.

    ``w = w - step_size * (gradient_weight * g + weight_decay * w)``. ``accumulation`` as in
    :func:`local_momentum_`.
    """
    _ops.local_plain_.default(
        weights,
        gradients,
        accumulators,
        step_size,
        gradient_weight,
        weight_decay,
        int(accumulation),
        found_inf,
    )


def local_adam_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    squares: Sequence[Tensor],
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
    """Local update of the ``momentum`` rule for Adam and AdamW (``decoupled``) on the local weights.

    With ``g' = gradient_scale * g``, negated for ``maximize``, and ``step`` counted from 1::

        d = g' + weight_decay * w                  # Adam
        d = g'; w = (1 - lr * weight_decay) * w    # AdamW
        m = beta1 * m + (1 - beta1) * d
        u = beta2 * u + (1 - beta2) * d^2
        w = w - lr / (1 - beta1^step) * m / (sqrt(u / (1 - beta2^step)) + eps)

    ``accumulation`` (:class:`Accumulation`) says what becomes of the accumulators and the squares:
    both stay (and may be empty lists), ``A += g`` and ``A2 += g^2``, or ``A = g`` and ``A2 = g^2``
    without reading them; ``g`` is the gradient as given.
    """
    _ops.local_adam_.default(
        weights,
        gradients,
        firsts,
        seconds,
        accumulators,
        squares,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
        maximize,
        gradient_scale,
        step,
        accumulation,
        found_inf,
    )


def accumulate_(
    accumulators: Sequence[Tensor],
    gradients: Sequence[Tensor],
    overwrite: bool,
    found_inf: Tensor | None = None,
) -> None:
    """``A += g``, or ``A = g`` without reading ``A`` where ``overwrite``."""
    _ops.accumulate_.default(accumulators, gradients, overwrite, found_inf)


def accumulate_squares_(
    squares: Sequence[Tensor],
    gradients: Sequence[Tensor],
    overwrite: bool,
    found_inf: Tensor | None = None,
) -> None:
    """``A2 += g^2``, or ``A2 = g^2`` without reading ``A2`` where ``overwrite``."""
    _ops.accumulate_squares_.default(squares, gradients, overwrite, found_inf)


def replay_sgd_(
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor],
    sums: Sequence[Tensor],
    corrections: Sequence[Tensor],
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
    """Global update: ``torch.optim.SGD`` replayed on the global weights, once per accumulated step.

    The mean gradient ``G = sums / divisor`` serves every replayed step; the four lists of options
    have one entry for each step, in order. With ``d = G + weight_decay * W`` (``-G`` for
    ``maximize``)::

        v = momentum * v + (1 - dampening) * d     # v = d in the first step ever
        W = W - lr * (d + momentum * v if nesterov else v)

    and ``W = W - lr * d`` where the step's momentum is 0. All steps take one pass over memory.
    ``momenta`` is the base optimizer's own buffer, in the weights' dtype; it may be an empty list
    where no step has momentum, and is not read where ``momentum_initialised`` is false.

    ``correction`` (:class:`Correction`) says what the corrections become: they stay (and may be an
    empty list), ``s = G`` without the sign of ``maximize``, or the displacement
    ``s = (W_before - W_after) / sum(lrs)``, unchanged where the learning rates sum to 0.
    """
    _ops.replay_sgd_.default(
        weights,
        momenta,
        sums,
        corrections,
        divisor,
        lrs,
        momentum_factors,
        dampenings,
        weight_decays,
        nesterov,
        maximize,
        momentum_initialised,
        correction,
    )


def replay_adam_(
    weights: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    sums: Sequence[Tensor],
    squares: Sequence[Tensor],
    corrections: Sequence[Tensor],
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
    """Global update: ``torch.optim.Adam`` or ``AdamW`` replayed once per accumulated step.

    The gradient ``G = sums / divisor`` of ``count`` summed gradients serves every replayed step,
    ``divisor`` being ``count`` over the factor on their mean; the lists of options have one entry for
    each step, in order, the first of which is step ``steps_before + 1`` of the optimizer. A mean over
    many gradients has less noise than a synchronous step's, so the second moment takes in what is
    missing of it::

        variance = max(0, squares / count - (sums / count)^2) * count / (count - 1) * (count / divisor)^2
        u = beta2 * u + (1 - beta2) * (d^2 + missing_noise * variance)

    (no variance where ``count`` is 1), and all else is as in :func:`local_adam_`. ``firsts`` and
    ``seconds`` are the base optimizer's own, in the weights' dtype. ``correction`` as in
    :func:`replay_sgd_`.
    """
    _ops.replay_adam_.default(
        weights,
        firsts,
        seconds,
        sums,
        squares,
        corrections,
        count,
        divisor,
        steps_before,
        lrs,
        beta1s,
        beta2s,
        epsilons,
        weight_decays,
        missing_noises,
        decoupled,
        maximize,
        correction,
    )


def rebase_momentum_(
    weights: Sequence[Tensor],
    momenta: Sequence[Tensor],
    global_weights: Sequence[Tensor],
    global_momenta: Sequence[Tensor],
    weight_snapshots: Sequence[Tensor],
    momentum_snapshots: Sequence[Tensor],
    momentum_decay: float,
    displacement_factor: float,
) -> None:
    """Move the local weights and momenta onto a new global state, local steps kept.

    With ``dv = v' - v_s`` and ``dW = W' - w_s``, the new global state less the snapshots taken at
    the sync point: ``v += momentum_decay * dv`` and ``w += dW - displacement_factor * dv``. For
    local steps of learning rates ``lr_1 .. lr_d`` the factors are ``mu^d`` and
    ``sum_j(lr_j mu^j)``.
    """
    _ops.rebase_momentum_.default(
        weights,
        momenta,
        global_weights,
        global_momenta,
        weight_snapshots,
        momentum_snapshots,
        momentum_decay,
        displacement_factor,
    )


def rebase_adam_(
    weights: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    global_weights: Sequence[Tensor],
    global_firsts: Sequence[Tensor],
    global_seconds: Sequence[Tensor],
    weight_snapshots: Sequence[Tensor],
    first_snapshots: Sequence[Tensor],
    second_snapshots: Sequence[Tensor],
    first_decay: float,
    second_decay: float,
    displacement_factor: float,
    beta2: float,
    eps: float,
    step: int,
) -> None:
    """Move the local weights and Adam's moments onto a new global state, local steps kept.

    With ``dm``, ``du`` and ``dW`` the new global state less the snapshots taken at the sync point::

        w += dW - displacement_factor * dm / (sqrt(u / (1 - beta2^step)) + eps)
        m += first_decay * dm
        u = max(0, u + second_decay * du)

    the ``u`` in the first line being the local one as it was. For local steps of options ``lr_j``,
    ``b1``, ``b2`` and counts ``c_j`` the factors are ``b1^d``, ``b2^d`` and
    ``sum_j(lr_j b1^j / (1 - b1^c_j))``; ``beta2``, ``eps`` and ``step`` are those of the last one.
    """
    _ops.rebase_adam_.default(
        weights,
        firsts,
        seconds,
        global_weights,
        global_firsts,
        global_seconds,
        weight_snapshots,
        first_snapshots,
        second_snapshots,
        first_decay,
        second_decay,
        displacement_factor,
        beta2,
        eps,
        step,
    )


def rebase_shift_(
    weights: Sequence[Tensor],
    global_weights: Sequence[Tensor],
    weight_snapshots: Sequence[Tensor],
) -> None:
    """Move the local weights by ``W' - w_s``, the change of the global weights."""
    _ops.rebase_shift_.default(weights, global_weights, weight_snapshots)


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """One int64 for each tensor, on their device, that notices a scaled, replaced or zeroed tensor.

    The wrapping sum of ``w * (w ^ 0x9E3779B9)`` over the elements' bits, read as unsigned words
    ``w`` of at most 32 bits: elements of 1, 2 or 4 bytes are one word, of 8 bytes two. It does not
    depend on the memory layout, nor notice elements that change places. All tensors are on one
    device; the call does not wait for it, reading the result does.
    """
    result: Tensor = _ops.checksum.default(tensors)
    return result
