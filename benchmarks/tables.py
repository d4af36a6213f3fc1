"""What the report on the benchmarks writes its figures with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def measured(report: dict[str, Any]) -> str:
    what = [f"{key.replace('_', ' ')} {report[key]}" for key in report if key not in ("results", "summary")]
    return "; ".join(what).replace("date ", "", 1) + ".\n"


def number(value: float | None, digits: int) -> str:
    return "" if value is None or value != value else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{100 * value:+.{digits}f}"
