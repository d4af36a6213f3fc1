"""Counts what ran under which launcher, for the summary that ``scripts/test.sh`` prints."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

NO_LAUNCHER = "one process"
LAUNCHERS = "mpirun|horovodrun-gloo|horovodrun-mpi|mpirun-mpi4py|torchrun"
LAUNCHER_IN_ID = re.compile(rf"(?<!\w)({LAUNCHERS})-(\d+)(?![\w])")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--counts-json", type=Path, help="where to write the counts per launcher")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--counts-json")
    if path is not None:
        config.pluginmanager.register(LauncherCounts(path))


def launcher_of(item: pytest.Item) -> str:
    """The launcher that the test's marker names, else the one in its parameters' ids."""
    marker = item.get_closest_marker("launcher")
    if marker is not None:
        name, ranks = marker.args
        return f"{name}, {ranks} ranks"
    found = LAUNCHER_IN_ID.search(item.nodeid)
    return f"{found[1]}, {found[2]} ranks" if found else NO_LAUNCHER


class LauncherCounts:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.launchers: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}
        self.collection_errors = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.launchers.update({item.nodeid: launcher_of(item) for item in items})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.collection_errors += report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has passed when its call did and neither set-up nor teardown failed."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self) -> None:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, outcome in self.outcomes.items():
            counts[self.launchers.get(nodeid, NO_LAUNCHER)][outcome] += 1
        if self.collection_errors:
            counts["could not be collected"]["failed"] = self.collection_errors
        self.path.write_text(json.dumps(counts, indent=2) + "\n")
