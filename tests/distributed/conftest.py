"""Tests whose body runs on every rank of a real launch.

A test is an ordinary pytest function with the marker ``ranks(launcher, *counts)``, on itself or on its
module::

    pytestmark = [pytest.mark.ranks("mpirun", 2, 3), pytest.mark.ranks("horovodrun-gloo", 2)]

    def test_sum_counts_every_rank() -> None:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()

It becomes one test for each launcher and number of ranks. Its body runs inside the ranks, where
``hvd.init()`` has been called; the pytest that you start only launches them, once for all selected tests
that need the same launch, and reports what each rank said (``launch_session.py``). The ranks run pytest
too (``rank_session.py``). Every test has a time limit on every rank, ``@pytest.mark.timeout`` or
``RANK_TIMEOUT`` seconds.

Options of the marker: ``env={...}`` sets variables for that launch; ``alone=True`` gives each test a launch
of its own, for tests that end the engine.

``mpirun-mpi4py`` and ``torchrun`` are launches without Horovod: tests take the ``hvd`` that they call from
``ranks.py``. Of parametrised tests, the cases that wrap Horovod's optimizer are left out there.

Tests without the marker run once and may start launches themselves with ``launchers.launch()``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch_plan import PARAMETER, Launch, launch_of, launches_of
from ranks import ENGINES

RANK_TIMEOUT = 60.0
RESULTS_VARIABLE = "SSD_ALLREDUCE_TEST_RESULTS"
RANK_SESSION = "rank_session"
WITHOUT_WRAPPING = {"wrapped": False, "through_horovod": False, "horovod": None}
"""Parameters by which tests say whether Horovod wraps the optimizer."""

pytest.register_assert_rewrite("support")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(launcher, *counts, env=None, alone=False): run the test's body on every rank of such launches",
    )
    results = os.environ.get(RESULTS_VARIABLE)
    if results is None:
        from launch_session import LaunchSession

        config.pluginmanager.register(LaunchSession(RANK_TIMEOUT, RESULTS_VARIABLE))
    else:
        from rank_session import RankSession

        config.pluginmanager.register(RankSession(Path(results), RANK_TIMEOUT), RANK_SESSION)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    launches = launches_of(metafunc.definition)
    if launches:
        metafunc.parametrize(PARAMETER, launches, ids=str, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if wraps_horovod_without_it(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not wraps_horovod_without_it(item)]


def wraps_horovod_without_it(item: pytest.Item) -> bool:
    launch = launch_of(item)
    if launch is None or launch.launcher not in ENGINES:
        return False
    values = item.callspec.params  # type: ignore[attr-defined]
    return any(values.get(name, default) != default for name, default in WITHOUT_WRAPPING.items())


@pytest.fixture(autouse=True)
def launch(request: pytest.FixtureRequest) -> Launch | None:
    """The launch that the test runs in; None for tests that run once."""
    return getattr(request, "param", None)


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own that all its ranks see."""
    path: Path = request.config.pluginmanager.get_plugin(RANK_SESSION).shared_path(request.node)
    return path
