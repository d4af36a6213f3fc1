"""``torch.ops.ssd_allreduce``: the elementwise work of SSD-SGD over lists of tensors.

Each operation makes one pass over memory, changes its tensors in place, records no autograd graph
and bumps the version counter of what it changed, so that a weight stepped between forward and
backward is noticed. It takes parameters that require grad, on any device and in any memory layout.

All lists of one call have equal length, and the tensors at one index have the same shape. Weights
and gradients may be float16, bfloat16, float32 or float64; global weights and global momenta, the
base optimizer's own, have the weight's dtype. Local momenta, accumulators, sums, corrections and
snapshots are float64 for float64 weights, else float32, and so is the arithmetic.

``IMPLEMENTATION`` says which kernels serve CPU tensors: ``"compiled"`` (``ssd_allreduce._C``) or
``"reference"`` (:mod:`ssd_allreduce.reference`, plain torch, several passes). The environment
variable ``SSD_ALLREDUCE_KERNELS`` demands one of the two; without it the compiled kernels are taken
where they are built, and a warning says so where they are not.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import reference
from ssd_allreduce.reference import Accumulation, Correction

__all__ = [
    "IMPLEMENTATION",
    "Accumulation",
    "Correction",
    "ExtensionNotBuiltWarning",
    "accumulate_",
    "checksum",
    "local_corrected_",
    "local_momentum_",
    "local_plain_",
    "rebase_momentum_",
    "rebase_shift_",
    "replay_sgd_",
]

_NAMESPACE = "ssd_allreduce"
_EXTENSION = "ssd_allreduce._C"
_SELECTOR = "SSD_ALLREDUCE_KERNELS"

_SCHEMAS = """
local_momentum_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor(c!)[] accumulators,
    float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool maximize,
    float gradient_scale, int accumulation) -> ()

local_corrected_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor[] corrections, Tensor(b!)[] accumulators,
    float step_size, float gradient_weight, float correction_weight, float weight_decay,
    int accumulation) -> ()

local_plain_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] accumulators,
    float step_size, float gradient_weight, float weight_decay, int accumulation) -> ()

accumulate_(Tensor(a!)[] accumulators, Tensor[] gradients, bool overwrite) -> ()

replay_sgd_(
    Tensor(a!)[] weights, Tensor(b!)[] momenta, Tensor[] sums, Tensor(c!)[] corrections,
    float divisor, float[] lrs, float[] momentum_factors, float[] dampenings,
    float[] weight_decays, bool nesterov, bool maximize, bool momentum_initialised,
    int correction) -> ()

rebase_momentum_(
    Tensor(a!)[] weights, Tensor(b!)[] momenta, Tensor[] global_weights, Tensor[] global_momenta,
    Tensor[] weight_snapshots, Tensor[] momentum_snapshots,
    float momentum_decay, float displacement_factor) -> ()

rebase_shift_(
    Tensor(a!)[] weights, Tensor[] global_weights, Tensor[] weight_snapshots) -> ()

checksum(Tensor[] tensors) -> Tensor
"""


class ExtensionNotBuiltWarning(RuntimeWarning):
    """The compiled kernels are missing, and the slower plain torch ones are used."""


def _load_extension() -> str:
    """Import the compiled kernels as ``SSD_ALLREDUCE_KERNELS`` demands; name what serves."""
    choice = os.environ.get(_SELECTOR, "")
    if choice not in ("", "compiled", "reference"):
        raise ValueError(
            f"{_SELECTOR}={choice!r}; allowed are 'compiled' and 'reference', or unset to take the "
            "compiled kernels where they are built"
        )
    if choice == "reference":
        return choice
    try:
        importlib.import_module(_EXTENSION)
    except ImportError as error:
        remedy = "build them against the installed torch with `pip install --no-build-isolation .`"
        if choice == "compiled":
            raise ImportError(
                f"{_SELECTOR}=compiled, and the compiled kernels cannot be loaded ({error}); "
                f"{remedy}, or unset {_SELECTOR}"
            ) from error
        warnings.warn(
            f"the compiled kernels cannot be loaded ({error}); plain torch is used, which is "
            f"slower; {remedy}",
            ExtensionNotBuiltWarning,
            stacklevel=2,
        )
        return "reference"
    return "compiled"


def _fake_inplace(*args: object) -> None:
    """An operation that returns nothing has nothing to infer."""


def _fake_checksum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.int64, device="cpu")


def _register() -> object:
    """Define the operations and give each the reference where no compiled kernel serves.

    They stay registered for as long as the returned library lives.
    """
    untyped_torch_library: Any = torch.library
    library = untyped_torch_library.Library(_NAMESPACE, "DEF")
    for schema in _SCHEMAS.strip().split("\n\n"):
        library.define(schema)
        name = schema[: schema.index("(")]
        qualified_name = f"{_NAMESPACE}::{name}"
        library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        fake = _fake_checksum if name == "checksum" else _fake_inplace
        torch.library.register_fake(qualified_name, fake, lib=library)
    return library


_LIBRARY = _register()
IMPLEMENTATION: str = _load_extension()
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
    )


def local_plain_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    accumulators: Sequence[Tensor],
    step_size: float,
    gradient_weight: float,
    weight_decay: float,
    accumulation: int,
) -> None:
    """Local update of the ``none`` rule, plain local SGD.

    ``w = w - step_size * (gradient_weight * g + weight_decay * w)``. ``accumulation`` as in
    :func:`local_momentum_`.
    """
    _ops.local_plain_.default(
        weights, gradients, accumulators, step_size, gradient_weight, weight_decay, int(accumulation)
    )


def accumulate_(accumulators: Sequence[Tensor], gradients: Sequence[Tensor], overwrite: bool) -> None:
    """``A += g``, or ``A = g`` without reading ``A`` where ``overwrite``."""
    _ops.accumulate_.default(accumulators, gradients, overwrite)


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


def rebase_shift_(
    weights: Sequence[Tensor],
    global_weights: Sequence[Tensor],
    weight_snapshots: Sequence[Tensor],
) -> None:
    """Move the local weights by ``W' - w_s``, the change of the global weights."""
    _ops.rebase_shift_.default(weights, global_weights, weight_snapshots)


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """One int64 for each tensor, on the CPU, that notices a scaled, replaced or zeroed tensor.

    The wrapping sum of ``w * (w ^ 0x9E3779B9)`` over the elements' bits, read as unsigned words
    ``w`` of at most 32 bits: elements of 1, 2 or 4 bytes are one word, of 8 bytes two. It does not
    depend on the memory layout, nor notice elements that change places.
    """
    result: Tensor = _ops.checksum.default(tensors)
    return result
