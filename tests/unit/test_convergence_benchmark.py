"""What convergence.py trains on, what it keeps, and how it puts trainings together."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.model_averaging import utils as averaging_utils

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import convergence  # noqa: E402
from convergence import Outcome, Run, known_outcomes, summarise, with_seconds  # noqa: E402
from datasets import Dataset, Shard, cifar10, digits  # noqa: E402
from methods import METHODS, Choice  # noqa: E402
from models import Problem  # noqa: E402


def write_cifar(folder: Path, pictures: int = 7) -> None:
    """Files in the format of CIFAR-10's Python version: rows of 3,072 bytes, and labels from 0 to 9."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for position, name in enumerate(names):
        data = np.full((pictures, 3072), 51 * position, dtype=np.uint8)
        batch = {b"data": data, b"labels": [(position + n) % 10 for n in range(pictures)]}
        (folder / name).write_bytes(pickle.dumps(batch))


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_is_read_from_its_folder_or_the_one_around_it(inside: str, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data" / inside)
    dataset = cifar10(tmp_path / "data")
    pictures, labels = dataset.train
    assert pictures.shape == (35, 3, 32, 32)
    assert labels[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 2]
    # Bytes 0 and 255 become -2 and 2.
    assert pictures[0].unique().tolist() == [-2.0]
    assert dataset.test[0].unique().tolist() == [2.0]
    torch.manual_seed(0)
    assert dataset.make_model()(pictures).shape == (35, 10)


def test_incomplete_cifar_is_refused_by_the_missing_file(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data")
    (tmp_path / "data" / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match=r"data does not hold CIFAR-10: data_batch_3 missing"):
        cifar10(tmp_path / "data")


def labelled(count: int) -> Dataset:
    labels = torch.arange(count) % 10
    pictures = torch.arange(float(count)).view(-1, 1)
    return Dataset("numbers", (pictures, labels), (pictures, labels), torch.nn.Identity, 0.9)


def test_equal_shards_hold_every_picture_once() -> None:
    own = [Shard(labelled(100), "equal", rank, 4)._own.tolist() for rank in range(4)]
    assert sorted(index for each in own for index in each) == list(range(100))
    assert {len(each) for each in own} == {25}


def test_skewed_shards_hold_few_labels() -> None:
    dataset = labelled(100)
    own = [Shard(dataset, "skewed", rank, 5)._own for rank in range(5)]
    assert [dataset.train[1][each].unique().tolist() for each in own] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
    ]


def test_batches_depend_on_seed_and_rank_alone() -> None:
    dataset = labelled(100)

    def first(rank: int, seed: int) -> list[float]:
        return next(iter(Shard(dataset, "equal", rank, 4).batches(seed, 8, 1)))[0].flatten().tolist()

    assert first(0, 1) == first(0, 1)
    assert first(0, 1) != first(0, 2)
    assert first(0, 1) != first(1, 1)


def test_digits_are_those_of_the_package() -> None:
    dataset = digits()
    assert (len(dataset.train[1]), len(dataset.test[1])) == (4000, 1000)
    assert dataset.train[0].max() == 1.0
    assert set(dataset.train[1].tolist()) == set(range(10))


def outcome(method: str = "ssd", k: int = 8, d: int = 4, seed: int = 0, **given: Any) -> Outcome:
    rule = "momentum" if method == "ssd" else None
    defaults = {"test_accuracy": 0.9, "train_loss": 0.1, "steps_to_target": 100, "seconds_to_target": None}
    return Outcome(method, rule, k, d, "equal", seed, **{**defaults, **given})


def timed_step(method: str, k: int | None, d: int | None, seconds: float, **given: Any) -> dict[str, Any]:
    row = {"method": method, "k": k, "d": d, "seconds_per_step": seconds, "rate": "1gbit"}
    return {**row, "model": "alexnet-like", **given}


def test_seconds_are_those_of_the_same_method_and_period() -> None:
    timed = [
        timed_step("ssd", 8, 4, 9.0, rate="100mbit"),
        timed_step("ssd", 8, 4, 8.0, model="resnet20"),
        timed_step("ssd", 8, 2, 7.0),
        timed_step("ssd", 8, 4, 0.5),
        timed_step("horovod", None, None, 2.0),
        timed_step("ddp", None, None, 3.0),
        timed_step("horovod-accumulate", 8, None, 0.25),
    ]

    def seconds(outcome: Outcome, warmup_steps: int = 20) -> float | None:
        return with_seconds(outcome, timed, "1gbit", warmup_steps).seconds_to_target

    assert seconds(outcome("horovod", 1, 0)) == 100 * 2.0
    assert seconds(outcome("horovod-accumulate", 8, 0)) == 100 * 0.25
    # Twenty synchronous steps of three seconds come first.
    assert seconds(outcome()) == 20 * 3.0 + 80 * 0.5
    assert seconds(outcome(steps_to_target=10)) == 10 * 3.0
    assert seconds(outcome("post-local-sgd", 8, 0)) is None
    assert seconds(outcome(steps_to_target=None)) is None


def test_mean_time_counts_only_where_every_seed_arrived() -> None:
    some = [outcome(seed=0, steps_to_target=100), outcome(seed=1, steps_to_target=None)]
    all_of_them = [outcome("ddp", 1, 0, seed=s, steps_to_target=n) for s, n in ((0, 100), (1, 140))]
    first, second = summarise([*some, *all_of_them])
    assert (first["seeds"], first["seeds_at_target"], first["steps_to_target"]) == (2, 1, None)
    assert (second["seeds_at_target"], second["steps_to_target"]) == (2, 120)


def test_difference_to_plain_horovod_is_taken_by_seed() -> None:
    plain = [outcome("horovod", 1, 0, seed, test_accuracy=a) for seed, a in ((0, 0.90), (1, 0.94))]
    ours = [outcome(seed=seed, test_accuracy=a) for seed, a in ((1, 0.95), (0, 0.93))]
    line = summarise([*plain, *ours])[1]
    assert line["paired_difference"] == pytest.approx(0.02)
    # Differences of 0.01 and 0.03.
    assert line["deviation_of_difference"] == pytest.approx(0.02 / 2**0.5)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_ranks_of_post_local_sgd_are_equal_in_warm_up_and_when_weights_were_just_averaged(
    warmup_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged: list[int] = []
    monkeypatch.setattr(
        averaging_utils, "average_parameters_or_parameter_groups", lambda *_: averaged.append(step)
    )
    problem = Problem(torch.nn.Linear(2, 3), torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
    trainer = METHODS["post-local-sgd"].build(problem, Choice(4, 0, warmup_steps=warmup_steps))
    equal = []
    for step in range(12):
        trainer.step()
        if trainer.ranks_are_equal:
            equal.append(step)
    assert averaged == [warmup_steps, warmup_steps + 4, warmup_steps + 8]
    assert equal == [*range(warmup_steps), *averaged]


def resumed(path: Path, **settings: Any) -> dict[Run, Outcome]:
    described = dict.fromkeys(convergence.SETTINGS, 1) | settings
    return known_outcomes(argparse.Namespace(json=path, resume=True), described)


def test_resuming_knows_what_the_file_and_an_interrupted_run_hold(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    settings = dict.fromkeys(convergence.SETTINGS, 1)
    path.write_text(json.dumps({**settings, "results": [asdict(outcome(seed=0))]}))
    (tmp_path / "results.partial").write_text(json.dumps(asdict(outcome(seed=1))) + "\n")
    assert sorted(run.seed for run in resumed(path)) == [0, 1]


def test_resuming_takes_no_seconds_over(tmp_path: Path) -> None:
    """They are told of the steps that --throughput gives to this run, if any."""
    path = tmp_path / "results.json"
    row = asdict(outcome(seed=0, seconds_to_target=12.0))
    path.write_text(json.dumps({**dict.fromkeys(convergence.SETTINGS, 1), "results": [row]}))
    assert [known.seconds_to_target for known in resumed(path).values()] == [None]


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**dict.fromkeys(convergence.SETTINGS, 1), "results": []}))
    with pytest.raises(ValueError, match=r"steps 1, and now it is 600. Resume with the same settings"):
        resumed(path, steps=600)


def test_a_new_run_forgets_an_interrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    (tmp_path / "results.partial").write_text(json.dumps(asdict(outcome())) + "\n")
    assert known_outcomes(argparse.Namespace(json=path, resume=False), {}) == {}
    assert not (tmp_path / "results.partial").exists()
