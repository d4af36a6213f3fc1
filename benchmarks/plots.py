"""Plots of what the benchmarks wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS = "tab:blue", "tab:gray"


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
    overlaps = {"d = 0": lambda k: 0, "d = k/2": lambda k: k // 2, "d = k - 1": lambda k: k - 1}
    figure, axes = pyplot.subplots(1, len(overlaps), figsize=(13.5, 4.0), sharey=True)
    (plain,) = [row for row in summary if (row["shards"], row["method"]) == (shards, "horovod")]
    for axis, (title, overlap) in zip(axes, overlaps.items(), strict=True):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            line = sorted(
                (row["k"], 100 * row["test_accuracy"], 100 * (row["deviation"] or 0.0))
                for row in rows
                if row["rule"] == rule and row["d"] == overlap(row["k"])
            )
            ks, means, deviations = zip(*line, strict=True) if line else ((), (), ())
            axis.errorbar(ks, means, deviations, marker="o", capsize=3, label=rule)
        axis.axhline(100 * plain["test_accuracy"], color="black", linewidth=0.8, label="plain Horovod")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("steps in a period, k")
        axis.set_title(f"{shards} shards, {title}")
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    _save(figure, path)


def time_to_accuracy(summary: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds to the target by method, of those whose seeds all reached it."""
    rows = [row for row in summary if row["seconds_to_target"] is not None and row["shards"] == "equal"]
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
