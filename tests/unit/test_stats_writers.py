"""Statistics in a CSV file and in TensorBoard."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from loops import small_model, train, wrap

from ssd_allreduce import Loopback, Stats
from ssd_allreduce.stats_writers import CSVStatsWriter, write_to_tensorboard


def stats_after(steps: int) -> Stats:
    model = small_model()
    optimizer = wrap(model, Loopback(2), delay_steps=3, overlap_steps=1, warmup_steps=2)
    train(model, optimizer, steps)
    return optimizer.stats()


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_lines_hold_every_counter(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "stats.csv"
    writer = CSVStatsWriter(path)
    writer.write(stats_after(2), 2)
    writer.write(stats_after(7), 7)
    first, second = lines_of(path)
    assert (first["step"], first["steps"], first["delay/steps"]) == ("2", "2", "0")
    assert (second["step"], second["warmup/steps"], second["delay/steps"]) == ("7", "2", "5")
    assert (second["delay_steps"], second["overlap_steps"]) == ("3", "1")
    assert float(second["bytes_sent"]) == stats_after(7).bytes_sent
    assert 0.0 <= float(second["delay/overlap"]) <= 1.0


def test_csv_goes_on_after_a_restart_and_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    for step in (1, 2):
        CSVStatsWriter(path).write(stats_after(step), step)
    assert [line["step"] for line in lines_of(path)] == ["1", "2"]
    other = tmp_path / "other.csv"
    other.write_text("epoch,loss\n")
    with pytest.raises(ValueError, match=r"has the columns epoch, loss.*Give a new file"):
        CSVStatsWriter(other)
    assert other.read_text() == "epoch,loss\n"


class Scalars:
    """Stands in for TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.added: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.added[tag] = (scalar_value, global_step)


def test_tensorboard_gets_a_scalar_for_each_counter() -> None:
    scalars = Scalars()
    write_to_tensorboard(scalars, stats_after(7), 7, prefix="run")
    assert scalars.added["run/steps"] == (7, 7)
    assert scalars.added["run/delay/sync_points"] == (1, 7)
    assert "run/warmup/bytes_sent" in scalars.added


def test_tensorboards_own_writer_takes_them(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    write_to_tensorboard(writer, stats_after(3), 3)
    writer.close()
    assert any(tmp_path.iterdir())
