"""Engines that match operations by order: whatever order the hooks fire in, like is added to like."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engines import OrderedThreadRank, Outcome, ThreadRank, World, on_ranks, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import equal, small_model, train, weights, wrap
from torch import Tensor

import ssd_allreduce as ssd
from ssd_allreduce import CommunicationError, CommunicationTimeoutError, SequenceMismatchError
from ssd_allreduce.communicators import Capabilities, Handle, ReduceOp, buckets
from ssd_allreduce.communicators.buckets import divide
from ssd_allreduce.communicators.ordered import Ordered, matched_by_name

LAYERS = 7
RATE = 0.125


def parallel_layers() -> torch.nn.ParameterList:
    """Equally large layers that do not depend on each other: their hooks can fire in any order."""
    return torch.nn.ParameterList([torch.zeros(3) for _ in range(LAYERS)])


def loss_in_order(layers: torch.nn.ParameterList, order: Sequence[int], rank: int) -> Tensor:
    """Layer i has the gradient (rank + 1) (i + 1), whatever the order; backward reverses it."""
    total = torch.zeros(())
    for index in order:
        total = total + (rank + 1) * (index + 1) * layers[index].sum()
    return total


def make(layers: torch.nn.ParameterList, engine: Any, **options: Any) -> ssd.DistributedOptimizer:
    base = torch.optim.SGD(layers.parameters(), lr=RATE)
    defaults = {"delay_steps": 3, "overlap_steps": 1, "warmup_steps": 2, "glu": "none", "timeout": 10.0}
    named = [(f"layer{index}", layer) for index, layer in enumerate(layers)]
    return ssd.DistributedOptimizer(
        base, named_parameters=named, communicator=engine, **{**defaults, **options}
    )


def assert_moved_by_the_mean(layers: torch.nn.ParameterList, size: int, steps: int) -> None:
    mean = sum(rank + 1 for rank in range(size)) / size
    for index, layer in enumerate(layers):
        assert layer.tolist() == [-RATE * steps * mean * (index + 1)] * 3


@pytest.mark.parametrize("bucket_bytes", [0, 12, 30, 1 << 20])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_fires_its_hooks_in_an_order_of_its_own(size: int, bucket_bytes: int) -> None:
    steps = 14

    def program(engine: OrderedThreadRank) -> list[list[int]]:
        layers = parallel_layers()
        optimizer = make(layers, engine, bucket_bytes=bucket_bytes)
        shuffled = random.Random(engine.rank)
        orders = [shuffled.sample(range(LAYERS), LAYERS) for _ in range(steps)]
        for order in orders:
            optimizer.zero_grad()
            loss_in_order(layers, order, engine.rank).backward()
            optimizer.step()
        optimizer.flush()
        assert_moved_by_the_mean(layers, size, steps)
        return orders

    orders = on_ranks(size, program, OrderedThreadRank)
    assert all(one != other for one, other in zip(*orders[:2], strict=True)), "the test shuffles nothing"


def test_without_the_agreed_order_unlike_tensors_would_be_added() -> None:
    """What the other tests rely on: the engine itself adds whatever comes n-th."""

    def program(engine: OrderedThreadRank) -> list[float]:
        tensors = [torch.tensor([1.0]), torch.tensor([10.0])]
        order = tensors if engine.rank == 0 else tensors[::-1]
        for tensor in order:
            engine.wait(engine.allreduce_async([tensor], "any", ReduceOp.SUM), 10.0)
        return [tensor.item() for tensor in tensors]

    assert on_ranks(2, program, OrderedThreadRank) == [[11.0, 11.0], [11.0, 11.0]]


@settings(max_examples=30)
@given(data=st.data())
def test_any_order_of_announced_operations_gives_the_named_sums(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    orders = [data.draw(st.permutations(range(len(sizes)))) for _ in range(2)]
    limit = data.draw(st.sampled_from([0, 8, 40]))

    def program(engine: OrderedThreadRank) -> list[list[float]]:
        ordered = Ordered(engine, limit, 10.0)
        tensors = [torch.full((n,), 10.0**index * (engine.rank + 1)) for index, n in enumerate(sizes)]
        ordered.announce([(str(index), 4 * n) for index, n in enumerate(sizes)])
        handles = [
            ordered.allreduce_async([tensors[index]], str(index), ReduceOp.SUM)
            for index in orders[engine.rank]
        ]
        for handle in reversed(handles):
            ordered.wait(handle, 10.0)
        return [tensor.tolist() for tensor in tensors]

    expected = [[3 * 10.0**index] * n for index, n in enumerate(sizes)]
    assert on_ranks(2, program, OrderedThreadRank) == [expected, expected]


def test_operation_that_is_ready_early_waits_for_its_predecessors() -> None:
    def program(engine: OrderedThreadRank) -> tuple[list[str], list[str]]:
        ordered = Ordered(engine, 0, 10.0)
        ordered.announce([("first", 4), ("second", 4)])
        second = ordered.allreduce_async([torch.ones(1)], "second", ReduceOp.SUM)
        assert not ordered.poll(second)
        before = list(engine.channels[0].sent)
        first = ordered.allreduce_async([torch.ones(1)], "first", ReduceOp.SUM)
        ordered.wait(second, 10.0)
        ordered.wait(first, 10.0)
        return before, engine.channels[0].sent

    for before, after in on_ranks(2, program, OrderedThreadRank):
        assert before == ["header"]
        assert after == ["header", "first", "second"]


def test_hooks_on_one_rank_and_step_on_another_send_the_same() -> None:
    def program(engine: OrderedThreadRank) -> list[str]:
        layers = parallel_layers()
        optimizer = make(layers, engine, issue="step" if engine.rank else "backward")
        for _ in range(8):
            optimizer.zero_grad()
            loss_in_order(layers, range(LAYERS), engine.rank).backward()
            optimizer.step()
        optimizer.flush()
        assert_moved_by_the_mean(layers, 2, 8)
        return engine.channels[0].sent

    one, other = on_ranks(2, program, OrderedThreadRank)
    assert one == other


def test_layers_skipped_at_random_contribute_zeros() -> None:
    steps = 11

    def program(engine: OrderedThreadRank) -> tuple[list[list[int]], list[float]]:
        layers = parallel_layers()
        optimizer = make(layers, engine)
        chance = random.Random(10 + engine.rank)
        used = [chance.sample(range(LAYERS), chance.randint(1, LAYERS)) for _ in range(steps)]
        for order in used:
            optimizer.zero_grad()
            loss_in_order(layers, order, engine.rank).backward()
            optimizer.step()
        optimizer.flush()
        return used, [layer[0].item() for layer in layers]

    outcomes = on_ranks(2, program, OrderedThreadRank)
    times_used = [
        sum((rank + 1) * (index in order) for rank, (used, _) in enumerate(outcomes) for order in used)
        for index in range(LAYERS)
    ]
    for _, trained in outcomes:
        expected = [-RATE * times * (index + 1) / 2 for index, times in enumerate(times_used)]
        assert trained == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "by one backward"])
def test_several_optimizers_on_one_engine_do_not_mix(together: bool) -> None:
    """As in adversarial training, and as with one optimizer for each part of a model."""

    def program(engine: OrderedThreadRank) -> int:
        models = [parallel_layers(), parallel_layers()]
        optimizers = [
            make(models[0], engine, delay_steps=2, overlap_steps=1),
            make(models[1], engine, delay_steps=3, overlap_steps=2),
        ]
        shuffled = random.Random(engine.rank)
        for _ in range(12):
            losses = [
                loss_in_order(model, shuffled.sample(range(LAYERS), LAYERS), engine.rank) for model in models
            ]
            if together:
                shuffled.shuffle(losses)
                (losses[0] + losses[1]).backward()
            for index, optimizer in enumerate(optimizers):
                if not together:
                    losses[index].backward()
                optimizer.step()
                optimizer.zero_grad()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.flush()
            assert_moved_by_the_mean(model, 2, 12)
        return len(engine.channels)

    assert on_ranks(2, program, OrderedThreadRank) == [2, 2]


def errors_of(outcomes: list[Outcome]) -> list[type]:
    return [type(outcome.error) for outcome in outcomes]


def test_ranks_that_are_about_to_reduce_different_tensors_are_told_and_nothing_is_added() -> None:
    results: dict[int, list[float]] = {}

    def program(engine: OrderedThreadRank) -> None:
        ordered = Ordered(engine, 0, 10.0)
        tensor = torch.tensor([1.0 + engine.rank])
        try:
            handle = ordered.allreduce_async([tensor], f"of rank {engine.rank}", ReduceOp.SUM)
            ordered.wait(handle, 10.0)
        finally:
            results[engine.rank] = tensor.tolist()

    outcomes = run_ranks(2, program, OrderedThreadRank)
    assert errors_of(outcomes) == [SequenceMismatchError] * 2
    for rank, outcome in enumerate(outcomes):
        assert f"this rank submits 'of rank {rank}'" in str(outcome.error)
    assert results == {0: [1.0], 1: [2.0]}


def test_optimizers_stepped_in_another_order_on_a_rank_are_an_error() -> None:
    def program(engine: OrderedThreadRank) -> None:
        models = [parallel_layers(), parallel_layers()]
        optimizers = [make(model, engine) for model in models]
        first = engine.rank
        loss_in_order(models[first], range(LAYERS), engine.rank).backward()
        optimizers[first].step()

    assert errors_of(run_ranks(2, program, OrderedThreadRank)) == [
        SequenceMismatchError,
        SequenceMismatchError,
    ]


def test_load_on_one_rank_alone_is_an_error_on_both() -> None:
    def program(engine: OrderedThreadRank) -> None:
        layers = parallel_layers()
        optimizer = make(layers, engine)
        for step in range(4):
            if step == 1 and engine.rank == 0:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            loss_in_order(layers, range(LAYERS), engine.rank).backward()
            optimizer.step()

    assert errors_of(run_ranks(2, program, OrderedThreadRank)) == [
        SequenceMismatchError,
        SequenceMismatchError,
    ]


def test_wait_for_a_rank_that_does_not_come_ends() -> None:
    def program(engine: OrderedThreadRank) -> None:
        if engine.rank == 1:
            return
        layers = parallel_layers()
        optimizer = make(layers, engine, timeout=0.2)
        loss_in_order(layers, range(LAYERS), engine.rank).backward()
        optimizer.step()

    outcomes = run_ranks(2, program, OrderedThreadRank)
    assert isinstance(outcomes[0].error, CommunicationTimeoutError)
    assert "agreement" in str(outcomes[0].error)
    assert outcomes[1].error is None


def test_no_thread_is_left_when_nothing_is_in_flight() -> None:
    def program(engine: OrderedThreadRank) -> None:
        layers = parallel_layers()
        optimizer = make(layers, engine)
        loss_in_order(layers, range(LAYERS), engine.rank).backward()
        optimizer.step()

    on_ranks(2, program, OrderedThreadRank)
    join_progress_threads()


def join_progress_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "ssd_allreduce-progress":
            thread.join(10.0)
            assert not thread.is_alive()


def test_a_bucket_that_could_not_be_filled_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = OrderedThreadRank(World(1), 0)
    engine = Ordered(rank, bucket_bytes=100, timeout=5.0)
    tensors = [torch.ones(2), torch.ones(3), torch.ones(2).double(), torch.ones(3).double()]
    join = buckets.join

    def out_of_memory(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if dtype is torch.float64:
            raise RuntimeError("out of memory")
        return join(tensors, dtype)

    monkeypatch.setattr(buckets, "join", out_of_memory)
    engine.announce([(name, 16) for name in "abcd"])
    for name, tensor in zip("abc", tensors, strict=False):
        engine.allreduce_async([tensor], name, ReduceOp.SUM, prescale=0.5)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.allreduce_async([tensors[-1]], "d", ReduceOp.SUM, prescale=0.5)
    monkeypatch.undo()
    join_progress_threads()
    with pytest.raises(CommunicationError, match="The engine failed: out of memory"):
        engine.allreduce_async([torch.ones(2)], "e", ReduceOp.SUM)
    assert rank.channels[0].sent == ["header"]


class OnlyCallsRank(OrderedThreadRank):
    """An engine that only the user's thread may call, and that moves only while it is polled."""

    def __init__(self, world: Any, rank: int, channel: int = 0) -> None:
        super().__init__(world, rank, channel)
        self.owner = threading.get_ident()

    @property
    def capabilities(self) -> Capabilities:
        able = super().capabilities
        return Capabilities("order", able.dtypes, able.devices, polled_every=1e-4, threads=False)

    def open_channel(self, timeout: float) -> OnlyCallsRank:
        self._opened += 1
        self.channels.append(OnlyCallsRank(self._world, self._rank, self._opened))
        return self.channels[-1]  # type: ignore[return-value]

    def poll(self, handle: Handle) -> bool:
        assert threading.get_ident() == self.owner
        return super().poll(handle)

    def allreduce_async(self, *arguments: Any, **options: Any) -> Handle:
        assert threading.get_ident() == self.owner
        return super().allreduce_async(*arguments, **options)


