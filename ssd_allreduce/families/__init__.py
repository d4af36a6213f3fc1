"""One file per kind of base optimizer: its replay, its local update and its rebase."""

from __future__ import annotations

import torch

from ssd_allreduce.base_optimizer import BaseOptimizer, plain_step
from ssd_allreduce.families.adam import AdamFamily
from ssd_allreduce.families.sgd import SGDFamily
from ssd_allreduce.families.twin import TwinFamily
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.update_family import Family

__all__ = ["choose_family"]

_REFUSED = {
    "LBFGS": "it evaluates its closure several times in one step",
    "SparseAdam": "it takes sparse gradients, and accumulated gradients travel as dense tensors",
    "Adafactor": "its factored second moment cannot be corrected for the noise that averaging hides",
}
_FUSED: dict[type[torch.optim.Optimizer], type[Family]] = {
    torch.optim.SGD: SGDFamily,
    torch.optim.Adam: AdamFamily,
    torch.optim.AdamW: AdamFamily,
}


def choose_family(base: BaseOptimizer, parameters: Parameters) -> Family:
    """The family of the user's optimizer: by its own ``step`` code, not by its name.

    Raises:
        TypeError: the class is not supported; the message names it and what is.
    """
    for ancestor in base.kind.__mro__:
        reason = _REFUSED.get(ancestor.__name__)
        if reason is not None and ancestor.__module__.startswith("torch.optim"):
            raise TypeError(
                f"{base.kind.__module__}.{base.kind.__qualname__} is not supported: {reason}. Allowed: "
                "torch.optim.SGD, Adam, AdamW, and other optimizers that make one update from p.grad in "
                "step()."
            )
    for kind, family in _FUSED.items():
        if plain_step(base.kind) is plain_step(kind):
            return family(base, parameters)
    return TwinFamily(base, parameters)
