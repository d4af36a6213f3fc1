"""The ways of training that the benchmarks compare: this package, Horovod, and peers of PyTorch's own.

Every method trains the same model on the same batch with SGD and momentum, and differs in what it sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import Problem
from torch import Tensor, nn

WARMUP_STEPS = 2


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Choice:
    """What the methods that have a period are given, and what all of them train with.

    Attributes:
        delay_steps: steps in a period, k.
        overlap_steps: steps that a transfer may take, d.
        rule: GLU rule.
        warmup_steps: synchronous steps at the start.
        make_base: makes the optimizer under every method.
    """

    delay_steps: int
    overlap_steps: int
    rule: str = "momentum"
    warmup_steps: int = WARMUP_STEPS
    make_base: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = plain_sgd


@dataclass(frozen=True)
class Method:
    """One way of training.

    Attributes:
        launcher: what starts its ranks.
        build: makes a :class:`Trainer` on a rank.
        engine: what carries its bytes.
        periodic: whether it sends only every k steps.
    """

    launcher: str
    build: Callable[[Problem, Choice], Trainer]
    engine: str
    periodic: bool = False


class Trainer:
    """Trains on this rank, a unit at a time: a step, or a whole period with its completion.

    Args:
        problem: model and data.
        optimizer: called after each backward.
        unit: steps in a unit.
        before: steps after which nothing is in flight and a unit may begin.

    Attributes:
        step_seconds: how long each step of the last :meth:`run_steps` took.
    """

    def __init__(self, problem: Problem, optimizer: Any, unit: int = 1, before: int = WARMUP_STEPS) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self._unit = unit
        self._before = before
        self.step_seconds: list[float] = []

    @property
    def steps_per_unit(self) -> int:
        return self._unit

    @property
    def settings(self) -> tuple[int, int] | None:
        """k and d in force, where the method has both."""
        return None

    def prepare(self) -> None:
        """Come to a moment at which a unit may begin."""
        self.run_steps(self._before)

    def run(self, units: int) -> None:
        self.run_steps(units * self._unit)

    def run_steps(self, steps: int) -> None:
        self.step_seconds = []
        for _ in range(steps):
            began = time.monotonic()
            self.step()
            self.step_seconds.append(time.monotonic() - began)

    def step(self) -> None:
        """One step on the problem's present batch."""
        self.optimizer.zero_grad()
        self.problem.loss().backward()
        self.optimizer.step()

    @property
    def ranks_are_equal(self) -> bool:
        """Whether there are new weights that all ranks share, for :meth:`evaluating`."""
        return True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model holds weights that all ranks share. No communication: one rank alone may come here."""
        yield

    def finish(self) -> None:
        """Leave the weights that would be saved in the model."""


class Accumulating(Trainer):
    """Several backward passes for each step of a Horovod optimizer; a step counts as one pass."""

    passes = 0

    def step(self) -> None:
        # Horovod averages over ranks and sums over passes.
        (self.problem.loss() / self._unit).backward()
        self.passes += 1
        if self.passes % self._unit == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Delaying(Trainer):
    """This package."""

    @property
    def steps_per_unit(self) -> int:
        return int(self.optimizer.stats().delay_steps)

    @property
    def settings(self) -> tuple[int, int]:
        stats = self.optimizer.stats()
        return stats.delay_steps, stats.overlap_steps

    def run(self, units: int) -> None:
        self.run_steps(units * self.steps_per_unit)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.optimizer.global_weights():
            yield

    def finish(self) -> None:
        self.optimizer.flush()
        self.optimizer.close()


class Averaging(Trainer):
    """Post-local SGD: ranks differ until their weights are averaged."""

    def __init__(self, problem: Problem, optimizer: Any, averager: Any) -> None:
        super().__init__(problem, optimizer, averager.period, averager.warmup_steps + averager.period)
        self._averager = averager

    @property
    def ranks_are_equal(self) -> bool:
        # The averager counts a step after it has looked whether this one ends in an average.
        local = self._averager.step - 1 - self._averager.warmup_steps
        return local < 0 or local % self._averager.period == 0

    def finish(self) -> None:
        for parameter in self.problem.model.parameters():
            torch.distributed.all_reduce(parameter.data)
            parameter.data /= torch.distributed.get_world_size()


def base(problem: Problem, choice: Choice) -> torch.optim.Optimizer:
    return choice.make_base(problem.model.parameters())


def compute(problem: Problem, choice: Choice) -> Trainer:
    return Trainer(problem, base(problem, choice))


def horovod(problem: Problem, choice: Choice, accumulate: bool = False, fp16: bool = False) -> Trainer:
    import horovod.torch as hvd

    options: dict[str, Any] = {}
    if accumulate:
        options["backward_passes_per_step"] = choice.delay_steps
    if fp16:
        options["compression"] = hvd.Compression.fp16
    names = problem.model.named_parameters()
    optimizer = hvd.DistributedOptimizer(base(problem, choice), named_parameters=names, **options)
    if accumulate:
        return Accumulating(problem, optimizer, choice.delay_steps, choice.delay_steps)
    return Trainer(problem, optimizer)


class HalfPrecision:
    """Compression to float16 without Horovod."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


