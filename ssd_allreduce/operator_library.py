"""Defines the operations of ``torch.ops.ssd_allreduce``, and chooses the kernels that serve them."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import reference

_NAMESPACE = "ssd_allreduce"
_EXTENSION = "ssd_allreduce._C"
_SELECTOR = "SSD_ALLREDUCE_KERNELS"

_SCHEMAS = """
local_momentum_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor(c!)[] accumulators,
    float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool maximize,
    float gradient_scale, int accumulation, Tensor? found_inf=None) -> ()

local_corrected_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor[] corrections, Tensor(b!)[] accumulators,
    float step_size, float gradient_weight, float correction_weight, float weight_decay,
    int accumulation, Tensor? found_inf=None) -> ()

local_plain_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] accumulators,
    float step_size, float gradient_weight, float weight_decay, int accumulation,
    Tensor? found_inf=None) -> ()

local_adam_(
    Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] firsts, Tensor(c!)[] seconds,
    Tensor(d!)[] accumulators, Tensor(e!)[] squares,
    float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled,
    bool maximize, float gradient_scale, int step, int accumulation,
    Tensor? found_inf=None) -> ()

accumulate_(
    Tensor(a!)[] accumulators, Tensor[] gradients, bool overwrite, Tensor? found_inf=None) -> ()

accumulate_squares_(
    Tensor(a!)[] squares, Tensor[] gradients, bool overwrite, Tensor? found_inf=None) -> ()

replay_sgd_(
    Tensor(a!)[] weights, Tensor(b!)[] momenta, Tensor[] sums, Tensor(c!)[] corrections,
    float divisor, float[] lrs, float[] momentum_factors, float[] dampenings,
    float[] weight_decays, bool nesterov, bool maximize, bool momentum_initialised,
    int correction) -> ()

replay_adam_(
    Tensor(a!)[] weights, Tensor(b!)[] firsts, Tensor(c!)[] seconds, Tensor[] sums,
    Tensor[] squares, Tensor(d!)[] corrections, int count, float divisor,
    int steps_before, float[] lrs, float[] beta1s, float[] beta2s, float[] epsilons,
    float[] weight_decays, float[] missing_noises, bool decoupled, bool maximize,
    int correction) -> ()

rebase_momentum_(
    Tensor(a!)[] weights, Tensor(b!)[] momenta, Tensor[] global_weights, Tensor[] global_momenta,
    Tensor[] weight_snapshots, Tensor[] momentum_snapshots,
    float momentum_decay, float displacement_factor) -> ()

rebase_adam_(
    Tensor(a!)[] weights, Tensor(b!)[] firsts, Tensor(c!)[] seconds, Tensor[] global_weights,
    Tensor[] global_firsts, Tensor[] global_seconds, Tensor[] weight_snapshots,
    Tensor[] first_snapshots, Tensor[] second_snapshots,
    float first_decay, float second_decay, float displacement_factor, float beta2, float eps,
    int step) -> ()

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
    device = tensors[0].device if tensors else None
    return torch.empty(len(tensors), dtype=torch.int64, device=device)


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
"""What serves CPU tensors: ``"compiled"`` or ``"reference"``."""


def implementation(device_type: str) -> str:
    """What serves tensors on devices of a type: ``"compiled"`` or ``"reference"``."""
    key = torch._C._dispatch_key_for_device(device_type)
    compiled = torch._C._dispatch_has_kernel_for_dispatch_key(f"{_NAMESPACE}::checksum", key)
    return "compiled" if compiled else "reference"


def check_kernels(device_types: Iterable[str]) -> None:
    """Tell the user of devices that the compiled kernels were not built for.

    Raises:
        ImportError: ``SSD_ALLREDUCE_KERNELS=compiled`` demands kernels that are not there.
    """
    if IMPLEMENTATION == "reference":
        # Said when the package was imported, or asked for.
        return
    missing = sorted({kind for kind in device_types if implementation(kind) == "reference"})
    if not missing:
        return
    problem = (
        f"the kernels were compiled, but not for parameters on {' and '.join(missing)}, for which plain "
        "torch serves, slower and with other roundings"
    )
    remedy = "docs/performance.md says what building the CUDA kernels needs"
    if os.environ.get(_SELECTOR) == "compiled":
        raise ImportError(f"{_SELECTOR}=compiled, and {problem}; {remedy}, or unset {_SELECTOR}")
    # The line that made the optimizer.
    warnings.warn(f"{problem}; {remedy}", ExtensionNotBuiltWarning, stacklevel=4)
