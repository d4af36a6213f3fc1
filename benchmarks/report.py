"""Writes docs/benchmarks.md and its plots from what the benchmarks wrote. No figure is typed by hand.

    python benchmarks/report.py

A section whose file is missing is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import plots
from scaling_report import scaling
from tables import measured, number, percent, table

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Benchmarks

Written by `python benchmarks/report.py` from JSON files in this folder, which the benchmarks wrote.
[benchmarks/README.md](../benchmarks/README.md) says what each number means and how to measure again.
"""


def throughput(report: dict[str, Any], image: Path) -> str:
    rates = ", ".join(dict.fromkeys(r["rate"] for r in report["results"]))
    plots.throughput(report["results"], image)
    parts = [
        f"## Throughput at {rates} ({image.stem})\n",
        measured(report),
        picture("Share of compute by method", image),
    ]
    for model, rate in dict.fromkeys((r["model"], r["rate"]) for r in report["results"]):
        chosen = [r for r in report["results"] if (r["model"], r["rate"]) == (model, rate)]
        rows = [
            [
                r["method"],
                r["engine"],
                "" if r["k"] is None else str(r["k"]),
                "" if r["d"] is None else str(r["d"]),
                number(r["samples_per_second"], 1),
                number(r["share_of_compute"], 3),
                number(r["speedup_over_horovod"], 2),
                number(r["megabytes_on_wire"], 2),
                number(r["megabytes_computed"], 2),
                number(1e3 * r["cpu_seconds"], 1),
            ]
            for r in chosen
        ]
        head = (
            "method, engine, k, d, samples/s, share of compute, x Horovod, MB/step, MB computed, CPU ms/step"
        )
        parts += [f"### {model}, {rate}\n", table(head.split(", "), rows)]
    return "\n".join(parts)


def convergence(report: dict[str, Any], image: Path) -> str:
    title = "Accuracy and time to accuracy" if "seconds_at" in report else "Accuracy"
    head = f"## {title}: {report['optimizer']}, {report['dataset']} ({image.stem})\n"
    parts = [head, measured(report)]
    for shards in dict.fromkeys(row["shards"] for row in report["summary"]):
        chosen = [row for row in report["summary"] if row["shards"] == shards]
        parts += [f"### {shards} shards\n", accuracies(chosen)]
        if len({row["k"] for row in chosen if row["method"] == "ssd"}) > 1:
            drawn = image.with_stem(f"{image.stem}_accuracy_{shards}")
            plots.accuracy(chosen, shards, drawn)
            parts.append(picture("Test accuracy by period", drawn))
        if any(row["seconds_to_target"] is not None for row in chosen):
            drawn = image.with_stem(f"{image.stem}_time_{shards}")
            plots.time_to_accuracy(chosen, drawn)
            parts += [times(chosen, report), picture("Seconds to the target accuracy", drawn)]
    return "\n".join(parts)


def accuracies(summary: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            *method_and_period(row),
            str(row["seeds"]),
            number(100 * row["test_accuracy"], 2),
            percent(row["deviation"]),
            percent(row["paired_difference"]),
            percent(row["deviation_of_difference"]),
            number(row["train_loss"], 4),
            number(row["steps_to_target"], 0),
        ]
        for row in summary
    ]
    head = "method, rule, k, d, seeds, accuracy %, deviation, difference to Horovod, its deviation, loss"
    return table([*head.split(", "), "steps to target"], rows)


def times(summary: Sequence[dict[str, Any]], report: dict[str, Any]) -> str:
    timed = [row for row in summary if row["seconds_to_target"] is not None]
    plain = [row["seconds_to_target"] for row in timed if row["method"] == "horovod"]
    rows = [
        [
            *method_and_period(row),
            number(row["steps_to_target"], 0),
            number(row["seconds_to_target"], 2),
            number(row["seconds_to_target"] / plain[0], 2) if plain else "",
        ]
        for row in sorted(timed, key=lambda row: row["seconds_to_target"])
    ]
    head = ["method", "rule", "k", "d", "steps to target", "seconds to target", "of plain Horovod's"]
    target = f"{100 * report['target_accuracy']:g} %, with steps as long as at {report['seconds_at']}"
    return f"Time to {target}:\n\n{table(head, rows)}"


def method_and_period(row: dict[str, Any]) -> list[str]:
    return [row["method"], row["rule"] or "", str(row["k"]), str(row["d"])]


