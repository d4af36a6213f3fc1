"""What is handed to the engine: nothing in delay steps, the same on all ranks, early in backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from problems import perceptron, regression_loss
from ranks import hvd
from support import RecordingCommunicator, is_gradient, on_every_rank, wrap
from torch import Tensor, nn

import ssd_allreduce as ssd

pytestmark = [
    pytest.mark.ranks("mpirun", 2),
    pytest.mark.ranks("horovodrun-gloo", 2),
    pytest.mark.ranks("horovodrun-mpi", 2),
]

NAMES = [name for name, _ in perceptron().named_parameters()]
CONTROL = ["control.sum", "control.max"]
SETTINGS = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 3}
SYNC_POINTS = (6, 10, 14)
STEPS = 16


class Trained:
    """The perceptron of this rank, and what its training hands to the engine."""

    def __init__(self, wrapped: bool = True, horovod: dict[str, Any] | None = None, **settings: Any) -> None:
        self.model = perceptron(torch.float32)
        self.communicator = RecordingCommunicator()
        base = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        names: dict[str, Any] = {"named_parameters": self.model.named_parameters()}
        if wrapped:
            base = hvd.DistributedOptimizer(base, **names, **(horovod or {}))
            names = {}
        self.optimizer = wrap(base, communicator=self.communicator, **settings, **names)

    def backward(self, step: int) -> list[str]:
        """What backward hands over."""
        self.optimizer.zero_grad()
        regression_loss(self.model, hvd.rank(), step).backward()
        return self.communicator.take_names()

    def step(self) -> list[str]:
        """What step() hands over."""
        self.optimizer.step()
        return self.communicator.take_names()

    def run(self, steps: int = STEPS) -> list[list[str]]:
        return [self.backward(step) + self.step() for step in range(steps)]


def gradients(names: list[str]) -> list[str]:
    return [name for name in names if is_gradient(name)]


def named(suffix: str) -> list[str]:
    return [f"{name}.{suffix}" for name in NAMES]


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "horovod_wrapped"])
def test_delay_steps_hand_over_nothing(wrapped: bool, issue: str) -> None:
    handed = Trained(wrapped, issue=issue, **SETTINGS).run()

    for step, names in enumerate(handed):
        if step < SETTINGS["warmup_steps"]:
            assert sorted(gradients(names)) == sorted(named("gradient"))
        elif step in SYNC_POINTS:
            assert sorted(names) == sorted(named("accumulated") + CONTROL)
        else:
            assert names == [], f"step {step}"


@pytest.mark.parametrize("issue", ["backward", "step"])
def test_ranks_hand_over_the_same(issue: str) -> None:
    handed = Trained(issue=issue, **SETTINGS).run()
    assert on_every_rank(handed) == [handed] * hvd.size()


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_rank_without_some_gradients_hands_over_the_same(issue: str, warmup_steps: int) -> None:
    trained = Trained(issue=issue, delay_steps=3, overlap_steps=1, warmup_steps=warmup_steps)
    handed = []
    for step in range(10):
        trained.optimizer.zero_grad()
        model = trained.model
        # One rank leaves the first layer out of its graph in some steps, and the whole model in others.
        mine = hvd.rank() == 1
        for parameter in model[0].parameters():
            parameter.requires_grad_(not (mine and step % 2))
        if not (mine and step % 5 == 2):
            regression_loss(model, hvd.rank(), step).backward()
        for parameter in model[0].parameters():
            parameter.requires_grad_(True)
        trained.optimizer.step()
        handed.append(sorted(trained.communicator.take_names()))

    assert sum(map(len, handed)) > 0
    assert on_every_rank(handed) == [handed] * hvd.size()


def order_of_backward(model: nn.Module) -> list[str]:
    """Records the parameters' names as autograd finishes their gradients."""
    finished: list[str] = []

    def note(name: str) -> Any:
        return lambda parameter: finished.append(name)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(note(name))
    return finished


def test_sync_points_hand_over_in_the_order_of_backward_and_before_step() -> None:
    trained = Trained(**SETTINGS)
    finished = order_of_backward(trained.model)

    for step in range(STEPS):
        finished.clear()
        in_backward, in_step = trained.backward(step), trained.step()
        if step in SYNC_POINTS:
            assert in_backward == [f"{name}.accumulated" for name in finished]
            assert in_step == CONTROL
        elif 0 < step < SETTINGS["warmup_steps"]:
            assert in_backward == [f"{name}.gradient" for name in finished]
            assert in_step == CONTROL
        else:
            assert in_backward == []
    assert sorted(finished) == sorted(NAMES)


