"""SSD-SGD with several ranks, written down a second time: NumPy, float64, no communication.

Least squares, rank by rank. A rank is a generator: it yields what it contributes to a sync event, and
is sent what all ranks contributed together. All generators are driven side by side.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class SGDOptions:
    """The options of one step of ``torch.optim.SGD``."""

    lr: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


def sgd(w: Array, v: Array | None, g: Array, o: SGDOptions) -> tuple[Array, Array | None]:
    """One step of ``torch.optim.SGD``, as its documentation gives it."""
    d = (-g if o.maximize else g) + o.weight_decay * w
    if o.momentum != 0:
        v = d if v is None else o.momentum * v + (1 - o.dampening) * d
        d = d + o.momentum * v if o.nesterov else v
    return w - o.lr * d, v


@dataclass(frozen=True)
class Case:
    """A training: settings, data and what goes wrong."""

    size: int
    delay_steps: int
    overlap_steps: int
    warmup_steps: int
    glu: str
    steps: tuple[int, ...]
    """Steps that each rank makes before it flushes."""
    optimizer: SGDOptions = SGDOptions()
    lr_decay: float = 0.95
    alpha: float = 1.0
    beta: float = 0.5
    local_lr_scale: float = 1.0
    overflows: frozenset[tuple[int, int]] = frozenset()
    """(step, rank) whose gradient is not finite."""
    params: int = 3
    flush: bool = True
    sums: bool = False
    """Whether gradients are summed over the ranks instead of averaged."""
    equal_data: bool = False

    def data(self, step: int, rank: int) -> tuple[Array, Array]:
        random = np.random.default_rng([step, 0 if self.equal_data else rank])
        return random.normal(size=(4, self.params)), random.normal(size=4)

    def start(self) -> Array:
        return np.random.default_rng(99).normal(size=self.params)

    def gradient(self, w: Array, step: int, rank: int) -> Array:
        x, y = self.data(step, rank)
        return x.T @ (x @ w - y) / len(y)

    def options(self, step: int) -> SGDOptions:
        return replace(self.optimizer, lr=self.optimizer.lr * self.lr_decay**step)


@dataclass
class Contribution:
    """What a rank brings to a sync event."""

    total: Array
    made: list[tuple[SGDOptions, bool]]
    flushing: bool = False


@dataclass
class Event:
    """What all ranks brought."""

    total: Array
    counts: list[int]
    options: list[SGDOptions]
    flushing: int


@dataclass
class Trace:
    """What a rank went through: local and global weights after each step, and at the end."""

    local: list[Array] = field(default_factory=list)
    world: list[Array] = field(default_factory=list)
    sent: list[bool] = field(default_factory=list)
    momentum: Array | None = None
    events: int = 0


class Rank:
    """One rank's training."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.w = self.W = case.start()
        self.v: Array | None = None
        self.V: Array | None = None
        self.s = np.zeros(case.params)
        self.trace = Trace()
        self.warm = 0
        self.begin_period()
        self.held: Event | None = None

    def begin_period(self) -> None:
        self.total = np.zeros(self.case.params)
        self.made: list[tuple[SGDOptions, bool]] = []

    @property
    def in_warmup(self) -> bool:
        return self.case.delay_steps == 1 or self.warm < self.case.warmup_steps

    def run(self) -> Generator[Contribution, Event, Trace]:
        case = self.case
        for step in range(case.steps[self.rank]):
            options, finite = case.options(step), (step, self.rank) not in case.overflows
            gradient = case.gradient(self.w, step, self.rank) if finite else np.zeros(case.params)
            if self.in_warmup:
                self.warmup_step((yield Contribution(gradient, [(options, finite)])))
                sent = True
            else:
                sent = yield from self.delay_step(gradient, options, finite)
            self.trace.sent.append(sent)
            self.trace.local.append(self.w)
            self.trace.world.append(self.W)
        if case.flush:
            yield from self.flush()
        self.trace.local.append(self.w)
        self.trace.world.append(self.W)
        self.trace.momentum = self.V
        return self.trace

    def warmup_step(self, event: Event) -> None:
        self.trace.events += 1
        if event.counts[0] == 0:
            return
        self.warm += 1
        before = self.W
        self.global_update(event)
        if self.case.glu == "displacement" and event.options[0].lr != 0:
            self.s = (before - self.W) / event.options[0].lr
        self.w, self.v = self.W, self.V

    def global_update(self, event: Event) -> None:
        """Replay SGD with the mean gradient, once for each step that any rank made."""
        mean = event.total / sum(event.counts) * (self.case.size if self.case.sums else 1)
        before, rates = self.W, 0.0
        for options, count in zip(event.options, event.counts, strict=True):
            if count:
                self.W, self.V = sgd(self.W, self.V, mean, options)
                rates += options.lr
        if self.case.glu == "gradient":
            self.s = mean
        if self.case.glu == "displacement" and rates != 0:
            self.s = (before - self.W) / rates

    def delay_step(
        self, gradient: Array, options: SGDOptions, finite: bool
    ) -> Generator[Contribution, Event, bool]:
        case = self.case
        if finite:
            self.total = self.total + gradient
            self.local_update(gradient * (case.size if case.sums else 1), options)
            if self.held is not None:
                self.since_sync.append(options)
        self.made.append((options, finite))
        if self.held is not None:
            self.age += 1
        sync = len(self.made) == case.delay_steps
        if sync:
            self.held = yield Contribution(self.total, self.made)
            self.age = 0
            self.since_sync: list[SGDOptions] = []
            self.w_s, self.v_s = self.w, self.v
            self.begin_period()
        if self.held is not None and self.age == case.overlap_steps:
            self.complete()
        return sync

    def local_update(self, g: Array, o: SGDOptions) -> None:
        case, sign = self.case, -1 if o.maximize else 1
        if case.glu == "momentum":
            self.w, self.v = sgd(self.w, self.v, g, o)
            return
        direction = sign * g
        if case.glu != "none":
            correction = sign * self.s if case.glu == "gradient" else self.s
            direction = case.alpha * direction + case.beta * correction
        scale = 1.0 if case.glu == "none" else case.local_lr_scale
        self.w = self.w - scale * o.lr * (direction + o.weight_decay * self.w)

    def complete(self) -> None:
        event, self.held = self.held, None
        assert event is not None
        self.trace.events += 1
        if sum(event.counts):
            self.global_update(event)
        self.rebase()

    def rebase(self) -> None:
        if not self.since_sync:
            self.w, self.v = self.W, self.V
            return
        dw = self.W - self.w_s
        if self.case.glu == "momentum" and self.V is not None:
            dv = self.V - (0 if self.v_s is None else self.v_s)
            left = 1.0
            for options in self.since_sync:
                left *= options.momentum
                dw = dw - options.lr * left * (options.momentum if options.nesterov else 1.0) * dv
            self.v = (0 if self.v is None else self.v) + left * dv
        self.w = self.w + dw

    def flush(self) -> Generator[Contribution, Event, None]:
        if self.held is not None:
            self.complete()
        while True:
            if self.in_warmup:
                event = yield Contribution(np.zeros(self.case.params), [], flushing=True)
                self.warmup_step(event)
            else:
                event = yield Contribution(self.total, self.made, flushing=True)
                self.begin_period()
                self.held, self.since_sync = event, []
                self.complete()
            if event.flushing == self.case.size:
                return


