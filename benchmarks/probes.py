"""What an engine costs: allreduces with nothing to compute beside them, and computation beside it idle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from methods import METHODS, Choice, Method, Trainer, compute
from models import Problem
from torch import Tensor

SMALL_PART = 4096
"""Small allreduces have this part of the gradients' bytes: nothing for the line, but all of the latency."""
SMALL_COUNT = 8
"""Small allreduces after each one of all gradients: they take little time, and vary more."""


def elements(parameters: int) -> list[int]:
    """Sizes of the allreduces of a unit, in their order, from the model's number of parameters."""
    return [parameters] + SMALL_COUNT * [max(1, parameters // SMALL_PART)]


class Reducing(Trainer):
    """Makes no steps: allreduces, one of all gradients and several small ones in turn.

    Args:
        problem: its model says how many gradients there are.
        allreduce: reduces a tensor in place over all ranks.
    """

    def __init__(self, problem: Problem, allreduce: Callable[[Tensor], object]) -> None:
        sizes = elements(sum(p.numel() for p in problem.model.parameters()))
        super().__init__(problem, optimizer=None, unit=len(sizes), before=len(sizes))
        self._allreduce = allreduce
        self._tensors = cycle([torch.zeros(size) for size in sizes])

    def step(self) -> None:
        self._allreduce(next(self._tensors))


def reduce_with_horovod(problem: Problem, choice: Choice) -> Trainer:
    import horovod.torch as hvd

    def allreduce(tensor: Tensor) -> None:
        hvd.allreduce_(tensor, name=f"gradients.{tensor.numel()}", op=hvd.Sum)

    return Reducing(problem, allreduce)


def reduce_with_torch(problem: Problem, choice: Choice) -> Trainer:
    return Reducing(problem, torch.distributed.all_reduce)


ALLREDUCES: dict[str, Method] = {
    "allreduce@horovod": Method("mpirun", reduce_with_horovod, "horovod"),
    "allreduce@torch": Method("torchrun", reduce_with_torch, "torch"),
}
# Its background thread asks all ranks in every cycle what there is to reduce, and polls for their answers.
COMPUTE_BESIDE_HOROVOD = "compute@horovod"
PROBES = {COMPUTE_BESIDE_HOROVOD: Method("mpirun", compute, "horovod"), **ALLREDUCES}
METHODS_AND_PROBES = {**METHODS, **PROBES}
