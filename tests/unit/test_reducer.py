"""Hooks, accumulators and the wire: what is sent, when, in which form, and what comes back."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from engines import OrderedThreadRank, RecordingEngine, World
from loops import equal, global_weights, loss_of, sgd, small_model, train, train_step, weights, wrap
from torch import Tensor, nn

from ssd_allreduce import Loopback
from ssd_allreduce.communicators import ReduceOp
from ssd_allreduce.communicators.ordered import Ordered
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.reducer import HookMode, Reducer
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.transport import Transport
from ssd_allreduce.wire import WireFormat

DELAY = {"delay_steps": 3, "overlap_steps": 1}
SYNC_POINT = 2
WARMUP = {"warmup_steps": 99}
KINDS = [
    pytest.param(DELAY, SYNC_POINT, ".accumulated", id="sync point"),
    pytest.param(WARMUP, 1, ".gradient", id="warm-up"),
]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def parameter_names(engine: RecordingEngine, since: int = 0) -> list[str]:
    """The tensors of each operation sent since, without prefix and suffix."""
    return [sent.name.split(".", 2)[2].rsplit(".", 1)[0] for sent in engine.gradients_sent[since:]]


# -- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "steps", "suffix"), KINDS)
def test_gradients_leave_during_backward_in_the_order_in_which_they_become_final(
    options: dict[str, Any], steps: int, suffix: str
) -> None:
    engine, model = RecordingEngine(2), small_model()
    finals: list[str] = []
    optimizer = wrap(model, engine, **options)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: finals.append(name))
    train(model, optimizer, steps)
    before = len(engine.gradients_sent)
    finals.clear()
    loss_of(model, steps).backward()
    assert parameter_names(engine, before) == finals
    assert sorted(finals) == sorted(NAMES)
    assert all(sent.name.endswith(suffix) for sent in engine.gradients_sent[before:])
    optimizer.step()
    assert len(engine.gradients_sent) == before + 4


@pytest.mark.parametrize(("options", "steps", "suffix"), KINDS)
def test_with_issue_step_gradients_leave_in_step_in_the_order_of_the_groups(
    options: dict[str, Any], steps: int, suffix: str
) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, issue="step", **options)
    train(model, optimizer, steps)
    before = len(engine.gradients_sent)
    loss_of(model, steps).backward()
    assert len(engine.gradients_sent) == before
    optimizer.step()
    assert parameter_names(engine, before) == NAMES


@pytest.mark.parametrize("options", [{"delay_steps": 1}, WARMUP, {"delay_steps": 2, "overlap_steps": 0}])
def test_hooks_send_nothing_before_the_ranks_have_been_compared(options: dict[str, Any]) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, **options)
    loss_of(model).backward()
    assert engine.sent == []
    optimizer.step()
    assert ".agreement." in engine.sent[0].name


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize(("k", "d"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_nothing_at_all_is_sent_in_a_delay_step_that_is_no_sync_point(k: int, d: int, issue: str) -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, delay_steps=k, overlap_steps=d, issue=issue)
    train_step(model, optimizer)
    for step in range(1, 12):
        before = len(engine.sent)
        train_step(model, optimizer, step)
        communicates = (step + 1) % k == 0
        # Four tensors, and the two vectors of the control row.
        assert len(engine.sent) - before == (6 if communicates else 0)


def test_a_period_keeps_its_operations_in_flight_until_the_overlap_has_passed() -> None:
    engine, model = RecordingEngine(2), small_model()
    optimizer = wrap(model, engine, delay_steps=4, overlap_steps=2)
    in_flight = []
    for step in range(10):
        train_step(model, optimizer, step)
        in_flight.append(len(engine.open_operations))
    assert in_flight == [0, 0, 0, 6, 6, 0, 0, 6, 6, 0]


# -- what ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize(("options", "steps"), [(DELAY, 7), (WARMUP, 4)])
def test_a_tensor_without_a_gradient_counts_as_zeros(options: dict[str, Any], steps: int, issue: str) -> None:
    """In every step the same operations, whatever happened to the gradients; and the divisor stays."""
    engine, model, other = RecordingEngine(2), small_model(), small_model()
    optimizer = wrap(model, engine, issue=issue, **options)
    reference = wrap(other, Loopback(2), issue="step", **options)

    def partial_backward(net: nn.Sequential, step: int) -> None:
        """In odd steps of the last layer alone."""
        if step % 2 == 0:
            loss_of(net, step).backward()
        else:
            net[2](torch.ones(2, 4) * step).square().mean().backward()

    for step in range(steps):
        optimizer.zero_grad()
        partial_backward(model, step)
        optimizer.step()
        reference.zero_grad()
        partial_backward(other, step)
        for parameter in other.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        reference.step()
        assert equal(weights(model), weights(other))
    sent = parameter_names(engine)
    assert sorted(sent) == sorted(NAMES * (len(sent) // 4))
    if issue == "step":
        assert sent == NAMES * (len(sent) // 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_a_period_travels_in_the_parameters_precision(dtype: torch.dtype) -> None:
    engine, model = RecordingEngine(2), small_model(dtype)
    train(model, wrap(model, engine, **DELAY), 7)
    assert {sent.dtypes for sent in engine.gradients_sent} == {(dtype,)}
    assert {sent.op for sent in engine.gradients_sent} == {ReduceOp.SUM}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_gradients_travel_in_float32(dtype: torch.dtype) -> None:
    engine, model = RecordingEngine(2), small_model(dtype)
    optimizer = wrap(model, engine, **DELAY)
    train(model, optimizer, 7)
    assert {sent.dtypes for sent in engine.gradients_sent} == {(torch.float32,)}
    assert all(w.dtype == dtype for w in global_weights(model, optimizer))


@pytest.mark.parametrize("issue", ["backward", "step"])
def test_a_gradient_that_the_engine_cannot_reduce_travels_in_float32_and_comes_back(issue: str) -> None:
    """As bfloat16 with Horovod, in the synchronous stage."""
    engine = RecordingEngine(2, dtypes=frozenset({torch.float16, torch.float32, torch.float64}))
    model, plain = small_model(torch.bfloat16), small_model(torch.bfloat16)
    train(model, wrap(model, engine, issue=issue, **WARMUP), 4)
    train(plain, sgd(plain), 4)
    assert {sent.dtypes for sent in engine.gradients_sent} == {(torch.float32,)}
    assert equal(weights(model), weights(plain))


# -- compression ---------------------------------------------------------------------------------


class Slope(nn.Module):
    """One parameter whose gradient is a given number, wherever it stands."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.gradient = gradient
        self.w = nn.Parameter(torch.zeros(5))

    def train_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (self.w * self.gradient).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("d", [0, 3])
