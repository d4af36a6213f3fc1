"""How engines of several process sets are told apart. Horovod itself is not started."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssd_allreduce import assembly
from ssd_allreduce.assembly import make_transport
from ssd_allreduce.communicators import horovod
from ssd_allreduce.communicators.horovod import HorovodCommunicator
from ssd_allreduce.settings import check_settings
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.transport import Transport


class FakeSet:
    """What is asked of an ``hvd.ProcessSet``, on the process with a given rank."""

    def __init__(self, number: int, ranks: list[int], here: int) -> None:
        self.process_set_id = number
        self.ranks = ranks
        self._here = here

    def included(self) -> bool:
        return self._here in self.ranks

    def rank(self) -> int:
        return self.ranks.index(self._here)

    def size(self) -> int:
        return len(self.ranks)


@pytest.fixture(autouse=True)
def fake_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = FakeSet(0, list(range(400)), 0)
    operations = {"Sum": 1, "Average": 0, "Max": 2}
    fake = SimpleNamespace(global_process_set=everyone, **operations, nccl_built=lambda: 0, cuda_built=bool)
    monkeypatch.setattr(horovod, "_import_horovod", lambda: fake)
    monkeypatch.setattr(horovod, "horovod_is_running", lambda: True)


def make(process_set: FakeSet | None, trace: Path | None = None) -> Transport:
    """What an optimizer on the process set gets."""
    settings = check_settings(
        delay_steps=4,
        overlap_steps=2,
        warmup_steps=0,
        glu="momentum",
        alpha=None,
        beta=None,
        local_lr_scale=None,
        issue="backward",
        timeout=1.0,
    )
    return make_transport(HorovodCommunicator(process_set), settings, StatsRecorder(), trace)


def last_prefix(monkeypatch: pytest.MonkeyPatch, rank: int, *ranks_of_sets: list[int]) -> str:
    """Of the optimizers that a process makes, one on each set in turn, all of which get number 1."""
    monkeypatch.setattr(assembly, "_instances", Counter())
    return [make(FakeSet(1, ranks, rank)).prefix for ranks in ranks_of_sets][-1]


def test_all_ranks_of_a_set_that_took_a_removed_ones_number_name_its_tensors_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was_in_both = last_prefix(monkeypatch, 1, [0, 1], [1, 2])
    was_in_the_last = last_prefix(monkeypatch, 2, [1, 2])
    assert was_in_both == was_in_the_last


def test_sets_of_other_ranks_have_other_keys_whatever_their_numbers() -> None:
    engines = [HorovodCommunicator(FakeSet(1, ranks, 1)) for ranks in ([0, 1], [1, 2], [1, 12], [1])]
    assert len({engine.key for engine in [*engines, HorovodCommunicator()]}) == 5


def test_a_sets_key_is_the_same_on_all_its_ranks_and_when_it_is_made_again() -> None:
    keys = {HorovodCommunicator(FakeSet(number, [3, 5], rank)).key for number in (1, 7) for rank in (3, 5)}
    assert len(keys) == 1


@pytest.mark.parametrize("size", [2, 200])
def test_ranks_of_several_sets_write_traces_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    """Also where the list of a set's ranks is longer than a file's name may be."""
    monkeypatch.setattr(assembly, "_instances", Counter())
    even, odd = (FakeSet(1, list(range(first, 2 * size, 2)), first) for first in (0, 1))
    for process_set in (None, even, odd):
        tracer = make(process_set, tmp_path / "trace.json").tracer
        tracer.align(0)
        tracer.write()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert names[-1] == "trace.rank0.json"
    assert all(name.startswith("trace.rank0.horovod-") for name in names[:-1])
