"""Ranks that run out of data at different times meet in ``flush()``: equal weights, the exact mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launch_plan import WITHOUT_HOROVOD
from problems import gradient_of, perceptron, regression_loss, weights_of
from ranks import hvd
from simulation import Options, Simulation, Vector
from support import RecordingCommunicator, assert_equal_on_all_ranks, is_gradient, on_every_rank, wrap

pytestmark = [
    pytest.mark.ranks("mpirun", 2, 3),
    pytest.mark.ranks("horovodrun-gloo", 2),
    *WITHOUT_HOROVOD,
]

LR, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 0.01
DELAY_STEPS = 4
WARMUP_STEPS = 3
RULES = {
    "momentum": {"glu": "momentum"},
    "gradient": {"glu": "gradient", "alpha": 0.5, "beta": 0.5},
    "displacement": {"glu": "displacement", "beta": 0.3, "local_lr_scale": 0.5},
    "none": {"glu": "none"},
}
# Steps of each rank before a flush. With two ranks the first two numbers count.
ENDS = {
    "equal": [(6, 6, 6)],
    "less_than_a_period_apart": [(9, 7, 8)],
    "more_than_a_period_apart": [(5, 17, 9)],
    "several_periods_apart_at_period_ends": [(WARMUP_STEPS + 4, WARMUP_STEPS + 12, WARMUP_STEPS + 8)],
    "across_the_end_of_warmup": [(1, 9, 2)],
    "all_within_warmup": [(1, 2, 0)],
    "no_step_on_one_rank": [(0, 9, 5)],
    "no_step_anywhere": [(0, 0, 0), (5, 5, 5)],
    "several_flushes": [(9, 7, 8), (0, 0, 0), (3, 6, 11), (8, 8, 8), (5, 0, 0)],
    "flushes_within_warmup": [(1, 0, 0), (0, 1, 1), (2, 3, 4), (6, 6, 6)],
}


def simulate(ends: list[tuple[int, ...]], **settings: object) -> Simulation:
    model = perceptron()
    simulation = Simulation(
        weights_of(model),
        hvd.size(),
        gradient_of(perceptron(), regression_loss),
        lambda step: Options(LR, MOMENTUM, WEIGHT_DECAY),
        delay_steps=DELAY_STEPS,
        **settings,  # type: ignore[arg-type]
    )
    for counts in ends:
        simulation.run(counts[: hvd.size()])
    return simulation


class Trained:
    """The perceptron of this rank."""

    def __init__(self, wrapped: bool = False, **settings: object) -> None:
        self.model = perceptron()
        self.communicator = RecordingCommunicator()
        base = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        names = {"named_parameters": self.model.named_parameters()}
        if wrapped:
            base = hvd.DistributedOptimizer(base, **names)
            names = {}
        self.optimizer = wrap(
            base, delay_steps=DELAY_STEPS, communicator=self.communicator, **settings, **names
        )
        self.history: list[Vector] = []

    @property
    def steps(self) -> int:
        return len(self.history)

    def make_steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            regression_loss(self.model, hvd.rank(), self.steps).backward()
            self.optimizer.step()
            self.history.append(weights_of(self.model))


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_weights_are_the_exact_mean_of_the_steps_made(
    ends: list[tuple[int, ...]], overlap_steps: int
) -> None:
    expected = simulate(ends, overlap_steps=overlap_steps, warmup_steps=WARMUP_STEPS)
    trained = Trained(overlap_steps=overlap_steps, warmup_steps=WARMUP_STEPS)

    for counts in ends:
        trained.make_steps(counts[hvd.rank()])
        trained.optimizer.flush()
        assert_equal_on_all_ranks(trained.model.parameters())
        local = weights_of(trained.model)
        with trained.optimizer.global_weights():
            np.testing.assert_array_equal(weights_of(trained.model), local)

    np.testing.assert_allclose(weights_of(trained.model), expected.weights, rtol=1e-9, atol=1e-12)
    on_the_way = expected.ranks[hvd.rank()].local_history
    assert len(on_the_way) == trained.steps == trained.optimizer.stats().steps
    for seen, wanted in zip(trained.history, on_the_way, strict=True):
        np.testing.assert_allclose(seen, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks("mpirun", 2, 3)
@pytest.mark.ranks("mpirun-mpi4py", 2, 3)
@pytest.mark.ranks("torchrun", 2, 3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("overlap_steps", "wrapped", "issue"), [(1, True, "backward"), (3, False, "backward"), (3, True, "step")]
)
def test_every_rule_ends_at_the_mean(rule: str, overlap_steps: int, wrapped: bool, issue: str) -> None:
    settings = {**RULES[rule], "overlap_steps": overlap_steps, "warmup_steps": 2}
    ends = [(7, 13, 4), (6, 2, 9)]
    expected = simulate(ends, **settings)
    trained = Trained(wrapped, issue=issue, **settings)

    for counts in ends:
        trained.make_steps(counts[hvd.rank()])
        trained.optimizer.flush()

    assert_equal_on_all_ranks(trained.model.parameters())
    np.testing.assert_allclose(weights_of(trained.model), expected.weights, rtol=1e-9, atol=1e-12)


def test_ranks_issue_the_same_allreduces_in_uneven_ends() -> None:
    trained = Trained(overlap_steps=2, warmup_steps=WARMUP_STEPS)

    for counts in ENDS["several_flushes"]:
        trained.make_steps(counts[hvd.rank()])
        trained.optimizer.flush()

    issued = [name for name in trained.communicator.take_names() if is_gradient(name)]
    assert issued
    # In which order a rank hands over the tensors of one sync event is its own affair.
    events = [sorted(issued[i : i + 4]) for i in range(0, len(issued), 4)]
    assert on_every_rank(events) == [events] * hvd.size()


def test_flush_before_the_first_step_leaves_the_weights_alone() -> None:
    trained = Trained(overlap_steps=1)
    before = weights_of(trained.model)

    trained.optimizer.flush()

    np.testing.assert_array_equal(weights_of(trained.model), before)
    assert trained.optimizer.stats().steps == 0


def test_gradients_computed_before_a_flush_in_warmup_survive_it() -> None:
    """A loop may call flush() between backward and step where nothing has been sent yet."""
    trained = Trained(overlap_steps=1, warmup_steps=2, issue="step")
    trained.make_steps(1)
    trained.optimizer.zero_grad()
    regression_loss(trained.model, hvd.rank(), 1).backward()
    before = [p.grad.clone() for p in trained.model.parameters()]

    trained.optimizer.flush()

    assert all(map(torch.equal, before, (p.grad for p in trained.model.parameters())))