def test_a_compressed_sum_does_not_overflow_where_one_gradient_does_not(d: int, issue: str) -> None:
    """Eight gradients of 20,000 make more than half precision holds; their mean is what travels."""
    engine, model = RecordingEngine(2), Slope(20_000.0)
    optimizer = wrap(
        model,
        engine,
        sgd(model, lr=2.0**-10, momentum=0.0),
        delay_steps=8,
        overlap_steps=d,
        issue=issue,
        compression=hvd.Compression.fp16,
    )
    for _ in range(8 + d):
        model.train_step(optimizer)
    assert {sent.dtypes for sent in engine.gradients_sent} == {(torch.float16,)}
    (world,) = global_weights(model, optimizer)
    assert world.tolist() == [-8 * 20_000.0 * 2.0**-10] * 5


def test_a_compressed_gradient_of_warmup_is_what_horovods_compressor_makes_of_it() -> None:
    engine, model, plain = RecordingEngine(2), small_model(), small_model()
    optimizer = wrap(model, engine, compression=hvd.Compression.fp16, **WARMUP)
    other = sgd(plain)
    for step in range(4):
        train_step(model, optimizer, step)
        train_step(plain, other, step, edit=lambda: halve_precision(plain))
    assert {sent.dtypes for sent in engine.gradients_sent} == {(torch.float16,)}
    assert equal(weights(model), weights(plain))


def halve_precision(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.half())


def test_squares_are_never_compressed() -> None:
    engine, model = RecordingEngine(2), small_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = wrap(model, engine, adam, warmup_steps=1, compression=hvd.Compression.fp16, **DELAY)
    train(model, optimizer, 8)
    squares = [sent for sent in engine.sent if sent.name.endswith(".squares")]
    assert len(squares) == 2 * 4
    assert {sent.dtypes for sent in squares} == {(torch.float32,)}
    assert {sent.dtypes for sent in engine.gradients_sent} == {(torch.float16,)}


# -- layouts -------------------------------------------------------------------------------------


def convolution(channels_last: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1)).double()
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.to(memory_format=torch.channels_last) if channels_last else model