def test_an_engine_for_one_thread_is_called_by_hooks_and_steps_alone() -> None:
    def program(engine: OnlyCallsRank) -> None:
        layers = parallel_layers()
        optimizer = make(layers, engine)
        for _ in range(9):
            optimizer.zero_grad()
            loss_in_order(layers, range(LAYERS), engine.rank).backward()
            optimizer.step()
        optimizer.flush()
        assert_moved_by_the_mean(layers, 2, 9)

    on_ranks(2, program, OnlyCallsRank)


class Fewer(ThreadRank):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("order", frozenset({torch.float32}), frozenset({"cpu"}))


def test_engine_by_order_without_channels_is_refused() -> None:
    def program(engine: Fewer) -> None:
        make(parallel_layers(), engine)

    (outcome, _) = run_ranks(2, program, Fewer)
    assert isinstance(outcome.error, TypeError)
    assert "open_channel(timeout)" in str(outcome.error)


def test_engine_by_name_is_taken_as_it_is() -> None:
    engine = ssd.Loopback(2)
    assert matched_by_name(engine, 100, 1.0) is engine


# -- what travels ----------------------------------------------------------------------------------


def reduced(
    make_tensors: Callable[[int], list[Tensor]], op: ReduceOp, *factors: float
) -> list[tuple[list[Tensor], list[str]]]:
    """What each of two ranks gets of one operation, and what its channel was handed."""

    def program(engine: OrderedThreadRank) -> tuple[list[Tensor], list[str]]:
        ordered = Ordered(engine, 1 << 20, 10.0)
        tensors = make_tensors(engine.rank)
        ordered.wait(ordered.allreduce_async(tensors, "it", op, *factors), 10.0)
        return tensors, engine.channels[0].sent

    return on_ranks(2, program, OrderedThreadRank)


