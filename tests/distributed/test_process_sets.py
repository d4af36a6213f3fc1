"""Some of the ranks train together, others train something else or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from problems import perceptron, regression_loss, weights_of
from support import RecordingCommunicator, bits, is_gradient, on_every_rank, wrap
from training import SGD, STEPS, Training, simulate

import ssd_allreduce as ssd

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}

pytestmark = [
    pytest.mark.ranks("mpirun", 4, env=DYNAMIC),
    pytest.mark.ranks("horovodrun-gloo", 4, env=DYNAMIC),
    pytest.mark.filterwarnings("error"),
]


@pytest.fixture
def halves() -> Iterator[list[Any]]:
    """Two process sets of two ranks, not neighbours. Collective."""
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    yield sets
    for process_set in sets:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("through_horovod", [True, False])
@pytest.mark.parametrize("issue", ["backward", "step"])
def test_process_sets_train_apart(halves: list[Any], issue: str, through_horovod: bool) -> None:
    half = hvd.rank() % 2
    mine = halves[half]
    options: dict[str, Any] = {"communicator": RecordingCommunicator(mine), "issue": issue}
    if through_horovod:
        options["horovod"] = {"process_set": mine}
    # The halves do not even keep step with each other.
    steps = STEPS + 3 * half
    training = Training(lambda: perceptron(seed=half), **options).train(steps)

    def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        return regression_loss(model, mine.ranks[rank], step)

    expected = simulate(steps, lambda: perceptron(seed=half), loss, ranks=2)
    training.assert_follows(expected, rank_in_simulation=mine.rank())
    training.optimizer.flush()
    weights = on_every_rank(bits(training.model.parameters()))
    assert weights[hvd.rank()] == weights[hvd.rank() ^ 2] != weights[hvd.rank() ^ 1]


def train_in(process_set: Any, model: torch.nn.Module) -> None:
    """A bare optimizer, without a communicator of one's own."""
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), **SGD),
        named_parameters=model.named_parameters(),
        process_set=process_set,
        delay_steps=4,
        overlap_steps=2,
    )
    for step in range(7):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.flush()
    optimizer.close()


def test_process_set_is_all_that_has_to_be_said(halves: list[Any]) -> None:
    model = perceptron()
    train_in(halves[hvd.rank() % 2], model)
    weights = on_every_rank(bits(model.parameters()))
    assert weights[hvd.rank()] == weights[hvd.rank() ^ 2] != weights[hvd.rank() ^ 1]


def test_rank_outside_trains_alone_under_horovod_and_is_refused_bare(halves: list[Any]) -> None:
    """As Horovod's own optimizer, which leaves such a rank's gradients alone."""
    inside = halves[0].included()
    model = perceptron()
    sgd = torch.optim.SGD(model.parameters(), **SGD)
    names = {"named_parameters": list(model.named_parameters())}
    if not inside:
        with pytest.raises(ssd.UsageError, match="not in the process set"):
            wrap(sgd, process_set=halves[0], **names)
    optimizer = wrap(
        hvd.DistributedOptimizer(sgd, process_set=halves[0], **names), delay_steps=4, overlap_steps=2
    )
    for step in range(10):
        optimizer.zero_grad()
        regression_loss(model, hvd.rank(), step).backward()
        optimizer.step()
    optimizer.flush()

    weights = on_every_rank(bits(model.parameters()))
    if inside:
        assert weights[0] == weights[2]
        return
    alone = perceptron()
    plain = torch.optim.SGD(alone.parameters(), **SGD)
    for step in range(10):
        plain.zero_grad()
        regression_loss(alone, hvd.rank(), step).backward()
        plain.step()
    assert weights[hvd.rank()] == bits(alone.parameters())


def test_whole_world_and_a_process_set_side_by_side(halves: list[Any]) -> None:
    """One model for all ranks and one for each half, in the same script, under the same names."""
    mine = halves[hvd.rank() % 2]
    everyone = Training(horovod={})
    few = Training(communicator=RecordingCommunicator(mine), horovod={"process_set": mine}, delay_steps=3)
    for _ in range(STEPS):
        everyone.make_step()
        few.make_step()
    everyone.assert_follows(simulate())
    assert any(map(is_gradient, few.communicator.take_names()))
    expected = simulate(
        loss=lambda model, rank, step: regression_loss(model, mine.ranks[rank], step), ranks=2, delay_steps=3
    )
    few.assert_follows(expected, rank_in_simulation=mine.rank())
    assert weights_of(everyone.model).shape == weights_of(few.model).shape


def test_set_that_takes_the_number_of_a_removed_one_trains() -> None:
    """Rank 2 is in both, and has made an optimizer more than rank 3 when they meet."""
    for ranks in ([0, 2], [2, 3]):
        process_set = hvd.add_process_set(ranks)
        model = perceptron()
        if process_set.included():
            train_in(process_set, model)
        weights = on_every_rank(bits(model.parameters()))
        assert weights[ranks[0]] == weights[ranks[1]] != bits(perceptron().parameters())
        hvd.remove_process_set(process_set)
