"""SSD-SGD with torch's SGD, written down in NumPy, all ranks in one loop.

Independent of the package: what the tests expect is computed here, from the formulas alone. Weights are
one flat float64 vector. Ranks may make different numbers of steps before they flush, and may leave single
steps out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]
Gradient: TypeAlias = Callable[[int, int, Vector], "Vector | None"]
"""``gradient(rank, step, weights)``; None for a step that does not contribute."""


@dataclass(frozen=True)
class Options:
    """The options of one step: numbers, or vectors where they differ between elements."""

    lr: Any
    momentum: Any = 0.0
    weight_decay: Any = 0.0


@dataclass
class Rank:
    """What one rank has, and what it has seen of the global model."""

    weights: Vector
    momentum: Vector
    global_weights: Vector
    correction: Vector
    steps: int = 0
    weights_at_sync: Vector | None = None
    momentum_at_sync: Vector | None = None
    since_sync: list[Options] = field(default_factory=list)
    in_flight: bool = False
    local_history: list[Vector] = field(default_factory=list)
    global_history: list[Vector] = field(default_factory=list)


class Simulation:
    """All ranks' training.

    Args:
        start: weights at the start.
        ranks: number of ranks.
        gradient: local gradients.
        options: the options of each step, by the rank's own step number.
        summed: whether the optimizer sees sums over the ranks instead of means.
    """

    def __init__(
        self,
        start: Vector,
        ranks: int,
        gradient: Gradient,
        options: Callable[[int], Options],
        *,
        delay_steps: int,
        overlap_steps: int,
        warmup_steps: int = 0,
        glu: str = "momentum",
        alpha: float = 1.0,
        beta: float = 0.5,
        local_lr_scale: float = 1.0,
        nesterov: bool = False,
        summed: bool = False,
    ) -> None:
        self.gradient, self.options = gradient, options
        self.delay_steps, self.overlap_steps, self.warmup_steps = delay_steps, overlap_steps, warmup_steps
        self.glu, self.alpha, self.beta, self.scale = glu, alpha, beta, local_lr_scale
        self.nesterov = nesterov
        self.factor = float(ranks) if summed else 1.0
        self.weights = start.copy()
        self.momentum = np.zeros_like(start)
        self.correction = np.zeros_like(start)
        self.warmup_done = 0
        zeros = np.zeros_like(start)
        self.ranks = [Rank(start, zeros, start, zeros) for _ in range(ranks)]

    def run(self, counts: Sequence[int], flush: bool = True) -> None:
        """Each rank makes that many steps, and flushes. Without the flush, counts must be equal."""
        remaining = list(counts)
        while True:
            if self.delay_steps == 1 or self.warmup_done < self.warmup_steps:
                if not any(remaining):
                    break
                remaining = self._warmup_event(remaining)
                continue
            made = [min(self.delay_steps, left) for left in remaining]
            periods = [self._local_steps(rank, count) for rank, count in enumerate(made)]
            everyone_flushes = all(count < self.delay_steps for count in made)
            if everyone_flushes and not flush:
                return
            self._sync(periods, [count < self.delay_steps for count in made])
            remaining = [left - count for left, count in zip(remaining, made, strict=True)]
            if everyone_flushes:
                break

    # -- global model ----------------------------------------------------------------------------

    def _replay(self, gradient: Vector, steps: Sequence[Options]) -> None:
        before, total_lr = self.weights, sum(options.lr for options in steps)
        for options in steps:
            update = gradient + options.weight_decay * self.weights
            self.momentum = options.momentum * self.momentum + update
            update = update + options.momentum * self.momentum if self.nesterov else self.momentum
            self.weights = self.weights - options.lr * update
        if self.glu == "gradient":
            self.correction = gradient
        else:
            moved = (before - self.weights) / np.where(total_lr == 0, 1.0, total_lr)
            self.correction = np.where(total_lr == 0, self.correction, moved)

    def _warmup_event(self, remaining: list[int]) -> list[int]:
        makers = [number for number, left in enumerate(remaining) if left]
        options = self.options(self.ranks[makers[0]].steps)
        gradients = []
        for number in makers:
            rank = self.ranks[number]
            gradients.append(self.gradient(number, rank.steps, self.weights))
            rank.steps += 1
        given = [gradient for gradient in gradients if gradient is not None]
        if given:
            self._replay(self.factor * np.mean(given, axis=0), [options])
            self.warmup_done += 1
        for number, rank in enumerate(self.ranks):
            rank.weights, rank.momentum = self.weights, self.momentum
            rank.global_weights, rank.correction = self.weights, self.correction
            if number in makers:
                self._record(rank)
        return [left - 1 if left else 0 for left in remaining]

    def _sync(self, periods: list[list[tuple[Options, Vector | None]]], flushing: list[bool]) -> None:
        for rank in self.ranks:
            rank.weights_at_sync, rank.momentum_at_sync = rank.weights, rank.momentum
            rank.since_sync, rank.in_flight = [], True
        steps, gradients = [], []
        for position in range(self.delay_steps):
            given = [p[position] for p in periods if position < len(p) and p[position][1] is not None]
            if given:
                steps.append(given[0][0])
                gradients += [gradient for _, gradient in given]
        if gradients:
            self._replay(self.factor * np.mean(gradients, axis=0), steps)
        for rank, flushes in zip(self.ranks, flushing, strict=True):
            if flushes or self.overlap_steps == 0:
                self._rebase(rank)
                if not flushes:
                    # The last step of the period completes too.
                    rank.local_history[-1], rank.global_history[-1] = rank.weights, self.weights

    # -- local steps -----------------------------------------------------------------------------

    def _local_steps(self, number: int, count: int) -> list[tuple[Options, Vector | None]]:
        rank, period = self.ranks[number], []
        for position in range(count):
            options = self.options(rank.steps)
            gradient = self.gradient(number, rank.steps, rank.weights)
            if gradient is not None:
                self._update(rank, gradient, options)
            if position + 1 == self.overlap_steps and rank.in_flight:
                self._rebase(rank)
            period.append((options, gradient))
            rank.steps += 1
            self._record(rank)
        return period

    def _update(self, rank: Rank, gradient: Vector, options: Options) -> None:
        gradient = self.factor * gradient
        decay = options.weight_decay * rank.weights
        if self.glu == "momentum":
            update = gradient + decay
            rank.momentum = options.momentum * rank.momentum + update
            update = update + options.momentum * rank.momentum if self.nesterov else rank.momentum
            rank.weights = rank.weights - options.lr * update
        elif self.glu == "none":
            rank.weights = rank.weights - options.lr * (gradient + decay)
        else:
            update = self.alpha * gradient + self.beta * rank.correction + decay
            rank.weights = rank.weights - self.scale * options.lr * update
        if rank.in_flight:
            rank.since_sync.append(options)

    def _rebase(self, rank: Rank) -> None:
        assert rank.weights_at_sync is not None
        assert rank.momentum_at_sync is not None
        shift = self.weights - rank.weights_at_sync
        if self.glu == "momentum":
            difference = self.momentum - rank.momentum_at_sync
            decay: Any = 1.0
            reach: Any = 0.0
            for options in rank.since_sync:
                decay = decay * options.momentum
                reach = reach + options.lr * decay * (options.momentum if self.nesterov else 1.0)
            rank.momentum = rank.momentum + decay * difference
            shift = shift - reach * difference
        rank.weights = rank.weights + shift
        rank.global_weights, rank.correction = self.weights, self.correction
        rank.in_flight = False

    def _record(self, rank: Rank) -> None:
        rank.local_history.append(rank.weights)
        rank.global_history.append(rank.global_weights)
