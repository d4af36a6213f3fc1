"""Draws what scaling.py found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_fit import Calibration, Comparison, Measurement, Prediction

NAMES = {"horovod": "plain Horovod", "ssd": "SSD-SGD"}
COLOURS = ("tab:gray", "tab:blue", "tab:green", "tab:orange")


@dataclass(frozen=True)
class RateReport:
    """Everything about one rate."""

    rate: str
    measurements: Sequence[Measurement]
    calibration: Calibration
    comparisons: Sequence[Comparison]
    predictions: Sequence[Prediction]


def label(method: str, k: int | None, d: int | None) -> str:
    name = NAMES[method]
    return name if k is None else f"{name}, k = {k}, d = {d}"


def plot(reports: Sequence[RateReport], path: Path) -> None:
    """Step time over ranks, one panel for each rate: lines for predictions, points for what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(reports), figsize=(6.4 * len(reports), 4.6), squeeze=False)
    for axis, report in zip(axes.flat, reports, strict=True):
        _draw(axis, report)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, report: RateReport) -> None:
    chosen = list(dict.fromkeys((p.method, p.k, p.d) for p in report.predictions))
    for index, (method, k, d) in enumerate(chosen):
        colour = COLOURS[index % len(COLOURS)]
        line = [p for p in report.predictions if (p.method, p.k, p.d) == (method, k, d)]
        counts = [p.ranks for p in line]
        axis.plot(counts, [1e3 * p.seconds for p in line], color=colour, label=label(method, k, d))
        least, most = [1e3 * p.least_seconds for p in line], [1e3 * p.most_seconds for p in line]
        axis.fill_between(counts, least, most, color=colour, alpha=0.2, linewidth=0)
        points = [c for c in report.comparisons if (c.method, c.k, c.d) == (method, k, d)]
        ranks = [c.ranks for c in points]
        axis.plot(ranks, [1e3 * c.measured_seconds for c in points], "o", color=colour, markersize=4)
        axis.plot(ranks, [1e3 * c.predicted_seconds for c in points], "x", color="black", markersize=5)
    axis.plot([], [], "o", color="black", markersize=4, label="measured")
    axis.plot([], [], "x", color="black", label="predicted, cores shared as measured")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter("{x:g}")
        each.set_minor_formatter("{x:g}")
    axis.set_xlabel("ranks")
    axis.set_ylabel("milliseconds a step")
    axis.set_title(f"{report.rate}; lines: predicted, a core for each rank", fontsize=10)
    axis.legend(fontsize=8)
