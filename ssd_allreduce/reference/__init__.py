"""The kernel operations of ``torch.ops.ssd_allreduce`` in plain torch.

They define what the compiled kernels must compute, and stand in for them where those are not
built or do not serve a device. Every function works in place on lists of tensors of equal length;
the tensors at one index belong to one parameter and have its shape, in any memory layout.

Two kinds of tensors occur. *Parameter* tensors (weights, gradients, global weights and the base
optimizer's own state) have the parameter's dtype: float16, bfloat16, float32 or float64. *State*
tensors (local momenta, accumulators, sums, corrections, snapshots) have the compute dtype: float64
for float64 parameters, else float32. All arithmetic is done in the compute dtype.

The arguments and formulas are documented at the public functions in :mod:`ssd_allreduce.ops`.
"""

from __future__ import annotations

from ssd_allreduce.reference.adam import local_adam_, rebase_adam_, replay_adam_
from ssd_allreduce.reference.lists import Accumulation, Correction, compute_dtype
from ssd_allreduce.reference.sgd import (
    local_corrected_,
    local_momentum_,
    local_plain_,
    rebase_momentum_,
    rebase_shift_,
    replay_sgd_,
)
from ssd_allreduce.reference.sums import accumulate_, accumulate_squares_, checksum

__all__ = [
    "Accumulation",
    "Correction",
    "accumulate_",
    "accumulate_squares_",
    "checksum",
    "compute_dtype",
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
