"""One file per kind of base optimizer: its replay, its local update and its rebase."""

from __future__ import annotations

import torch

from ssd_allreduce.base_optimizer import BaseOptimizer, plain_step
from ssd_allreduce.families.sgd import SGDFamily
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.update_family import Family

__all__ = ["choose_family"]


def choose_family(base: BaseOptimizer, parameters: Parameters) -> Family:
    """The family of the user's optimizer, by whose ``step`` it runs.

    Raises:
        TypeError: the class is not supported; the message names it and what is.
    """
    if plain_step(base.kind) is plain_step(torch.optim.SGD):
        return SGDFamily(base, parameters)
    raise TypeError(
        f"{base.kind.__module__}.{base.kind.__qualname__} is not supported. Allowed: torch.optim.SGD with "
        "momentum, dampening, weight decay, nesterov and maximize, and subclasses that keep its step()."
    )