def test_average_and_factors_are_applied_around_the_sum() -> None:
    for tensors, _ in reduced(lambda rank: [torch.tensor([1.0 + rank, 4.0])], ReduceOp.AVERAGE, 0.5, 8.0):
        assert tensors[0].tolist() == [6.0, 16.0]


def test_maximum_takes_no_factors() -> None:
    for tensors, _ in reduced(lambda rank: [torch.tensor([1.0 + rank, -rank])], ReduceOp.MAX, 0.5, 8.0):
        assert tensors[0].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_that_the_engine_lacks_travel_as_float32(dtype: torch.dtype) -> None:
    for tensors, sent in reduced(lambda rank: [torch.tensor([0.5, 3.0], dtype=dtype)], ReduceOp.SUM):
        assert tensors[0].dtype is dtype
        assert tensors[0].tolist() == [1.0, 6.0]
        assert sent == ["header", "it"]


def test_tensors_of_one_type_travel_as_one() -> None:
    def tensors_of(rank: int) -> list[Tensor]:
        doubles = [torch.full((2,), 0.5, dtype=torch.float64)]
        return [torch.ones(2, 2), *doubles, torch.empty(0), torch.ones(())]

    for tensors, sent in reduced(tensors_of, ReduceOp.SUM):
        assert [tensor.tolist() for tensor in tensors] == [[[2.0, 2.0], [2.0, 2.0]], [1.0, 1.0], [], 2.0]
        assert sent == ["header", "it", "it"]


