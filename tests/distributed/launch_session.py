"""The pytest that starts ranks: one launch for all selected tests that need the same one.

A launch runs in a thread, and each test waits for its own results, so that tests are reported as they
end. When a launch ends early, the test that ended it has failed, and the rest gets a new launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch_plan import Launch, launch_of, time_limit
from launchers import ROOT, LaunchResult, environment_of, launch
from rank_session import BEGUN_FILES, CASES_FILE, PATIENCE_SECONDS, STACK_FILES, START_SECONDS

TAIL_CHARACTERS = 6000
MAX_LAUNCH_SECONDS = 900.0


@dataclass(frozen=True)
class Outcome:
    """What became of one test on all ranks."""

    name: str
    text: str


@dataclass
class RunningLaunch:
    """One launch, or several in a row where some end early, and the tests that it runs."""

    plan: Launch
    nodeids: list[str]
    limit: float
    variable: str
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ssd_allreduce-ranks-")))
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    attempt: Path | None = None
    thread: threading.Thread | None = None
    cancelled: bool = False
    crash: str = ""

    def start(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            remaining = list(enumerate(self.nodeids))
            while remaining and not self.cancelled:
                remaining = self.run_once(remaining)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting tests must hear of it
            self.crash = repr(error)

    def run_once(self, remaining: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """One launch. Returns the tests that it did not come to."""
        attempt = Path(tempfile.mkdtemp(dir=self.folder))
        cases = {nodeid: index for index, nodeid in remaining}
        (attempt / CASES_FILE).write_text(json.dumps(cases))
        arguments = attempt / "arguments"
        arguments.write_text("\n".join(cases))
        self.attempt = attempt
        result = launch(
            self.plan.launcher,
            self.plan.ranks,
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "--runxfail",
                "-q",
                "--color=no",
                f"@{arguments}",
            ],
            env={**dict(self.plan.env), self.variable: str(attempt)},
            timeout=2 * START_SECONDS + self.limit,
            cwd=ROOT,
        )
        return self.judge(remaining, attempt, result)

    def judge(
        self, remaining: list[tuple[int, str]], attempt: Path, result: LaunchResult
    ) -> list[tuple[int, str]]:
        for position, (index, nodeid) in enumerate(remaining):
            outcome = self.complete_outcome(attempt, index)
            if outcome is None:
                ended = self.describe_early_end(attempt, index, result)
                self.outcomes[nodeid] = ended
                rest = remaining[position + 1 :]
                if not list(attempt.glob(BEGUN_FILES)):
                    # Not even the first test began: the others would fare no better.
                    self.outcomes.update({other: ended for _, other in rest})
                    return []
                return rest
            self.outcomes[nodeid] = outcome
            if outcome.name == "failed":
                return remaining[position + 1 :]
        if result.returncode != 0:
            text = f"All tests passed, and then the launch failed: {describe(result)}"
            self.outcomes[remaining[-1][1]] = Outcome("failed", text)
        return []

    def read_results(self, attempt: Path, index: int) -> dict[int, dict[str, Any]]:
        paths = {rank: attempt / f"{index}.{rank}.json" for rank in range(self.plan.ranks)}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def complete_outcome(self, attempt: Path, index: int) -> Outcome | None:
        results = self.read_results(attempt, index)
        return combine(results) if len(results) == self.plan.ranks else None

    def describe_early_end(self, attempt: Path, index: int, result: LaunchResult) -> Outcome:
        results = self.read_results(attempt, index)
        missing = sorted(set(range(self.plan.ranks)) - set(results))
        stacks = [f"--- {path.name}\n{path.read_text()}" for path in sorted(attempt.glob(STACK_FILES))]
        text = "\n".join([f"Ranks {missing} did not end the test.", *stacks, describe(result)])
        return Outcome("failed", f"{combine(results).text}\n{text}")

    def wait_for(self, nodeid: str) -> Outcome:
        """The test's outcome, as soon as it is known."""
        index = self.nodeids.index(nodeid)
        while True:
            if nodeid in self.outcomes:
                return self.outcomes[nodeid]
            assert self.thread is not None
            alive = self.thread.is_alive()
            if self.attempt is not None and nodeid != self.nodeids[-1]:
                outcome = self.complete_outcome(self.attempt, index)
                if outcome is not None and outcome.name == "passed":
                    return outcome
            if not alive and nodeid not in self.outcomes:
                return Outcome("failed", f"The launch was not made: {self.crash}")
            time.sleep(0.02)

    def end(self) -> None:
        """Wait for the end of the launch, which comes at once when nobody waits for results any more."""
        self.cancelled = True
        if self.thread is not None and self.thread.is_alive():
            self.thread.join(PATIENCE_SECONDS)
            while self.thread.is_alive():
                self.kill()
                self.thread.join(1.0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        wanted = f"{self.variable}={self.attempt}".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit() and wanted in environment_of(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)


def combine(results: dict[int, dict[str, Any]]) -> Outcome:
    names = {result["outcome"] for result in results.values()}
    name = next((name for name in ("failed", "skipped") if name in names), "passed")
    texts = [f"--- rank {rank}\n{result['text']}" for rank, result in results.items() if result["text"]]
    return Outcome(name, "\n".join(texts))


def describe(result: LaunchResult) -> str:
    return (
        f"The launch ended with {result.describe_end()}.\n"
        f"--- stdout\n{result.stdout[-TAIL_CHARACTERS:]}\n--- stderr\n{result.stderr[-TAIL_CHARACTERS:]}"
    )


class LaunchSession:
    def __init__(self, default_limit: float, variable: str) -> None:
        self.default_limit = default_limit
        self.variable = variable
        self.planned: dict[tuple[Launch, str], list[str]] = {}
        self.limits: dict[tuple[Launch, str], float] = {}
        self.running: RunningLaunch | None = None
        self.running_key: tuple[Launch, str] | None = None

    def key(self, item: pytest.Item) -> tuple[Launch, str] | None:
        plan = launch_of(item)
        return None if plan is None else (plan, item.nodeid if plan.alone else "")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests of one launch follow each other; those that start their own launches come last."""
        order: dict[object, int] = {}
        for item in items:
            order.setdefault(self.key(item), len(order))
        own = [item for item in items if self.key(item) is None]
        launched = [item for item in items if self.key(item) is not None]
        items[:] = sorted(launched, key=lambda item: order[self.key(item)]) + own

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            key = self.key(item)
            if key is not None:
                # Fixtures belong to the test's body, which runs on the ranks.
                getattr(item, "fixturenames", []).clear()
                limit = time_limit(item, self.default_limit)
                item.add_marker(pytest.mark.timeout(2 * START_SECONDS + limit), append=False)
                self.planned.setdefault(key, []).append(item.nodeid)
                self.limits[key] = self.limits.get(key, 0.0) + limit

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Instead of running the test's body here, report what it did on the ranks."""
        key = self.key(pyfuncitem)
        if key is None:
            self.end_running()
            return None
        if key != self.running_key:
            self.end_running()
            self.start(key)
        assert self.running is not None
        outcome = self.running.wait_for(pyfuncitem.nodeid)
        finish: dict[str, Callable[[str], None]] = {
            "passed": lambda text: None,
            "skipped": lambda text: pytest.skip(text),
            "failed": lambda text: pytest.fail(text, pytrace=False),
        }
        finish[outcome.name](outcome.text)
        return True

    def start(self, key: tuple[Launch, str]) -> None:
        # The ranks end each test that takes too long; this is for a launcher that hangs.
        limit = min(MAX_LAUNCH_SECONDS, self.limits[key])
        self.running = RunningLaunch(key[0], self.planned[key], limit, self.variable)
        self.running_key = key
        self.running.start()

    def end_running(self) -> None:
        if self.running is not None:
            self.running.end()
        self.running = self.running_key = None

    def pytest_sessionfinish(self) -> None:
        self.end_running()
