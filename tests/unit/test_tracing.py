"""Traces: what they hold, that ranks' clocks agree, and the picture that is drawn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import SlowLoopback, ThreadRank, on_ranks
from loops import equal, small_model, train, weights, wrap

from ssd_allreduce import report
from ssd_allreduce.tracing import LOOP, WIRE

DELAY: dict[str, Any] = {"delay_steps": 4, "overlap_steps": 2}
TRANSFER = 0.02


def traced(folder: Path, steps: int = 13, **options: Any) -> list[dict[str, Any]]:
    """The events of a training's trace."""
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, TRANSFER), trace=folder / "trace.json", **{**DELAY, **options})
    train(model, optimizer, steps)
    optimizer.flush()
    events: list[dict[str, Any]] = json.loads((folder / "trace.rank0.json").read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], row: int) -> list[str]:
    return [event["name"] for event in events if event["ph"] in "Xb" and event.get("tid") == row]


def test_every_kind_of_work_is_there(tmp_path: Path) -> None:
    events = traced(tmp_path, warmup_steps=2)
    loop = names(events, LOOP)
    assert loop.count("local update") == 11
    assert loop.count("global update") == 2
    # Two full periods and the partial one of the flush.
    assert loop.count("replay") == loop.count("rebase") == 3
    assert {"forward", "backward", "wait"} <= set(loop)
    assert loop.count("hook 0.weight") >= 3
    wire = names(events, WIRE)
    assert wire.count("0.weight.accumulated") == wire.count("control.sum") - 2 == 3
    assert wire.count("0.weight.gradient") == 2


def test_operations_are_in_flight_for_as_long_as_they_travel(tmp_path: Path) -> None:
    events = traced(tmp_path)
    begins = {e["id"]: e for e in events if e["ph"] == "b" and e["name"].endswith(".accumulated")}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    assert len(begins) == 4 * 4
    for identity, begin in begins.items():
        assert ends[identity] - begin["ts"] >= 0.9e6 * TRANSFER


def test_spans_of_the_training_loop_lie_side_by_side_or_inside_each_other(tmp_path: Path) -> None:
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in traced(tmp_path) if e["ph"] == "X"]
    open_ends: list[float] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= began + 1e-3:
            open_ends.pop()
        assert not open_ends or ended <= open_ends[-1] + 1.0
        open_ends.append(ended)


def test_ranks_write_files_of_their_own_with_clocks_that_agree(tmp_path: Path) -> None:
    def program(engine: ThreadRank) -> None:
        model = small_model()
        optimizer = wrap(model, engine, trace=tmp_path / "trace.json", delay_steps=2, overlap_steps=0)
        train(model, optimizer, 6, engine.rank)
        optimizer.flush()

    on_ranks(2, program)
    ends = []
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        waits = [e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["name"] == "wait"]
        ends.append(max(waits))
    # Both ranks' last wait ended with the same allreduce.
    assert ends[0] == pytest.approx(ends[1], abs=0.5e6)


def test_tracing_changes_no_weight_and_is_off_by_default(tmp_path: Path) -> None:
    models = small_model(), small_model()
    for model, options in zip(models, ({"trace": tmp_path / "t.json"}, {}), strict=True):
        optimizer = wrap(model, SlowLoopback(2, 0.0), **DELAY, **options)
        train(model, optimizer, 9)
        optimizer.close()
    assert equal(weights(models[0]), weights(models[1]))
    assert [path.name for path in tmp_path.iterdir()] == ["t.rank0.json"]


def test_times_count_from_the_first_step_also_after_parameters_have_changed(tmp_path: Path) -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.0), trace=tmp_path / "trace.json", **DELAY)
    train(model, optimizer, 5)
    model[0].weight.requires_grad_(False)
    optimizer.flush()
    train(model, optimizer, 5)
    optimizer.close()
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    assert names(events, LOOP).count("local update") == 10
    assert min(event["ts"] for event in events if "ts" in event) >= 0.0


def test_several_optimizers_write_files_of_their_own(tmp_path: Path) -> None:
    engine = SlowLoopback(2, 0.0)
    for _ in range(2):
        model = small_model()
        optimizer = wrap(model, engine, trace=tmp_path / "trace.json", **DELAY)
        train(model, optimizer, 3)
        optimizer.close()
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["trace.rank0.json", "trace.rank0.optimizer2.json"]


def test_nothing_is_written_before_the_first_step(tmp_path: Path) -> None:
    optimizer = wrap(small_model(), SlowLoopback(2, 0.0), trace=tmp_path / "trace.json", **DELAY)
    optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_is_refused_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        wrap(small_model(), SlowLoopback(2, 0.0), trace=tmp_path / "file" / "trace.json", **DELAY)


def test_a_trace_that_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    model = small_model()
    optimizer = wrap(model, SlowLoopback(2, 0.0), trace=tmp_path / "trace.json", **DELAY)
    train(model, optimizer, 3)
    (tmp_path / "trace.rank0.json").mkdir()
    with pytest.warns(UserWarning, match="the trace cannot be written"):
        optimizer.flush()
    train(model, optimizer, 3)
    with pytest.warns(UserWarning, match="the trace cannot be written"):
        optimizer.close()
    optimizer.base_optimizer.step()


# -- the report ----------------------------------------------------------------------------------


def test_the_report_draws_a_panel_for_each_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, options in (("ssd", {}), ("horovod", {"delay_steps": 1, "overlap_steps": 0})):
        (tmp_path / name).mkdir()
        traced(tmp_path / name, **options)
    output = tmp_path / "report.png"
    traces = [str(tmp_path / name / "trace.rank0.json") for name in ("horovod", "ssd")]
    assert report.main([*traces, "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_the_last_period_lies_between_the_last_two_global_updates(tmp_path: Path) -> None:
    events = traced(tmp_path)
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "replay")
    path = tmp_path / "trace.rank0.json"
    begin, end = report.last_period(report.read_trace(path), path)
    assert (begin, end) == pytest.approx((ends[-2] / 1e3, ends[-1] / 1e3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "is not a trace written with trace="),
        ('{"something": 1}', "is not a trace written with trace="),
        ('{"traceEvents": []}', "holds 0 global updates, and a period lies between two"),
    ],
)
def test_what_is_no_trace_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert report.main([str(path), "-o", str(tmp_path / "out.png")]) == 2
    assert message in capsys.readouterr().err
