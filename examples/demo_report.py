"""Compares two recorded trainings: a table, a picture, and the figures as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

NAMES = {"horovod": "plain Horovod", "ssd": "SSD-SGD"}
COLOURS = {"horovod": "#6b7280", "ssd": "#d9480f"}
ROWS = (
    ("test_accuracy", "test accuracy", "{:.1%}"),
    ("steps", "steps", "{:,}"),
    ("allreduces", "allreduces per tensor", "{:,}"),
    ("megabytes", "megabytes handed to allreduce, per rank", "{:,.1f}"),
    ("wait_seconds", "seconds waiting for communication", "{:.2f}"),
    ("seconds", "seconds in all", "{:.1f}"),
)
BEGIN = "<!-- written by scripts/demo.sh: begin -->\n"
END = "<!-- written by scripts/demo.sh: end -->\n"
# A step's own loss is too noisy to compare by eye.
SMOOTHED_STEPS = 25

Record = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--horovod", type=Path, required=True, help="record of plain Horovod")
    parser.add_argument("--ssd", type=Path, required=True, help="record of SSD-SGD")
    parser.add_argument("--png", type=Path, help="where the picture goes")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--readme", type=Path, help="Markdown file that holds the table")
    return parser.parse_args()


def table(figures: dict[str, dict[str, float]]) -> str:
    width = max(len(title) for _, title, _ in ROWS) + 2
    lines = [" " * width + "".join(f"{name:>15}" for name in NAMES.values())]
    lines.append("-" * len(lines[0]))
    for key, title, form in ROWS:
        cells = "".join(f"{form.format(figures[name][key]):>15}" for name in NAMES)
        lines.append(f"{title:<{width}}{cells}")
    return "\n".join(lines)


def smoothed(values: list[float]) -> np.ndarray:
    window = min(SMOOTHED_STEPS, len(values))
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_loss(axes: Axes, name: str, record: Record, *, over_megabytes: bool) -> None:
    losses = record["train"]["loss"]
    x = record["train"]["megabytes"] if over_megabytes else np.arange(1, len(losses) + 1)
    axes.plot(x, smoothed(losses), color=COLOURS[name], label=NAMES[name])


def draw_accuracy(axes: Axes, name: str, record: Record, *, over_megabytes: bool) -> None:
    x = record["test"]["megabytes" if over_megabytes else "steps"]
    accuracy = record["test"]["accuracy"]
    axes.plot(x, accuracy, "o-", markersize=3, color=COLOURS[name], label=NAMES[name])


def draw(records: dict[str, Record], path: Path) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(9, 6), sharey="row", constrained_layout=True)
    for column, over_megabytes in enumerate((False, True)):
        for name, record in records.items():
            draw_loss(grid[0][column], name, record, over_megabytes=over_megabytes)
            draw_accuracy(grid[1][column], name, record, over_megabytes=over_megabytes)
        grid[0][column].set_yscale("log")
        grid[1][column].set_xlabel("megabytes handed to allreduce" if over_megabytes else "steps")
        for row in range(2):
            grid[row][column].grid(alpha=0.3)
    grid[0][0].set_ylabel(f"training loss, mean of {SMOOTHED_STEPS} steps")
    grid[1][0].set_ylabel("test accuracy")
    grid[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def write_figures(figures: dict[str, dict[str, float]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")


def with_table(text: str, figures: dict[str, dict[str, float]]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}```\n{table(figures)}\n```\n{END}{after}"


def main() -> None:
    arguments = parse_arguments()
    records: dict[str, Record] = {name: json.loads(getattr(arguments, name).read_text()) for name in NAMES}
    figures = {name: record["figures"] for name, record in records.items()}
    print(table(figures))
    if arguments.png is not None:
        draw(records, arguments.png)
        print(f"\npicture: {arguments.png}")
    if arguments.json is not None:
        write_figures(figures, arguments.json)
        print(f"figures: {arguments.json}")
    if arguments.readme is not None:
        text = with_table(arguments.readme.read_text(), figures)
        arguments.readme.write_text(text)


if __name__ == "__main__":
    main()
