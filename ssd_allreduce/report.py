"""Draws where the time of a period goes: ``python -m ssd_allreduce.report TRACE... -o report.png``.

Each trace is one panel, all over the same length of time: its last period, or that of the trace whose
period is longest. A trace of plain Horovod is one with ``delay_steps=1``, which trains exactly as it does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_allreduce.tracing import LOOP, WIRE

_COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "hook": "#6a51a3",
    "local update": "#74c476",
    "global update": "#238b45",
    "replay": "#238b45",
    "rebase": "#a1d99b",
    "wait": "#de2d26",
    "in flight": "#fdae6b",
}
_UPDATES = ("replay", "global update")


@dataclass(frozen=True)
class Span:
    """One event of a trace, in milliseconds."""

    name: str
    row: int
    began: float
    ended: float

    @property
    def kind(self) -> str:
        if self.row == WIRE:
            return "in flight"
        return "hook" if self.name.startswith("hook ") else self.name


def read_trace(path: Path) -> list[Span]:
    """The spans of a trace file.

    Raises:
        ValueError: the file is no trace of this package.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        spans, open_since = [], {}
        for event in events:
            if event["ph"] == "X":
                began = event["ts"] / 1e3
                spans.append(Span(event["name"], event["tid"], began, began + event["dur"] / 1e3))
            elif event["ph"] == "b":
                open_since[event["id"]] = event["ts"] / 1e3
            elif event["ph"] == "e":
                began = open_since[event["id"]]
                spans.append(Span(event["name"], event["tid"], began, event["ts"] / 1e3))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not a trace written with trace= ({type(error).__name__}: {error}). Allowed: the "
            "files trace.rank0.json and so on that an optimizer wrote."
        ) from error
    return spans


def last_period(spans: Sequence[Span], path: Path) -> tuple[float, float]:
    """From the end of the last but one global update to that of the last.

    Raises:
        ValueError: the trace holds fewer than two.
    """
    ends = sorted(span.ended for span in spans if span.name in _UPDATES)
    if len(ends) < 2:
        raise ValueError(
            f"{path} holds {len(ends)} global updates, and a period lies between two. Trace a longer run."
        )
    return ends[-2], ends[-1]


def draw(paths: Sequence[Path], output: Path) -> None:
    """Draw one panel for each trace.

    Raises:
        ValueError: a file is no trace, or too short a one.
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("The report needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = [read_trace(path) for path in paths]
    periods = [last_period(spans, path) for spans, path in zip(traces, paths, strict=True)]
    length = max(end - begin for begin, end in periods)
    figure, axes = pyplot.subplots(len(paths), 1, figsize=(11, 1.2 + 1.6 * len(paths)), squeeze=False)
    for axis, path, spans, (_, end) in zip(axes.flat, paths, traces, periods, strict=True):
        _draw_trace(axis, spans, end - length, end)
        axis.set_title(path.name, loc="left", fontsize=9)
    axes.flat[-1].set_xlabel("milliseconds")
    patches = [matplotlib.patches.Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="upper right", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / (1.2 + 1.6 * len(paths))))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def _draw_trace(axis: Any, spans: Sequence[Span], begin: float, end: float) -> None:
    # Inner spans (hooks within backward) come last, and on top.
    for span in sorted(spans, key=lambda span: span.began - span.ended):
        left, right = max(span.began, begin), min(span.ended, end)
        if left < right:
            height = 0 if span.row == LOOP else 1
            axis.broken_barh([(left - begin, right - left)], (0.6 - height, 0.8), color=_COLOURS[span.kind])
    axis.set_yticks([1.0, 0.0], ["training loop", "in flight"])
    axis.set_xlim(0, end - begin)
    axis.set_ylim(-0.5, 1.5)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ssd_allreduce.report", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.png"))
    arguments = parser.parse_args(argv)
    try:
        draw(arguments.traces, arguments.output)
    except (ValueError, ImportError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
