"""Prints what ran under which launcher, and the totals.

Takes ``NAME=PATH`` for each pytest run (the counts that tests/conftest.py wrote to PATH) and
``NAME=passed`` or ``NAME=failed`` for every other check. Ends with status 1 when anything failed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Row:
    part: str
    launcher: str
    counts: Counter[str]


def rows_of(argument: str) -> list[Row]:
    part, _, result = argument.partition("=")
    if result in OUTCOMES:
        return [Row(part, "", Counter({result: 1}))]
    path = Path(result)
    if not path.is_file():
        return [Row(part, "ended without a result", Counter(failed=1))]
    counted = json.loads(path.read_text())
    if not counted:
        return [Row(part, "no test was found", Counter(failed=1))]
    return [Row(part, launcher, Counter(counts)) for launcher, counts in sorted(counted.items())]


def table(rows: list[Row]) -> str:
    part_width = max(len(row.part) for row in rows) + 2
    launcher_width = max(len("launcher"), *(len(row.launcher) for row in rows)) + 2
    lines = [
        f"{'part':<{part_width}}{'launcher':<{launcher_width}}"
        + "".join(f"{outcome:>9}" for outcome in OUTCOMES)
    ]
    lines.append("-" * len(lines[0]))
    lines += [
        f"{row.part:<{part_width}}{row.launcher:<{launcher_width}}"
        + "".join(f"{row.counts[outcome]:>9}" for outcome in OUTCOMES)
        for row in rows
    ]
    return "\n".join(lines)


def totals_line(totals: Counter[str]) -> str:
    line = f"{totals['passed']} passed, {totals['failed']} failed"
    return f"{line}, {totals['skipped']} skipped" if totals["skipped"] else line


def main(arguments: list[str]) -> int:
    rows = [row for argument in arguments for row in rows_of(argument)]
    totals = sum((row.counts for row in rows), Counter[str]())
    print(f"\n{table(rows)}\n\n{totals_line(totals)}")
    return 1 if totals["failed"] or not totals["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
