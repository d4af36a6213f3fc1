"""Handing tensors to the engine and waiting for them, never without bound."""

from __future__ import annotations

import time

import pytest
import torch
from engines import RecordingEngine

from ssd_allreduce import CommunicationError, CommunicationTimeoutError, Loopback
from ssd_allreduce.communicators import ReduceOp
from ssd_allreduce.communicators.protocol import Communicator, wait_until
from ssd_allreduce.statistics import Stats, StatsRecorder
from ssd_allreduce.transport import Pending, Transport


class Channel:
    """A transport on a recording engine, with what it counts."""

    def __init__(self, timeout: float = 30.0) -> None:
        self.engine = RecordingEngine(3)
        self.recorder = StatsRecorder()
        self.transport = Transport(self.engine, "ssd.7", timeout, self.recorder)

    @property
    def stats(self) -> Stats:
        return self.recorder.snapshot()

    def start(self, *names: str) -> list[Pending]:
        return [self.transport.start([torch.ones(2)], name, ReduceOp.SUM) for name in names]


def test_operations_carry_the_optimizers_prefix_and_the_factors() -> None:
    channel = Channel()
    channel.transport.start([torch.ones(2), torch.ones(3)], "w.gradient", ReduceOp.AVERAGE, 0.5, 2.0)
    (sent,) = channel.engine.sent
    assert (sent.name, sent.op, sent.prescale, sent.postscale) == (
        "ssd.7.w.gradient",
        ReduceOp.AVERAGE,
        0.5,
        2.0,
    )
    assert sent.sizes == (2, 3)


def test_bytes_are_counted_as_they_are_handed_over() -> None:
    channel = Channel()
    channel.transport.start([torch.ones(2), torch.ones(3)], "a", ReduceOp.SUM)
    channel.transport.start([torch.ones(5, dtype=torch.float16)], "b", ReduceOp.SUM)
    channel.transport.start([torch.ones(1, dtype=torch.float64)], "c", ReduceOp.MAX)
    assert channel.stats.bytes_sent == 5 * 4 + 5 * 2 + 8


def test_reducing_at_once_gives_the_result() -> None:
    result = Channel().transport.reduce_now(torch.tensor([2.0, -1.0]), "now", ReduceOp.SUM)
    assert result.tolist() == [6.0, -3.0]


def test_all_waits_of_one_call_share_one_time_limit() -> None:
    channel = Channel(timeout=5.0)
    channel.transport.finish(channel.start("a", "b", "c"))
    limits = channel.engine.waited
    assert len(limits) == 3
    assert all(0.0 < limit <= 5.0 for limit in limits)
    assert limits == sorted(limits, reverse=True)


def test_the_time_that_the_loop_stood_still_is_counted() -> None:
    class Slow(RecordingEngine):
        def wait(self, handle: int, timeout: float) -> None:
            time.sleep(0.02)
            super().wait(handle, timeout)

    recorder = StatsRecorder()
    transport = Transport(Slow(2), "ssd.1", 5.0, recorder)
    pending = [transport.start([torch.ones(1)], name, ReduceOp.SUM) for name in ("a", "b")]
    assert recorder.snapshot().wait_seconds == 0.0
    transport.finish(pending)
    assert 0.04 <= recorder.snapshot().wait_seconds < 2.0


def test_a_timeout_says_what_was_waited_for_and_how_far_training_had_come() -> None:
    channel = Channel(timeout=2.5)
    channel.transport.progress = lambda: "This rank has made 17 steps."
    channel.engine.hangs = lambda name: name.endswith("late")
    with pytest.raises(CommunicationTimeoutError) as caught:
        channel.transport.finish(channel.start("late", "soon"))
    message = str(caught.value)
    assert "Rank 0 of 3 waited 2.5 seconds for the allreduce of 1 tensors (late)." in message
    assert "This rank has made 17 steps." in message
    assert "flush()" in message
    assert "timeout=" in message