def test_the_first_step_compares_ranks_before_any_gradient_leaves() -> None:
    trained = Trained(delay_steps=1)

    assert trained.backward(0) == []
    handed = trained.step()

    first_gradient = handed.index(gradients(handed)[0])
    assert first_gradient > 0
    assert all(name.startswith("agreement.") for name in handed[:first_gradient])
    assert sorted(handed[first_gradient:]) == sorted(named("gradient") + CONTROL)


def test_issue_step_hands_over_nothing_in_backward() -> None:
    trained = Trained(issue="step", **SETTINGS)
    for step in range(STEPS):
        assert trained.backward(step) == []
        trained.step()


def test_only_the_last_backward_pass_of_a_sync_point_hands_over() -> None:
    trained = Trained(horovod={"backward_passes_per_step": 3}, **SETTINGS)
    for step in range(STEPS):
        for index in range(3):
            loss = regression_loss(trained.model, hvd.rank(), 3 * step + index)
            loss.backward()
            handed = trained.communicator.take_names()
            due = step in SYNC_POINTS or 0 < step < SETTINGS["warmup_steps"]
            assert len(handed) == (len(NAMES) if due and index == 2 else 0)
        trained.step()
        trained.optimizer.zero_grad()


def test_groups_travel_together() -> None:
    trained = Trained(horovod={"groups": 2}, **SETTINGS)

    def pieces(names: list[str]) -> int:
        return len(gradients(names))

    counts = list(map(pieces, trained.run()))

    assert counts == [2 if step < 3 or step in SYNC_POINTS else 0 for step in range(STEPS)]


class SizingCommunicator(RecordingCommunicator):
    """Adds up the bytes of gradients and remembers their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.dtypes: set[torch.dtype] = set()

    def allreduce_async(self, tensors: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if is_gradient(name):
            self.dtypes.update(tensor.dtype for tensor in tensors)
        return super().allreduce_async(tensors, name, *args, **kwargs)


def train_sized(steps: int, **settings: Any) -> tuple[ssd.DistributedOptimizer, SizingCommunicator]:
    model = perceptron(torch.float32)
    communicator = SizingCommunicator()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = wrap(
        base, named_parameters=model.named_parameters(), communicator=communicator, **SETTINGS, **settings
    )
    for step in range(steps):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
    return optimizer, communicator


def test_stats_tell_what_was_done() -> None:
    optimizer, communicator = train_sized(STEPS)
    stats = optimizer.stats()

    assert (stats.warmup.steps, stats.delay.steps, stats.steps) == (3, 13, 16)
    assert (stats.warmup.sync_points, stats.delay.sync_points, stats.sync_points) == (3, 3, 6)
    assert (stats.warmup.allreduces, stats.delay.allreduces, stats.allreduces) == (3, 3, 6)
    assert stats.bytes_sent == communicator.bytes
    assert 0 < stats.delay.bytes_sent < stats.bytes_sent
    assert stats.wait_seconds == stats.warmup.wait_seconds + stats.delay.wait_seconds > 0.0


def test_fp16_compression_decides_what_travels() -> None:
    _, communicator = train_sized(STEPS, compression=hvd.Compression.fp16)
    assert communicator.dtypes == {torch.float16}


def leave_rank_0_alone(optimizer: ssd.DistributedOptimizer, model: nn.Module) -> Iterator[Tensor]:
    """Everything that is rank-local, on one rank while the others go on."""
    optimizer.state_dict()
    optimizer.stats()
    with optimizer.global_weights():
        yield from model.state_dict().values()


@pytest.mark.parametrize("steps", [2, 5, 7, 8, 9])
def test_rank_local_calls_on_rank_0_alone_hand_over_nothing(steps: int) -> None:
    """In warm-up, in mid-period, at a sync point, in flight, and after the completion."""
    trained = Trained(**SETTINGS)
    trained.run(steps)

    if hvd.rank() == 0:
        assert list(leave_rank_0_alone(trained.optimizer, trained.model))
        assert trained.communicator.take_names() == []
    trained.run(6)