def simulate(case: Case) -> list[Trace]:
    """Every rank's training."""
    ranks = [Rank(case, rank).run() for rank in range(case.size)]
    traces: list[Any] = [None] * case.size
    contributions = [advance(rank, None, traces, index) for index, rank in enumerate(ranks)]
    while any(c is not None for c in contributions):
        assert all(c is not None for c in contributions), "ranks end at different events"
        event = together([c for c in contributions if c is not None])
        contributions = [advance(rank, event, traces, index) for index, rank in enumerate(ranks)]
    return traces


def advance(
    rank: Generator[Contribution, Event, Trace], event: Event | None, traces: list[Any], index: int
) -> Contribution | None:
    try:
        return next(rank) if event is None else rank.send(event)
    except StopIteration as end:
        traces[index] = end.value
        return None


def together(contributions: Sequence[Contribution]) -> Event:
    length = max([1, *(len(c.made) for c in contributions)])
    made = [[c.made[t] for c in contributions if t < len(c.made)] for t in range(length)]
    return Event(
        total=np.sum([c.total for c in contributions], axis=0),
        counts=[sum(finite for _, finite in steps) for steps in made],
        options=[max((o for o, _ in steps), key=lambda o: o.lr, default=SGDOptions()) for steps in made],
        flushing=sum(c.flushing for c in contributions),
    )
