"""Writes what ``stats()`` returns to a CSV file or to TensorBoard, step by step. Rank-local."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from ssd_allreduce.statistics import Stats


class ScalarWriter(Protocol):
    """What is needed of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record one number."""


def as_numbers(stats: Stats) -> dict[str, float]:
    """All counters under flat names: ``steps``, ``delay/wait_seconds``, ``delay/overlap``, ..."""
    numbers: dict[str, float] = {}
    for name, value in asdict(stats).items():
        if isinstance(value, dict):
            numbers |= {f"{name}/{inner}": number for inner, number in value.items()}
        else:
            numbers[name] = value
    numbers["delay/overlap"] = stats.delay.overlap
    return numbers


class CSVStatsWriter:
    """A CSV file with one line for each call of :meth:`write`.

    Args:
        path: the file; lines are added to one that exists already, as after a restart.

    Raises:
        ValueError: the file exists and has other columns.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._columns = ["step", *as_numbers(Stats())]
        if self._path.exists() and self._path.stat().st_size:
            with self._path.open(newline="") as file:
                found = next(csv.reader(file))
            if found != self._columns:
                raise ValueError(
                    f"{self._path} has the columns {', '.join(found)}; these statistics have "
                    f"{', '.join(self._columns)}. Give a new file."
                )
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._append(self._columns)

    def write(self, stats: Stats, step: int) -> None:
        """Add a line, which is in the file when this returns."""
        numbers = as_numbers(stats)
        self._append([step, *(numbers[column] for column in self._columns[1:])])

    def _append(self, values: list[str] | list[float]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(values)


def write_to_tensorboard(
    writer: ScalarWriter, stats: Stats, step: int, prefix: str = "ssd_allreduce"
) -> None:
    """Add every counter as a scalar.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.
        stats: what ``optimizer.stats()`` returned.
        step: the step that they belong to.
        prefix: put before every name.
    """
    for name, number in as_numbers(stats).items():
        writer.add_scalar(f"{prefix}/{name}", number, step)
