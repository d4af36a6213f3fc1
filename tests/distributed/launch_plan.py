"""What the ``ranks`` marker of a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import pytest

PARAMETER = "launch"

_Test = TypeVar("_Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Launch:
    """One way of starting ranks; tests with equal ones share a launch unless they are ``alone``."""

    launcher: str
    ranks: int
    env: tuple[tuple[str, str], ...] = ()
    alone: bool = False

    def __str__(self) -> str:
        values = "".join(f"-{value}" for name, value in self.env if name == "SSD_ALLREDUCE_KERNELS")
        return f"{self.launcher}-{self.ranks}{values}"


WITHOUT_HOROVOD = [pytest.mark.ranks("mpirun-mpi4py", 2), pytest.mark.ranks("torchrun", 2)]
"""For tests that hold whatever the engine is."""


def on_any_engine(*counts: int) -> Callable[[_Test], _Test]:
    """Marks a test for mpirun and so many ranks, and for 2 ranks of each engine that is not Horovod."""

    def mark(test: _Test) -> _Test:
        for launcher in (pytest.mark.ranks("mpirun", *counts), *WITHOUT_HOROVOD):
            test = launcher(test)
        return test

    return mark


def make_launches(
    launcher: str, *counts: int, env: Mapping[str, str] | None = None, alone: bool = False
) -> list[Launch]:
    """The launches that one ``ranks`` marker with these arguments stands for."""
    return [Launch(launcher, ranks, tuple(sorted((env or {}).items())), alone) for ranks in counts]


def launches_of(node: pytest.Function) -> list[Launch]:
    """What the function's own markers ask for, else those of its module."""
    own = [mark for mark in node.own_markers if mark.name == "ranks"]
    marks = own or list(node.iter_markers("ranks"))
    return [launch for mark in marks for launch in make_launches(*mark.args, **mark.kwargs)]


def launch_of(item: pytest.Item) -> Launch | None:
    """The launch of one collected test."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(PARAMETER)


def time_limit(item: pytest.Item, default: float) -> float:
    """Seconds that the test's body may take on a rank."""
    marker = item.get_closest_marker("timeout")
    return default if marker is None else float(marker.args[0])