def ssd(problem: Problem, choice: Choice, engine: str = "auto", fp16: bool = False) -> Trainer:
    k, d = choice.delay_steps, choice.overlap_steps
    optimizer = delayed(problem, choice, engine, fp16, delay_steps=k, overlap_steps=d)
    return Delaying(problem, optimizer, before=choice.warmup_steps + k + d)


def ssd_auto(problem: Problem, choice: Choice, engine: str = "auto") -> Trainer:
    # The largest overlap that may be chosen: all that a period allows.
    options = {"delay_steps": "auto", "overlap_steps": 15, "retune_periods": 0}
    return Tuning(
        problem, delayed(problem, choice, engine, fp16=False, **options), before=choice.warmup_steps
    )


def delayed(problem: Problem, choice: Choice, engine: str, fp16: bool, **options: Any) -> Any:
    import ssd_allreduce

    return ssd_allreduce.DistributedOptimizer(
        base(problem, choice),
        named_parameters=problem.model.named_parameters(),
        communicator=engine,
        compression=HalfPrecision if fp16 else None,
        glu=choice.rule,
        warmup_steps=choice.warmup_steps,
        **options,
    )


class Tuning(Delaying):
    """This package with a period that it chooses itself."""

    def prepare(self) -> None:
        """Until it has measured twice, and nothing is in flight."""
        self.run_steps(self._before + self.steps_per_unit)
        self.run_steps(4 * self.steps_per_unit)
        self.run_steps(sum(self.settings))


def data_parallel(problem: Problem, **options: Any) -> nn.parallel.DistributedDataParallel:
    model = nn.parallel.DistributedDataParallel(problem.model, **options)
    # The loss runs the model through the wrapper, whose forward arms its hooks.
    problem.model = model
    return model


def ddp(problem: Problem, choice: Choice) -> Trainer:
    data_parallel(problem)
    return Trainer(problem, base(problem, choice))


def ddp_powersgd(problem: Problem, choice: Choice) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # With several buckets over gloo its rounds overtake each other, and ranks add unlike tensors.
    model = data_parallel(problem, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=max(2, choice.warmup_steps)
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    # Its first compressed steps build their buffers.
    return Trainer(problem, base(problem, choice), before=2 * choice.warmup_steps)


def post_local_sgd(problem: Problem, choice: Choice) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = data_parallel(problem)
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=choice.warmup_steps)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=choice.delay_steps, warmup_steps=choice.warmup_steps)
    optimizer = PostLocalSGDOptimizer(optim=base(problem, choice), averager=averager)
    return Averaging(problem, optimizer, averager)


# After an @ stands the engine, where it is not the recommended one.
METHODS: dict[str, Method] = {
    "compute": Method("mpirun", compute, "none"),
    "horovod": Method("mpirun", horovod, "horovod"),
    "horovod-accumulate": Method("mpirun", partial(horovod, accumulate=True), "horovod", periodic=True),
    "horovod-fp16": Method("mpirun", partial(horovod, fp16=True), "horovod"),
    "ssd": Method("torchrun", partial(ssd, engine="torch"), "torch", periodic=True),
    "ssd-auto": Method("torchrun", partial(ssd_auto, engine="torch"), "torch", periodic=True),
    "ssd-fp16": Method("torchrun", partial(ssd, engine="torch", fp16=True), "torch", periodic=True),
    "ssd@horovod": Method("mpirun", partial(ssd, engine="horovod"), "horovod", periodic=True),
    "ssd-auto@horovod": Method("mpirun", partial(ssd_auto, engine="horovod"), "horovod", periodic=True),
    "ssd@mpi": Method("mpirun", partial(ssd, engine="mpi"), "mpi", periodic=True),
    "ssd-auto@mpi": Method("mpirun", partial(ssd_auto, engine="mpi"), "mpi", periodic=True),
    "ddp": Method("torchrun", ddp, "gloo"),
    "ddp-powersgd": Method("torchrun", ddp_powersgd, "gloo"),
    "post-local-sgd": Method("torchrun", post_local_sgd, "gloo", periodic=True),
}
