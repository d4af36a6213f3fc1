"""Plots of what the benchmarks wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS = "tab:blue", "tab:gray"
OVERLAPS: dict[str, Callable[[int], int]] = {
    "d = 0": lambda k: 0,
    "d = k/2": lambda k: k // 2,
    "d = k - 1": lambda k: k - 1,
}


def throughput(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Share of compute alone by method: one panel for each model and rate."""
    panels = list(dict.fromkeys((row["model"], row["rate"]) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.8 * columns, 3.6 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (model, rate) in zip(axes.flat, panels, strict=False):
        bars = [row for row in rows if (row["model"], row["rate"]) == (model, rate)]
        _bars(axis, [(_name(row), row["share_of_compute"], _is_ours(row)) for row in bars])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{model}, {rate}")
        axis.set_xlabel("share of compute alone")
    _save(figure, path)


def accuracy(summary: Sequence[dict[str, Any]], shards: str, path: Path) -> None:
    """Test accuracy by period: a panel for each overlap, a line for each rule."""
    rows = [row for row in summary if row["shards"] == shards and row["method"] == "ssd"]
    drawn = [name for name, overlap in OVERLAPS.items() if any(row["d"] == overlap(row["k"]) for row in rows)]
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4.5 * len(drawn), 4.0), sharey=True, squeeze=False)
    plain = [row["test_accuracy"] for row in summary if row["method"] == "horovod"]
    for axis, name in zip(axes.flat, drawn, strict=True):
        chosen = [row for row in rows if row["d"] == OVERLAPS[name](row["k"])]
        for rule in dict.fromkeys(row["rule"] for row in chosen):
            line = sorted(
                (row["k"], 100 * row["test_accuracy"], 100 * (row["deviation"] or 0.0))
                for row in chosen
                if row["rule"] == rule
            )
            axis.errorbar(*zip(*line, strict=True), marker="o", capsize=3, label=rule)
        for level in plain:
            axis.axhline(100 * level, color="black", linewidth=0.8, label="plain Horovod")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("steps in a period, k")
        axis.set_title(f"{shards} shards, {name}")
        axis.legend()
    axes.flat[0].set_ylabel("test accuracy, %")
    _save(figure, path)


def time_to_accuracy(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds to the target by method, of those whose seeds all reached it."""
    rows = [row for row in summary if row["seconds_to_target"] is not None]
    rows = sorted(rows, key=lambda row: row["seconds_to_target"])
    figure, axis = pyplot.subplots(figsize=(7.0, 0.8 + 0.28 * len(rows)))
    _bars(axis, [(_name(row), row["seconds_to_target"], _is_ours(row)) for row in rows])
    axis.set_xlabel("seconds to the target accuracy")
    _save(figure, path)


def _bars(axis: Axes, bars: Sequence[tuple[str, float, bool]]) -> None:
    # From above, as in a table.
    positions = list(range(len(bars), 0, -1))
    colours = [OURS if ours else OTHERS for _, _, ours in bars]
    axis.barh(positions, [length for _, length, _ in bars], color=colours)
    axis.set_yticks(positions, [name for name, _, _ in bars])


def _is_ours(row: dict[str, Any]) -> bool:
    return bool(row["method"].startswith("ssd"))


def _name(row: dict[str, Any]) -> str:
    """A method, with what tells it from others of the same name."""
    details = [row[key] for key in ("rule", "engine") if row.get(key) and _is_ours(row)]
    if row["k"] not in (None, 1):
        details.append(f"k {row['k']}" + (f", d {row['d']}" if _is_ours(row) else ""))
    return f"{row['method']} ({', '.join(details)})" if details else str(row["method"])


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version, so that the same figures give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
