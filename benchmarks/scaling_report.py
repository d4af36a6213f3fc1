"""The section of the report on what scaling.py found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaling_model import expected_maximum
from tables import measured, number, percent, table

FEWEST_PREDICTED = 8
"""Fewer ranks are among those that were measured, or next to them."""


def scaling(report: dict[str, Any], image: Path) -> str:
    left_out = ("parameters", "predictions", "measurements", "plot")
    ground = measured({key: report[key] for key in report if key not in left_out})
    parts = ["## More ranks than there are: predicted and measured\n", ground]
    if report["plot"] is not None:
        parts.append(f"![Milliseconds a step over ranks]({image.parent.name}/{report['plot']})\n")
    for fitted in report["parameters"]:
        rate = fitted["rate"]
        of_rate = {
            name: [row for row in report[name] if row["rate"] == rate]
            for name in ("results", "predictions", "measurements")
        }
        parts += [f"### {report['model']}, {rate}\n", parameters(fitted)]
        parts.append(computation(of_rate["measurements"]))
        parts += ["Predicted beside measured:\n", comparison(of_rate["results"])]
        parts.append(
            "Predicted, a core for each rank: milliseconds a step, in brackets their range over calibrations "
            "that hold a number of hosts out, and share of compute:\n"
        )
        parts.append(predictions(of_rate["predictions"]))
    return "\n".join(parts)


def parameters(fitted: dict[str, Any]) -> str:
    rows = [
        [
            name,
            number(1e3 * engine["start"], 2),
            number(1e6 * engine["latency"], 0),
            number(engine["bandwidth"] / 1e6, 1),
            number(engine["processor_share"], 2),
        ]
        for name, engine in fitted["engines"].items()
    ]
    head = ["engine", "start, ms", "latency, µs", "bandwidth, MB/s", "processor share"]
    cost = fitted["delay_cost"]
    beside = (
        f"SSD-SGD computes {1e3 * cost['step']:+.1f} ms a step and {1e3 * cost['sync_point']:+.1f} ms a sync "
        "point beside what a step without communication does.\n"
    )
    return "\n".join([table(head, rows), beside])


def computation(measurements: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(m["ranks"]),
            number(1e3 * m["hosts"]["compute"], 1),
            number(1e3 * m["hosts_beside_horovod"]["compute"], 1),
            number(m["hosts"]["stretch"], 2),
            number(1e3 * m["hosts"]["jitter"], 2),
            number(1e3 * m["hosts"]["jitter"] * expected_maximum(m["ranks"]), 2),
            number(1e3 * m["straggling"], 2),
        ]
        for m in measurements
    ]
    head = (
        "ranks, compute ms/step, beside idle Horovod ms/step, stretch, jitter ms, "
        "waiting for the slowest: predicted ms, measured ms"
    )
    return table(head.split(", "), rows)


def comparison(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            r["method"],
            "" if r["k"] is None else str(r["k"]),
            "" if r["d"] is None else str(r["d"]),
            str(r["ranks"]),
            "yes" if r["calibrated"] else "no",
            number(1e3 * r["measured_seconds"], 1),
            number(1e3 * r["predicted_seconds"], 1),
            percent(r["error"], 1),
            percent(r["held_out_error"], 1),
        ]
        for r in results
    ]
    head = "method, k, d, ranks, fitted to, measured ms/step, predicted ms/step, error %, held out: error %"
    return table(head.split(", "), rows)


def milliseconds(seconds: float) -> str:
    return number(1e3 * seconds, 0)


def predictions(predictions: Sequence[dict[str, Any]]) -> str:
    methods = list(dict.fromkeys((p["method"], p["k"], p["d"]) for p in predictions))
    cells = {
        (p["ranks"], (p["method"], p["k"], p["d"])): (
            f"{milliseconds(p['seconds'])} ({milliseconds(p['least_seconds'])} to "
            f"{milliseconds(p['most_seconds'])}), {number(p['share_of_compute'], 2)}"
        )
        for p in predictions
    }
    counts = sorted({p["ranks"] for p in predictions if p["ranks"] >= FEWEST_PREDICTED})
    rows = [[f"{ranks:,}", *(cells[ranks, method] for method in methods)] for ranks in counts]
    names = [method if k is None else f"{method}, k = {k}, d = {d}" for method, k, d in methods]
    return table(["ranks", *names], rows)
