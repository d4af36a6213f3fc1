"""Training that is stopped, saved and continued is the training that was never stopped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DELAY_STEPS, RULES, STEPS, WARMUP_STEPS, Run, settings_of
from launch_plan import on_any_engine
from problems import perceptron, regression_loss
from ranks import hvd
from support import assert_equal_on_all_ranks, bits, on_every_rank, wrap

pytestmark = pytest.mark.ranks("mpirun", 2)

OTHER_SEED = 7
FLUSHED_AT = 9


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def train_and_save_after_every_step(settings: dict[str, Any], **options: Any) -> tuple[Run, dict[int, bytes]]:
    run = Run(settings, **options)
    saved = {0: run.save()}
    for step in range(1, STEPS + 1):
        run.train(step)
        saved[step] = run.save()
    return run, saved


def assert_continues(saved: bytes, uninterrupted: Run, with_model: bool = True, **options: Any) -> None:
    """From a model with other weights, to show that nothing is left over from before."""
    resumed = Run(uninterrupted.settings, seed=OTHER_SEED, **options)
    with no_warnings():
        resumed.load(saved, with_model)
        start = resumed.step
        if start:
            same = resumed.snapshot() == uninterrupted.history[start]
            assert same, f"loaded after step {start}: differs at once"
        resumed.train(STEPS)
    for step in range(start + 1, STEPS + 1):
        same = resumed.history[step] == uninterrupted.history[step]
        assert same, f"stopped after step {start}: step {step} differs"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap_steps", [0, 2, 3])
def test_saving_changes_nothing(rule: str, overlap_steps: int) -> None:
    """In flight too, where state_dict() waits for what this rank has sent."""
    settings = settings_of(rule, overlap_steps)
    saving, _ = train_and_save_after_every_step(settings)
    never_saving = Run(settings)
    never_saving.train(STEPS)
    assert saving.history == never_saving.history


@on_any_engine(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap_steps", [0, 2, 3])
def test_continues_after_any_step(rule: str, overlap_steps: int) -> None:
    run, saved = train_and_save_after_every_step(settings_of(rule, overlap_steps))
    for step in range(STEPS):
        assert_continues(saved[step], run, with_model=step % 2 == 0)


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"issue": "step"}},
        {"horovod": {"compression": hvd.Compression.fp16}},
        {"horovod": {"op": hvd.Sum}},
        {"horovod": {"groups": 2}},
        {"sgd": {"lr": 0.05}},
        {"sgd": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ],
    ids=["issue_step", "fp16", "sum", "groups", "plain_sgd", "nesterov", "bfloat16", "float64"],
)
def test_continues_whatever_the_options(options: dict[str, Any]) -> None:
    options = dict(options)
    settings = {**settings_of("momentum", 2), **options.pop("settings", {})}
    run, saved = train_and_save_after_every_step(settings, **options)
    for step in (2, 5, 7, 8, 9):
        assert_continues(saved[step], run, **options)


@pytest.mark.parametrize("order", ["one after the other", "all inside", "written inside"])
@pytest.mark.parametrize("stopped_at", [2, 5, 7, 8, 9])
def test_continues_whether_saved_inside_global_weights_or_outside(stopped_at: int, order: str) -> None:
    run = Run(settings_of("momentum", 2))
    run.train(stopped_at)
    saved = run.save(order)
    run.train(STEPS)
    assert_continues(saved, run)


@on_any_engine(2)
def test_continues_in_the_same_objects() -> None:
    """Going back to an earlier state of a run that has gone on."""
    run, saved = train_and_save_after_every_step(settings_of("momentum", 2))
    history = dict(run.history)
    for step in (12, 8, 2):
        run.load(saved[step])
        run.train(STEPS)
        assert run.history == history


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("flushed_at", [1, 5, FLUSHED_AT])
def test_state_of_rank_0_serves_all_after_a_flush(rule: str, overlap_steps: int, flushed_at: int) -> None:
    run = Run(settings_of(rule, overlap_steps))
    run.train(flushed_at)
    run.optimizer.flush()
    saved = hvd.broadcast_object(run.save() if hvd.rank() == 0 else b"", name="saved")

    assert_continues_from_rank_0(saved, run, flushed_at)


def assert_continues_from_rank_0(saved: bytes, run: Run, start: int) -> None:
    resumed = Run(run.settings, seed=OTHER_SEED)
    with no_warnings():
        resumed.load(saved)
        assert resumed.snapshot() == run.snapshot()
        run.train(STEPS)
        resumed.train(STEPS)
    assert all(resumed.history[step] == run.history[step] for step in range(start + 1, STEPS + 1))


@on_any_engine(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "stopped_at",
    [WARMUP_STEPS + 2, WARMUP_STEPS + DELAY_STEPS, WARMUP_STEPS + DELAY_STEPS + 1],
    ids=["mid_period", "at_a_sync_point", "in_flight"],
)
def test_state_of_rank_0_in_mid_period_starts_a_new_period_everywhere(rule: str, stopped_at: int) -> None:
    """Nobody hangs, the ranks to which the partial period does not belong say so once."""
    run = Run(settings_of(rule, overlap_steps=2))
    run.train(stopped_at)
    saved = hvd.broadcast_object(run.save() if hvd.rank() == 0 else b"", name="saved")
    expected_global = run.global_snapshot()

    resumed = Run(run.settings, seed=OTHER_SEED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load(saved)
        assert resumed.global_snapshot() == expected_global
        resumed.train(stopped_at + 3 * DELAY_STEPS)
        resumed.optimizer.flush()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (0 if hvd.rank() == 0 else 1), texts
    assert all("rank 0 of" in text and "new period begins" in text for text in texts)

    # A new period: the first completion comes a whole period and the overlap after the load.
    seen = [resumed.history[step][4:] for step in range(stopped_at + 1, stopped_at + 3 * DELAY_STEPS + 1)]
    changes = [index for index in range(1, len(seen)) if seen[index] != seen[index - 1]]
    assert changes == [DELAY_STEPS + 1, 2 * DELAY_STEPS + 1]
    assert on_every_rank(seen) == [seen] * hvd.size()
    assert_equal_on_all_ranks(resumed.model.parameters())


def test_checkpoint_with_other_settings_starts_a_new_period() -> None:
    run = Run(settings_of("momentum", overlap_steps=2))
    run.train(8)
    saved = run.save()

    resumed = Run({**run.settings, "delay_steps": 3, "overlap_steps": 0}, seed=OTHER_SEED)
    with pytest.warns(UserWarning, match="new period begins"):
        resumed.load(saved)

    assert resumed.global_snapshot() == run.global_snapshot()
    with no_warnings():
        resumed.train(8 + 3)
    # The first period of three steps has ended.
    assert_equal_on_all_ranks(resumed.model.parameters())
    assert resumed.global_snapshot() != run.global_snapshot()


@pytest.mark.parametrize("wrapped", [False, True], ids=["torch", "horovod"])
@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_checkpoint_of_plain_training_is_taken_over(wrapped: bool, warmup_steps: int) -> None:
    """As if the base optimizer had held that state when it was wrapped."""
    trained, plain = train_plainly(wrapped, steps=5)
    settings = {"delay_steps": 3, "overlap_steps": 1, "warmup_steps": warmup_steps}

    def continue_from(load_before_wrapping: bool) -> list[list[bytes]]:
        model = perceptron(torch.float32)
        model.load_state_dict(trained.state_dict())
        base = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1)
        if load_before_wrapping:
            base.load_state_dict(plain.state_dict())
        optimizer = wrap(base, named_parameters=model.named_parameters(), **settings)
        if not load_before_wrapping:
            optimizer.load_state_dict(plain.state_dict())
        history = []
        for step in range(5, 14):
            optimizer.zero_grad()
            regression_loss(model, hvd.rank(), step).backward()
            optimizer.step()
            history.append(bits(model.parameters()))
        return history

    with no_warnings():
        assert continue_from(load_before_wrapping=False) == continue_from(load_before_wrapping=True)


def train_plainly(wrapped: bool, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = perceptron(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        # Without Horovod, every rank trains on the same data.
        regression_loss(model, hvd.rank() if wrapped else 0, step).backward()
        optimizer.step()
    return model, optimizer


def test_checkpoint_serves_plain_training() -> None:
    """What the base optimizer needs stands where torch expects it."""
    run = Run(settings_of("momentum", overlap_steps=2))
    run.train(FLUSHED_AT)
    run.optimizer.flush()
    model = perceptron(torch.float32)
    model.load_state_dict(run.model.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1)

    plain.load_state_dict(run.optimizer.state_dict())

    assert plain.param_groups[0]["momentum"] == 0.9
    assert plain.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    momenta = [plain.state[p]["momentum_buffer"] for p in model.parameters()]
    assert bits(model.parameters()) + bits(momenta) == run.global_snapshot()
    regression_loss(model, hvd.rank(), STEPS).backward()
    plain.step()
    assert bits(model.parameters()) != run.global_snapshot()[: len(momenta)]


def test_foreign_checkpoint_is_refused_with_what_differs() -> None:
    run = Run(settings_of("momentum", overlap_steps=2))
    run.train(FLUSHED_AT)
    run.optimizer.flush()
    before = run.global_snapshot()
    for change, message in (
        ({"names": ["0.weight", "0.bias", "2.weight", "head.bias"]}, r"differ in 2\.bias, head\.bias"),
        ({"format": 99}, "format 99"),
    ):
        content = copy.deepcopy(run.optimizer.state_dict())
        content["state"]["ssd_allreduce"].update(change)
        with pytest.raises(ValueError, match=message):
            run.optimizer.load_state_dict(content)
    assert run.global_snapshot() == before


def test_rank_0_alone_saves_inside_global_weights(shared_path: Path) -> None:
    """The usual pattern, in mid-period: nobody waits for anybody."""
    run = Run(settings_of("momentum", overlap_steps=2))
    run.train(FLUSHED_AT + 1)
    with run.optimizer.global_weights():
        if hvd.rank() == 0:
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
            torch.save(state, shared_path / "checkpoint.pt")
    hvd.barrier()
    saved = torch.load(shared_path / "checkpoint.pt", weights_only=True)
    assert bits(saved["model"].values()) == run.global_snapshot()[: len(saved["model"])]