@pytest.mark.parametrize("issue", ["backward", "step"])
@pytest.mark.parametrize("options", [DELAY, WARMUP, {**WARMUP, "compression": hvd.Compression.fp16}])
def test_what_travels_is_contiguous_whatever_the_layout_and_comes_back_in_place(
    options: dict[str, Any], issue: str
) -> None:
    engine = RecordingEngine(2)
    model, plain = convolution(channels_last=True), convolution(channels_last=False)
    assert not model[0].weight.is_contiguous()
    optimizer = wrap(model, engine, sgd(model, lr=0.001), issue=issue, **options)
    other = wrap(plain, Loopback(2), sgd(plain, lr=0.001), issue=issue, **options)
    for step in range(7):
        for net, opt in ((model, optimizer), (plain, other)):
            image = torch.arange(16.0, dtype=torch.float64).reshape(2, 2, 2, 2) / (step + 3)
            opt.zero_grad()
            net(image).square().mean().backward()
            opt.step()
        for mine, right in zip(weights(model), weights(plain), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)
    assert all(sent.contiguous for sent in engine.sent)
    assert not model[0].weight.is_contiguous()


# -- the reducer alone ---------------------------------------------------------------------------


class Alone:
    """A reducer over a few parameters, without an optimizer."""

    def __init__(
        self,
        groups: Sequence[tuple[int, ...]] | None = None,
        wire: WireFormat | None = None,
        passes: int = 1,
        sparse_as_dense: bool = False,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.engine = RecordingEngine(2)
        self.parameters = parameters or [nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)]
        names = {p: "abc"[i] for i, p in enumerate(self.parameters)}
        self.transport = Transport(self.engine, "ssd.1", 5.0, StatsRecorder())
        self.reducer = Reducer(
            Parameters([{"params": list(self.parameters)}], names),
            self.transport,
            wire or WireFormat(),
            groups,
            passes,
            sparse_as_dense,
            4,
        )

    def backward(self, *order: int) -> None:
        for index in order:
            (self.parameters[index] * (index + 1)).sum().backward()


def test_a_group_leaves_as_one_operation_once_all_its_members_are_final() -> None:
    alone = Alone(groups=[(0, 2), (1,)])
    alone.reducer.mode = HookMode.REDUCE_GRADIENT
    alone.backward(2)
    assert alone.engine.sent == []
    alone.backward(1)
    assert [sent.sizes for sent in alone.engine.sent] == [(2,)]
    alone.backward(0)
    assert [sent.sizes for sent in alone.engine.sent] == [(2,), (1, 3)]
    alone.reducer.finish_gradients()
    assert [p.grad.tolist() for p in alone.parameters] == [[1.0], [2.0, 2.0], [3.0] * 3]  # type: ignore[union-attr]


def test_a_group_that_is_not_complete_in_backward_leaves_in_step() -> None:
    alone = Alone(groups=[(0, 2), (1,)], wire=WireFormat(op=ReduceOp.SUM, grouped=True))
    alone.reducer.mode = HookMode.REDUCE_GRADIENT
    alone.backward(0)
    alone.reducer.reduce_gradients(contribute=True)
    assert [sent.sizes for sent in alone.engine.sent] == [(1, 3), (2,)]
    alone.reducer.finish_gradients()
    assert [p.grad.tolist() for p in alone.parameters] == [[2.0], [0.0, 0.0], [0.0] * 3]  # type: ignore[union-attr]


def test_tensors_outside_any_group_leave_on_their_own() -> None:
    """Horovod's groups may miss some: those unfrozen since, or all of them where it has one process."""
    alone = Alone(groups=[(1,)])
    alone.reducer.mode = HookMode.REDUCE_GRADIENT
    alone.backward(2, 1, 0)
    alone.reducer.reduce_gradients(contribute=True)
    assert [sent.sizes for sent in alone.engine.sent] == [(3,), (2,), (1,)]
    alone.reducer.finish_gradients()
    assert alone.engine.open_operations == []


class SlowToAnnounce(Ordered):
    """Keeps who announces waiting, as its lock may, and records who calls it meanwhile."""

    def __init__(self) -> None:
        super().__init__(OrderedThreadRank(World(1), 0), bucket_bytes=0, timeout=5.0)
        self.calls: list[str] = []

    def announce(self, sequence: Sequence[tuple[str, int]]) -> None:
        time.sleep(0.1)
        self.calls.append("announce")
        super().announce(sequence)

    def allreduce_async(self, tensors: Sequence[Tensor], name: str, *rest: Any) -> Any:
        self.calls.append(name)
        return super().allreduce_async(tensors, name, *rest)


