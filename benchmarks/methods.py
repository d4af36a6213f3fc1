"""The ways of training that the benchmarks compare: this package, Horovod, and peers of PyTorch's own.

Every method trains the same model on the same batch with SGD and momentum, and differs in what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import Problem
from torch import Tensor, nn

SGD = {"lr": 0.01, "momentum": 0.9}
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Method:
    """One way of training.

    Attributes:
        launcher: what starts its ranks.
        build: makes a :class:`Trainer` on a rank, given the problem and a :class:`Choice`.
        engine: what carries its bytes.
        periodic: whether it sends only every k steps.
    """

    launcher: str
    build: Callable[[Problem, Choice], Trainer]
    engine: str
    periodic: bool = False


@dataclass(frozen=True)
class Choice:
    """Steps in a period, and steps that a transfer may take, for the methods that have them."""

    delay_steps: int
    overlap_steps: int


class Trainer:
    """Trains on this rank, a unit at a time: a step, or a whole period with its completion.

    Args:
        problem: model and data.
        optimizer: called after each backward.
        unit: steps in a unit.
        before: steps after which nothing is in flight and a unit may begin.
        settings: reports k and d where they are chosen while training.
    """

    def __init__(
        self,
        problem: Problem,
        optimizer: Any,
        unit: int = 1,
        before: int = WARMUP_STEPS,
        settings: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._problem = problem
        self._optimizer = optimizer
        self._unit = unit
        self._before = before
        self._settings = settings

    @property
    def steps_per_unit(self) -> int:
        return self._unit

    @property
    def settings(self) -> tuple[int, int] | None:
        """k and d in force, where the method has them."""
        return None if self._settings is None else self._settings()

    def prepare(self) -> None:
        """Come to a moment at which a unit may begin."""
        self._run(self._before)

    def run(self, units: int) -> None:
        self._run(units * self._unit)

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._problem.loss().backward()
            self._optimizer.step()


class Accumulating(Trainer):
    """Several backward passes for each step of a Horovod optimizer; a step counts as one pass."""

    def _run(self, steps: int) -> None:
        for index in range(steps):
            self._problem.loss().backward()
            if (index + 1) % self._unit == 0:
                self._optimizer.step()
                self._optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **SGD)


def compute(problem: Problem, _: Choice) -> Trainer:
    return Trainer(problem, sgd(problem.model))


def horovod(problem: Problem, choice: Choice, accumulate: bool = False, fp16: bool = False) -> Trainer:
    import horovod.torch as hvd

    options: dict[str, Any] = {}
    if accumulate:
        options["backward_passes_per_step"] = choice.delay_steps
    if fp16:
        options["compression"] = hvd.Compression.fp16
    names = problem.model.named_parameters()
    optimizer = hvd.DistributedOptimizer(sgd(problem.model), named_parameters=names, **options)
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


def ssd(engine: str, fp16: bool = False, auto: bool = False) -> Callable[[Problem, Choice], Trainer]:
    def build(problem: Problem, choice: Choice) -> Trainer:
        import ssd_allreduce

        k, d = choice.delay_steps, choice.overlap_steps
        optimizer = ssd_allreduce.DistributedOptimizer(
            sgd(problem.model),
            named_parameters=problem.model.named_parameters(),
            communicator=engine,
            compression=HalfPrecision if fp16 else None,
            delay_steps=k,
            overlap_steps=d,
            warmup_steps=WARMUP_STEPS,
        )
        return Trainer(problem, optimizer, k, WARMUP_STEPS + k + d, lambda: (k, d))

    return build


def data_parallel(problem: Problem) -> nn.parallel.DistributedDataParallel:
    # The loss runs the model through the wrapper, whose forward arms its hooks.
    problem.model = nn.parallel.DistributedDataParallel(problem.model)
    return problem.model


def ddp(problem: Problem, _: Choice) -> Trainer:
    return Trainer(problem, sgd(data_parallel(problem)))


def ddp_powersgd(problem: Problem, _: Choice) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = data_parallel(problem)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=WARMUP_STEPS
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    # Its first compressed steps build their buffers.
    return Trainer(problem, sgd(model), before=2 * WARMUP_STEPS)


def post_local_sgd(problem: Problem, choice: Choice) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = data_parallel(problem)
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=WARMUP_STEPS)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=choice.delay_steps, warmup_steps=WARMUP_STEPS)
    optimizer = PostLocalSGDOptimizer(optim=sgd(model), averager=averager)
    before = WARMUP_STEPS + choice.delay_steps
    return Trainer(problem, optimizer, choice.delay_steps, before)


# After an @ stands the engine, where it is not the recommended one.
METHODS: dict[str, Method] = {
    "compute": Method("mpirun", compute, "none"),
    "horovod": Method("mpirun", horovod, "horovod"),
    "horovod-accumulate": Method("mpirun", lambda p, c: horovod(p, c, accumulate=True), "horovod", True),
    "horovod-fp16": Method("mpirun", lambda p, c: horovod(p, c, fp16=True), "horovod"),
    "ssd": Method("torchrun", ssd("torch"), "torch", True),
    "ssd-fp16": Method("torchrun", ssd("torch", fp16=True), "torch", True),
    "ssd@horovod": Method("mpirun", ssd("horovod"), "horovod", True),
    "ssd@mpi": Method("mpirun", ssd("mpi"), "mpi", True),
    "ddp": Method("torchrun", ddp, "gloo"),
    "ddp-powersgd": Method("torchrun", ddp_powersgd, "gloo"),
    "post-local-sgd": Method("torchrun", post_local_sgd, "gloo", True),
}