def picture(what: str, image: Path) -> str:
    return f"![{what}](images/{image.name})\n"


def buckets(report: dict[str, Any]) -> str:
    rows = [
        [
            r["engine"],
            "" if r["bucket_bytes"] is None else str(r["bucket_bytes"]),
            number(1e3 * r["seconds"], 1),
            number(1e3 * r["cpu_seconds"], 1),
            number(1e3 * r["seconds_left_after_computing"], 1),
        ]
        for r in report["results"]
    ]
    head = ["engine", "bucket_bytes", "allreduce, ms", "CPU, ms", "left after computing, ms"]
    return "\n".join(["## Buckets\n", measured(report), table(head, rows)])


def memory(report: dict[str, Any]) -> str:
    rows = [[r["method"], number(r["bytes_per_element"], 1), str(r["counted"])] for r in report["results"]]
    head = ["method", "peak bytes per parameter element", "counted"]
    return "\n".join(["## Memory\n", measured(report), table(head, rows)])


def kernels(report: dict[str, Any]) -> str:
    largest = max(r["numel"] for r in report["results"])
    rows = [
        [
            r["op"],
            r["layout"],
            f"{r['numel']:,}",
            number(r["share_of_copy"], 2),
            number(r["ratio_to_foreach"], 1),
            number(r["ratio_to_fused_sgd"], 1),
        ]
        for r in report["results"]
        if r["dtype"] == "float32" and r["numel"] in (largest, 10**6)
    ]
    head = "operation, layout, elements, share of copy, times as fast as foreach, as fused SGD and an add"
    ground = measured(report)
    return "\n".join(["## Kernels on the CPU, float32\n", ground, table(head.split(", "), rows)])


def overhead(report: dict[str, Any]) -> str:
    ground = {key: report[key] for key in report if key != "two_ranks"}
    parts = ["## Bookkeeping of a step over tiny tensors\n", measured(ground)]
    for title, key in (
        ("In one process, `step()` alone", "results"),
        ("Two ranks, backward too", "two_ranks"),
    ):
        rows = [
            [f"{r['tensors']:,}", *(number(r[f"{name}_us"], 1) for name in ("torch", "horovod", "ssd"))]
            for r in report[key] or ()
        ]
        head = ["tensors", "torch, µs", "plain Horovod, µs", "SSD-SGD, µs"]
        parts += [f"{title}:\n", table(head, rows)]
    return "\n".join(parts)


def trace_cost(report: dict[str, Any]) -> str:
    rows = [
        [
            number(1e3 * r["untraced_seconds_per_step"], 2),
            number(1e3 * r["traced_seconds_per_step"], 2),
            percent(r["cost"]),
            f"{percent(r['cost_low'])} to {percent(r['cost_high'])}",
            number(100 * r["cost_deviation"], 2),
            number(1e3 * r["untraced_flush_seconds"], 1),
            number(1e3 * r["traced_flush_seconds"], 1),
            number(r["trace_bytes_per_step"], 0),
        ]
        for r in report["results"]
    ]
    head = (
        "ms/step without, ms/step with, cost %, 95 % interval, deviation of a round, "
        "flush without ms, flush with ms, bytes/step"
    )
    rounds = {"rounds": sum(len(r["rounds"]) for r in report["results"])}
    ground = measured({**report, **rounds})
    return "\n".join(["## Recording a trace\n", ground, table(head.split(", "), rows)])


Section: TypeAlias = Callable[[dict[str, Any], Path], str]
"""Writes a section from a file's content, and its picture, or several whose names begin as the path does."""


def without_pictures(section: Callable[[dict[str, Any]], str]) -> Section:
    return lambda report, image: section(report)


SECTIONS: dict[str, Section] = {
    "throughput_*.json": throughput,
    "convergence*.json": convergence,
    "scaling.json": scaling,
    "memory.json": without_pictures(memory),
    "buckets.json": without_pictures(buckets),
    "kernels_cpu.json": without_pictures(kernels),
    "overhead.json": without_pictures(overhead),
    "trace_cost.json": without_pictures(trace_cost),
}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where the JSON files are")
    folder: Path = parser.parse_args().folder
    parts = [INTRODUCTION]
    for pattern, section in SECTIONS.items():
        for path in sorted(folder.glob(pattern)):
            image = folder / "images" / f"{path.stem}.png"
            parts.append(section(json.loads(path.read_text()), image))
    (folder / "benchmarks.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
