"""SSD-SGD around any torch optimizer, simulated in one process: all ranks, written from the formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from problems import Loss
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def gradients_at(model: nn.Module, weights: list[Tensor], loss: Loss, rank: int, step: int) -> list[Tensor]:
    """A rank's gradients at given weights."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    model.zero_grad()
    loss(model, rank, step).backward()
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


class Stepper:
    """Weights and the torch optimizer that steps them."""

    def __init__(self, weights: list[Tensor], make: MakeOptimizer) -> None:
        self.parameters = [nn.Parameter(weight.clone()) for weight in weights]
        self.optimizer = make(self.parameters)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters]

    def step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()

    def copy_state_from(self, other: Stepper) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


class TwinSimulation:
    """The global model and every rank's local one.

    Args:
        second_moment: state key of the mean of squares and its decay, where the class has one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        ranks: int,
        make: MakeOptimizer,
        delay_steps: int,
        overlap_steps: int,
        warmup_steps: int,
        second_moment: tuple[str, float] | None = None,
    ) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        start = [p.detach().clone() for p in model.parameters()]
        self.whole = Stepper(start, make)
        self.locals = [Stepper(start, make) for _ in range(ranks)]
        self.k, self.d, self.warmup = delay_steps, overlap_steps, warmup_steps
        self.second_moment = second_moment
        self.step_number = 0
        self.period: list[list[list[Tensor]]] = []
        self.sent: tuple[list[list[list[Tensor]]], list[list[Tensor]], int] | None = None

    def step(self) -> None:
        gradients = [
            gradients_at(self.model, local.weights, self.loss, rank, self.step_number)
            for rank, local in enumerate(self.locals)
        ]
        if self.step_number < self.warmup:
            self.whole.step(mean(gradients))
            for local in self.locals:
                self.follow(local)
        else:
            self.delay_step(gradients)
        self.step_number += 1

    def follow(self, local: Stepper) -> None:
        for parameter, weight in zip(local.parameters, self.whole.weights, strict=True):
            parameter.data.copy_(weight)
        local.copy_state_from(self.whole)

    def delay_step(self, gradients: list[list[Tensor]]) -> None:
        for local, gradient in zip(self.locals, gradients, strict=True):
            local.step(gradient)
        self.period.append(gradients)
        if self.sent is not None:
            self.sent = (self.sent[0], self.sent[1], self.sent[2] + 1)
        if len(self.period) == self.k:
            snapshots = [[w.clone() for w in local.weights] for local in self.locals]
            self.sent, self.period = (self.period, snapshots, 0), []
        if self.sent is not None and self.sent[2] == self.d:
            self.complete(*self.sent)
            self.sent = None

    def complete(self, period: list[list[list[Tensor]]], snapshots: list[list[Tensor]], steps: int) -> None:
        everything = [gradient for step in period for gradient in step]
        average = mean(everything)
        for _ in period:
            self.put_back_noise(everything, average)
            self.whole.step(average)
        for local, snapshot in zip(self.locals, snapshots, strict=True):
            if steps == 0:
                self.follow(local)
                continue
            for parameter, new, old in zip(local.parameters, self.whole.weights, snapshot, strict=True):
                parameter.data.add_(new - old)
            local.copy_state_from(self.whole)

    def put_back_noise(self, gradients: list[list[Tensor]], average: list[Tensor]) -> None:
        if self.second_moment is None:
            return
        key, decay = self.second_moment
        n, ranks = len(gradients), len(self.locals)
        for index, parameter in enumerate(self.whole.parameters):
            squares = torch.stack([g[index] ** 2 for g in gradients]).mean(0)
            variance = (squares - average[index] ** 2).clamp(min=0) * n / (n - 1)
            moment = self.whole.optimizer.state[parameter][key]
            moment += (1 - decay) / decay * variance * (1 / ranks - 1 / n)


def mean(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(column).mean(0) for column in zip(*gradients, strict=True)]


def with_options(kind: type[torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda parameters: kind(parameters, **options)