def test_neighbours_share_a_bucket_up_to_the_limit() -> None:
    sequence = [("a", 4), ("b", 4), ("c", 4), ("huge", 100), ("d", 0), ("e", 12)]
    assert divide(sequence, 8) == [["a", "b"], ["c"], ["huge"], ["d"], ["e"]]
    assert divide(sequence, 0) == [["a"], ["b"], ["c"], ["huge"], ["d"], ["e"]]
    assert divide(sequence, 1000) == [["a", "b", "c", "huge", "d", "e"]]
    assert divide([], 10) == []


def test_parameters_that_join_later_travel_through_the_channel_that_is_open() -> None:
    def program(engine: OrderedThreadRank) -> tuple[int, list[Tensor]]:
        model = small_model()
        model[0].weight.requires_grad_(False)
        optimizer = wrap(model, engine, delay_steps=3, overlap_steps=1)
        train(model, optimizer, 4, engine.rank)
        model[0].weight.requires_grad_(True)
        optimizer.flush()
        train(model, optimizer, 4, engine.rank, first=4)
        optimizer.flush()
        return len(engine.channels), weights(model)

    (channels, final), (other_channels, other_final) = on_ranks(2, program, OrderedThreadRank)
    assert channels == other_channels == 1
    assert equal(final, other_final)
