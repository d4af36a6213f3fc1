"""The pytest inside a rank: runs the selected tests in step with the other ranks.

After each test every rank writes its result into a folder that all ranks see, and waits there for the
others. When any rank has failed, all end: an allreduce that only some ranks have submitted cannot be
taken back, so the tests that are left get a new launch.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from launch_plan import time_limit

START_SECONDS = 120.0
PATIENCE_SECONDS = 5.0
NAMES_PER_TEST = 100
CASES_FILE = "cases.json"
BEGUN_FILES = "begun.*"
STACK_FILES = "stack-of-rank-*"


class RankSession:
    def __init__(self, folder: Path, default_limit: float) -> None:
        faulthandler.dump_traceback_later(START_SECONDS, exit=True)
        import torch
        from ranks import hvd

        hvd.init()
        torch.set_num_threads(1)
        self.folder = folder
        # Standard error is captured, and what has been captured is lost when a rank is ended.
        self.stack_file = (folder / STACK_FILES.replace("*", str(hvd.rank()))).open("w")
        # When another rank ends first, the launcher ends this one with this signal.
        faulthandler.register(signal.SIGTERM, file=self.stack_file, chain=True)
        self.rank = hvd.rank()
        self.size = hvd.size()
        self.cases: dict[str, int] = json.loads((folder / CASES_FILE).read_text())
        self.default_limit = default_limit
        self.reports: list[pytest.TestReport] = []

    def shared_path(self, item: pytest.Item) -> Path:
        path = self.folder / f"shared-{self.cases[item.nodeid]}"
        path.mkdir(exist_ok=True)
        return path

    def pytest_collection_finish(self) -> None:
        # Walking all of torch takes longer than most tests, and each of them ends with a collection.
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        index = self.cases[item.nodeid]
        limit = time_limit(item, self.default_limit)
        item.add_marker(pytest.mark.timeout(limit), append=False)
        self.reports = []
        align_names(index)
        started = time.monotonic()
        (self.folder / BEGUN_FILES.replace("*", str(self.rank))).touch()
        self.end_process_after(limit + 2 * PATIENCE_SECONDS)
        result = yield
        # What the test leaves behind is garbage now, and must not reach into the next one.
        gc.collect()
        self.write_result(index, time.monotonic() - started)
        self.end_with_the_others(index, limit)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)
        if report.failed:
            # For the case that what comes after it, as a fixture's end, hangs.
            print(report.longreprtext, file=self.stack_file, flush=True)

    def outcome(self) -> str:
        outcomes = [report.outcome for report in self.reports]
        return next((name for name in ("failed", "skipped") if name in outcomes), "passed")

    def write_result(self, index: int, seconds: float) -> None:
        result = {
            "outcome": self.outcome(),
            "text": "\n".join(report.longreprtext for report in self.reports if not report.passed),
            "seconds": seconds,
        }
        path = self.result_path(index, self.rank)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.rename(path)

    def result_path(self, index: int, rank: int) -> Path:
        return self.folder / f"{index}.{rank}.json"

    def end_with_the_others(self, index: int, limit: float) -> None:
        own_failure = self.outcome() == "failed"
        deadline = time.monotonic() + (PATIENCE_SECONDS if own_failure else limit)
        paths = [self.result_path(index, rank) for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                leave()
            time.sleep(0.005)
        outcomes = {json.loads(path.read_text())["outcome"] for path in paths}
        if "failed" in outcomes:
            leave()

    def pytest_sessionfinish(self) -> None:
        # Shutting the engine down at exit is under a time limit too.
        self.end_process_after(START_SECONDS)

    def end_process_after(self, seconds: float) -> None:
        """A rank that is stuck inside a library sees no signal; this ends it all the same."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stack_file)


def align_names(index: int) -> None:
    """Give the test's optimizers the same numbers on every rank, whatever happened before."""
    from ssd_allreduce import assembly

    class StartingAtOwnNumber(Counter[str]):
        def __missing__(self, key: str) -> int:
            return index * NAMES_PER_TEST

    assembly._instances = StartingAtOwnNumber()


def leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