@pytest.mark.parametrize("mode", [HookMode.REDUCE_GRADIENT, HookMode.REDUCE_ACCUMULATOR])
def test_hooks_in_several_threads_hand_nothing_over_before_the_sequence_is_announced(mode: HookMode) -> None:
    """As of a model on several devices, each of which has a thread for its backward."""
    alone, engine = Alone(wire=WireFormat(op=ReduceOp.SUM)), SlowToAnnounce()
    alone.transport.communicator = engine
    alone.reducer.mode = mode
    threads = [threading.Thread(target=alone.backward, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    suffix = "gradient" if mode is HookMode.REDUCE_GRADIENT else "accumulated"
    assert engine.calls[0] == "announce"
    assert sorted(engine.calls[1:]) == [f"ssd.1.{name}.{suffix}" for name in "abc"]


def test_the_predivide_factor_is_split_as_horovod_splits_it() -> None:
    alone = Alone(wire=WireFormat(predivide=4.0))
    alone.backward(0, 1, 2)
    alone.reducer.reduce_gradients(contribute=True)
    assert {(sent.op, sent.prescale, sent.postscale) for sent in alone.engine.sent} == {
        (ReduceOp.AVERAGE, 0.25, 4.0)
    }


def test_a_rank_that_does_not_contribute_sends_zeros() -> None:
    alone = Alone(wire=WireFormat(op=ReduceOp.SUM))
    alone.backward(0, 1)
    alone.parameters[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
    alone.reducer.reduce_gradients(contribute=False)
    alone.reducer.finish_gradients()
    assert all(not p.grad.any() for p in alone.parameters)  # type: ignore[union-attr]


def test_what_the_engine_writes_into_a_gradient_is_no_edit() -> None:
    """Whether it writes behind autograd's back, as Horovod, or through torch's own operations."""
    alone = Alone(wire=WireFormat(op=ReduceOp.SUM))
    alone.reducer.mode = HookMode.REDUCE_GRADIENT
    loopback = Loopback(2)
    alone.engine.allreduce_async = loopback.allreduce_async  # type: ignore[method-assign]
    alone.engine.poll, alone.engine.wait = loopback.poll, loopback.wait  # type: ignore[method-assign]
    alone.backward(0, 1, 2)
    assert alone.parameters[0].grad.tolist() == [2.0]  # type: ignore[union-attr]
    assert alone.reducer.changed_gradients() == []


def test_sparse_gradients_are_made_dense_on_request() -> None:
    embedding, other = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2)
    with torch.no_grad():
        other.weight.copy_(embedding.weight)
    alone = Alone(parameters=[embedding.weight], sparse_as_dense=True)
    for net in (embedding, other):
        net(torch.tensor([1, 1, 3])).square().sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.layout is torch.strided
    alone.reducer.reduce_gradients(contribute=True)
    alone.reducer.finish_gradients()
    assert torch.equal(embedding.weight.grad, other.weight.grad)  # type: ignore[arg-type]


def test_hooks_are_removed_by_detach() -> None:
    alone = Alone()
    alone.reducer.mode = HookMode.REDUCE_GRADIENT
    alone.reducer.detach()
    alone.backward(0, 1, 2)
    assert alone.engine.sent == []
    assert not alone.reducer.handed_over


def test_a_failed_engine_is_told_from_backward_and_from_step() -> None:
    for issue in ("backward", "step"):
        engine, model = RecordingEngine(2), small_model()
        optimizer = wrap(model, engine, issue=issue, **WARMUP)
        train_step(model, optimizer)
        engine.refuses = lambda name: name.endswith("2.weight.gradient")
        with pytest.raises(Exception, match=r"the engine refuses .*2\.weight\.gradient"):
            train_step(model, optimizer, 1)


# -- memory --------------------------------------------------------------------------------------


def elements_kept(model: nn.Module) -> int:
    """Elements of all tensors of the model's shapes that training keeps, counted by the collector."""
    shapes = {p.shape for p in model.parameters()}
    gc.unfreeze()
    gc.collect()
    try:
        found = {
            t.untyped_storage().data_ptr(): t.numel()
            for t in gc.get_objects()
            if type(t) in (Tensor, nn.Parameter) and t.shape in shapes
        }
    finally:
        gc.freeze()
    return sum(found.values())


@pytest.mark.parametrize(
    ("d", "momentum", "copies"),
    [
        pytest.param(0, 0.9, 3, id="d=0: W, v, A"),
        pytest.param(2, 0.9, 6, id="d>0: also in flight, w_s, v_s"),
        pytest.param(0, 0.0, 2, id="d=0 without momentum: W, A"),
        pytest.param(2, 0.0, 4, id="d>0 without momentum: also in flight, w_s"),
    ],
)
def test_memory_is_what_the_design_counts(d: int, momentum: float, copies: int) -> None:
    """Copies of the model beyond plain training's weights, gradients and momentum."""
    model = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 13))
    before = elements_kept(model)
    plain = sum(p.numel() for p in model.parameters())
    assert before == plain
    optimizer = wrap(model, Loopback(2), sgd(model, momentum=momentum), delay_steps=4, overlap_steps=d)
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.ones(1, 7)).sum().backward()
        optimizer.step()
    after = elements_kept(model)
    base = 3 if momentum else 2
    assert after == (base + copies) * plain
    optimizer.close()