def test_a_timeout_shuts_the_engine_down_so_that_the_other_ranks_end() -> None:
    channel = Channel()
    channel.engine.hangs = lambda name: True
    with pytest.raises(CommunicationTimeoutError):
        channel.transport.finish(channel.start("late"))
    assert channel.engine.aborted


def test_what_has_arrived_before_the_timeout_does_not_hide_it() -> None:
    """An engine forgets an operation once it has been waited for."""
    channel = Channel()
    channel.engine.hangs = lambda name: name.endswith(("late", "later"))
    with pytest.raises(CommunicationTimeoutError, match=r"allreduce of 2 tensors \(late, later\)"):
        channel.transport.finish(channel.start("soon", "late", "next", "later"))
    assert channel.engine.aborted


def test_an_engine_that_fails_while_a_timeout_is_told_does_not_hide_it() -> None:
    class Broken(RecordingEngine):
        def poll(self, handle: int) -> bool:
            raise CommunicationError("the engine has been shut down")

        def wait(self, handle: int, timeout: float) -> None:
            raise TimeoutError

    engine = Broken(2)
    transport = Transport(engine, "ssd.1", 1.0, StatsRecorder())
    with pytest.raises(CommunicationTimeoutError, match="waited 1 seconds"):
        transport.finish([transport.start([torch.ones(1)], "w", ReduceOp.SUM)])
    assert engine.aborted


def test_many_tensors_that_are_late_are_cut_short() -> None:
    channel = Channel()
    channel.engine.hangs = lambda name: True
    with pytest.raises(CommunicationTimeoutError, match=r"of 8 tensors \(t0, t1, t2, t3, t4, \.\.\.\)"):
        channel.transport.finish(channel.start(*(f"t{i}" for i in range(8))))


def test_an_engine_that_fails_is_told_as_it_says() -> None:
    channel = Channel()
    channel.engine.refuses = lambda name: name.endswith("b")
    with pytest.raises(CommunicationError, match=r"the engine refuses ssd\.7\.b"):
        channel.start("a", "b")
    assert channel.stats.bytes_sent == 8


# -- waiting -------------------------------------------------------------------------------------


def test_waiting_ends_as_soon_as_it_is_done() -> None:
    answers = iter([False, False, False, True])
    wait_until(lambda: next(answers), timeout=5.0)
    with pytest.raises(StopIteration):
        next(answers)


def test_waiting_ends_in_time_when_it_is_never_done() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, timeout=0.05)
    assert 0.05 <= time.monotonic() - began < 2.0


def test_waiting_leaves_the_processor_to_others() -> None:
    began, busy = time.monotonic(), time.process_time()
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, timeout=0.3)
    assert time.process_time() - busy < 0.5 * (time.monotonic() - began)


# -- Loopback ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "expected"),
    [(ReduceOp.SUM, [8.0, -4.0]), (ReduceOp.AVERAGE, [2.0, -1.0]), (ReduceOp.MAX, [2.0, -1.0])],
)
def test_loopback_gives_what_equal_ranks_would(op: ReduceOp, expected: list[float]) -> None:
    engine, tensor = Loopback(4), torch.tensor([2.0, -1.0])
    handle = engine.allreduce_async([tensor], "t", op)
    assert engine.poll(handle)
    engine.wait(handle, 1.0)
    assert tensor.tolist() == expected


def test_loopback_applies_the_factors() -> None:
    engine, tensors = Loopback(4), [torch.tensor([2.0]), torch.tensor([3.0])]
    engine.wait(engine.allreduce_async(tensors, "t", ReduceOp.SUM, prescale=0.5, postscale=3.0), 1.0)
    assert [t.item() for t in tensors] == [12.0, 18.0]


def test_loopback_is_a_communicator_of_rank_zero() -> None:
    engine = Loopback(4)
    assert isinstance(engine, Communicator)
    assert (engine.rank, engine.size) == (0, 4)
    assert engine.key != Loopback(4).key


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_loopback_refuses_a_size_that_is_none(size: object) -> None:
    with pytest.raises(ValueError, match=r"size=.* must be an integer of at least 1"):
        Loopback(size)  # type: ignore[arg-type]
