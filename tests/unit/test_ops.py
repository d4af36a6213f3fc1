"""The kernel operations, compiled and reference, against formulas written down in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    CLOSED_GATES,
    DTYPES,
    GATED_OPERATIONS,
    OPERATIONS,
    Arrays,
    Call,
    Operation,
    calls,
    lay_out,
    plain_call,
    state_dtype,
    tensors_of,
)

from ssd_allreduce import ops, reference

Implementation = Callable[..., Any]

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
every_implementation = pytest.mark.parametrize(
    "implementation", [ops, reference], ids=["compiled", "reference"]
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def bits(tensor: torch.Tensor) -> bytes:
    in_order = tensor.detach().clone(memory_format=torch.contiguous_format)
    return in_order.flatten().view(torch.uint8).numpy().tobytes()


def run(implementation: Any, call: Call, arguments: dict[str, Any]) -> None:
    getattr(implementation, call.operation.name)(**arguments)


def assert_close(actual: torch.Tensor, expected: np.ndarray, scale: float) -> None:
    """Within the storage dtype's rounding and a few roundings of the arithmetic before it."""
    arithmetic = 64 * torch.finfo(state_dtype(actual.dtype)).eps * scale
    storage = torch.finfo(actual.dtype).eps * np.abs(expected) + torch.finfo(actual.dtype).tiny
    error = np.abs(actual.detach().double().numpy() - expected)
    assert np.all(error <= arithmetic + storage), (actual, expected)


def assert_call_gives(implementation: Any, call: Call) -> None:
    arguments = call.build()
    expected = call.expected(arguments)
    run(implementation, call, arguments)
    untouched = tensors_of(call.build())
    for name, tensors in tensors_of(arguments).items():
        for index, tensor in enumerate(tensors):
            if name in expected[index]:
                assert_close(tensor, expected[index][name], largest(expected[index]))
            else:
                assert bits(tensor) == bits(untouched[name][index]), f"{name} was changed"


def largest(arrays: Arrays) -> float:
    return max([10.0, *(float(np.abs(a).max(initial=0)) for a in arrays.values())])


def test_the_extension_is_built() -> None:
    assert ops.IMPLEMENTATION == "compiled", "build the extension first: pip install -e ."


@every_implementation
@every_operation
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_call_gives_what_its_formula_says(
    operation: Operation, implementation: Any, data: st.DataObject
) -> None:
    assert_call_gives(implementation, data.draw(calls(operation)))


@every_operation
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_compiled_and_reference_agree(operation: Operation, data: st.DataObject) -> None:
    call = data.draw(calls(operation))
    compiled, plain = call.build(), call.build()
    run(ops, call, compiled)
    run(reference, call, plain)
    for name, tensors in tensors_of(compiled).items():
        for ours, theirs in zip(tensors, plain[name], strict=True):
            assert_close(ours, theirs.double().numpy(), 10.0)


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_larger_than_a_thread_s_share(operation: Operation, dtype: torch.dtype) -> None:
    assert_call_gives(ops, plain_call(operation, dtype, shape=(333, 1001)))


@every_operation
def test_many_tiny_tensors(operation: Operation) -> None:
    plain = plain_call(operation)
    call = Call(operation, plain.parameters * 1500, plain.options, (), seed=1)
    assert_call_gives(ops, call)


@every_implementation
def test_lists_of_several_dtypes(implementation: Any) -> None:
    for operation in OPERATIONS:
        parameters = tuple(plain_call(operation, dtype).parameters[0] for dtype in DTYPES)
        call = Call(operation, parameters, plain_call(operation).options, (), seed=2)
        assert_call_gives(implementation, call)


@every_implementation
def test_empty_lists(implementation: Any) -> None:
    for operation in OPERATIONS:
        assert_call_gives(implementation, Call(operation, (), plain_call(operation).options, (), 0))
    assert implementation.checksum([]).tolist() == []


# What is not read must not matter, even where it is NaN.


@every_implementation
@pytest.mark.parametrize("name", ["local_momentum_", "local_corrected_", "local_plain_"])
def test_overwriting_does_not_read_the_accumulators(implementation: Any, name: str) -> None:
    arguments = plain_call(BY_NAME[name]).build()
    fill(arguments["accumulators"], float("nan"))
    getattr(implementation, name)(**arguments | {"accumulation": 2})
    assert_equal_lists(arguments["accumulators"], arguments["gradients"])


@every_implementation
def test_accumulators_take_the_gradient_as_given(implementation: Any) -> None:
    arguments = plain_call(BY_NAME["local_momentum_"]).build()
    sums = [a + g for a, g in zip(arguments["accumulators"], arguments["gradients"], strict=True)]
    implementation.local_momentum_(**arguments | {"gradient_scale": 7.0, "maximize": True})
    assert_equal_lists(arguments["accumulators"], sums)


@every_implementation
def test_an_uninitialised_momentum_is_not_read(implementation: Any) -> None:
    arguments = plain_call(BY_NAME["replay_sgd_"]).build() | {"momentum_initialised": False}
    fill(arguments["momenta"], float("nan"))
    implementation.replay_sgd_(**arguments)
    assert all(t.isfinite().all() for t in arguments["momenta"] + arguments["weights"])


@every_implementation
def test_displacement_stays_where_the_learning_rates_sum_to_zero(implementation: Any) -> None:
    arguments = plain_call(BY_NAME["replay_sgd_"]).build() | {"lrs": [0.0, 0.0]}
    before = [t.clone() for t in arguments["corrections"]]
    implementation.replay_sgd_(**arguments)
    assert_equal_lists(arguments["corrections"], before)


# Gates.

every_gated_operation = pytest.mark.parametrize("operation", GATED_OPERATIONS, ids=lambda op: op.name)


def all_bits(arguments: dict[str, Any]) -> dict[str, list[bytes]]:
    return {name: [bits(tensor) for tensor in tensors] for name, tensors in tensors_of(arguments).items()}


@every_implementation
@every_gated_operation
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_closed_gate_keeps_every_bit_and_an_open_one_changes_none_of_the_result(
    operation: Operation, implementation: Any, data: st.DataObject
) -> None:
    call = data.draw(calls(operation))
    before, plain, opened, closed = (call.build() for _ in range(4))
    run(implementation, call, plain)
    run(
        implementation,
        call,
        opened | {"found_inf": data.draw(st.sampled_from((torch.zeros(()), -torch.zeros(1))))},
    )
    run(implementation, call, closed | {"found_inf": torch.tensor(data.draw(st.sampled_from(CLOSED_GATES)))})
    assert all_bits(opened) == all_bits(plain)
    assert all_bits(closed) == all_bits(before)


@every_implementation
@every_gated_operation
def test_a_closed_gate_keeps_what_would_be_overwritten(operation: Operation, implementation: Any) -> None:
    """In a layout of its own too, which is computed on in a copy that is written back."""
    option = {"overwrite": True} if "overwrite" in operation.options else {"accumulation": 2}
    arguments = plain_call(operation).build() | option | {"found_inf": torch.ones(1)}
    for name in {"accumulators", "squares"} & arguments.keys():
        arguments[name] = [lay_out(torch.full_like(t, torch.nan), "reversed") for t in arguments[name]]
    before = all_bits(arguments)
    getattr(implementation, operation.name)(**arguments)
    assert all_bits(arguments) == before


@every_implementation
@every_gated_operation
@pytest.mark.parametrize(
    ("found_inf", "message"),
    [
        (torch.zeros(2), r"found_inf has dtype float32 and 2 elements; it must be one float32"),
        (torch.zeros((), dtype=torch.float64), r"found_inf has dtype float64 and 1 elements"),
    ],
    ids=["two", "double"],
)
def test_wrong_gates_are_refused(
    operation: Operation, implementation: Any, found_inf: torch.Tensor, message: str
) -> None:
    arguments = plain_call(operation).build()
    before = all_bits(arguments)
    with pytest.raises(ValueError, match=message):
        getattr(implementation, operation.name)(**arguments, found_inf=found_inf)
    assert all_bits(arguments) == before


@every_gated_operation
def test_gates_on_other_devices_are_refused(operation: Operation) -> None:
    arguments = plain_call(operation).build()
    with pytest.raises(
        ValueError, match=r"found_inf is on meta, \w+\[0\] is on cpu; they must be on the same"
    ):
        getattr(reference, operation.name)(**arguments, found_inf=torch.zeros((), device="meta"))


def fill(tensors: list[torch.Tensor], value: float) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def assert_equal_lists(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# Against torch's own optimizer.


sgd_options = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 0.5),
        "momentum": st.just(0.0) | st.floats(0.1, 0.99),
        "dampening": st.floats(0, 0.5),
        "weight_decay": st.just(0.0) | st.floats(0, 0.2),
    }
)


@every_implementation
@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(sgd_options, min_size=1, max_size=6),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    first_steps=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_replay_is_torch_sgd_with_the_mean_gradient(
    implementation: Any,
    steps: list[dict[str, float]],
    nesterov: bool,
    maximize: bool,
    first_steps: int,
    seed: int,
) -> None:
    if nesterov:
        # torch refuses nesterov with dampening or without momentum.
        steps = [step | {"dampening": 0.0, "momentum": step["momentum"] or 0.5} for step in steps]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.float64, generator=generator))
    total = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    optimizer = torch.optim.SGD([weight], lr=0.1, nesterov=nesterov, momentum=0.9)
    optimizer.param_groups[0]["maximize"] = maximize
    weight.grad = total / 5
    for _ in range(first_steps):
        optimizer.step()
    momentum = optimizer.state[weight].get("momentum_buffer")
    replayed = {
        "weights": [weight.detach().clone()],
        "momenta": [torch.full_like(weight, torch.nan) if momentum is None else momentum.clone()],
    }
    implementation.replay_sgd_(
        **replayed,
        sums=[total],
        corrections=[],
        divisor=5.0,
        lrs=[step["lr"] for step in steps],
        momentum_factors=[step["momentum"] for step in steps],
        dampenings=[step["dampening"] for step in steps],
        weight_decays=[step["weight_decay"] for step in steps],
        nesterov=nesterov,
        maximize=maximize,
        momentum_initialised=momentum is not None,
        correction=0,
    )
    for step in steps:
        optimizer.param_groups[0].update(step)
        optimizer.step()
    torch.testing.assert_close(replayed["weights"][0], weight.detach(), rtol=1e-12, atol=1e-12)
    if any(step["momentum"] for step in steps) or momentum is not None:
        buffer = optimizer.state[weight]["momentum_buffer"]
        torch.testing.assert_close(replayed["momenta"][0], buffer, rtol=1e-12, atol=1e-12)


@every_implementation
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_local_momentum_is_torch_sgd(implementation: Any, nesterov: bool, maximize: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    ours, momentum = weight.detach().clone(), torch.zeros(6, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(
        [weight], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov, maximize=maximize
    )
    for _ in range(5):
        weight.grad = torch.randn(6, 5, dtype=torch.float64)
        optimizer.step()
        implementation.local_momentum_(
            [ours],
            [weight.grad],
            [momentum],
            [],
            lr=0.1,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.01,
            nesterov=nesterov,
            maximize=maximize,
            gradient_scale=1.0,
            accumulation=0,
        )
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-13, atol=1e-13)


# Bitwise independence.


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(operation: Operation, dtype: torch.dtype) -> None:
    call = plain_call(operation, dtype, shape=(401, 1003))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            arguments = call.build()
            run(ops, call, arguments)
            results.append([bits(t) for ts in tensors_of(arguments).values() for t in ts])
    finally:
        torch.set_num_threads(before)
    assert all(result == results[0] for result in results)


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_where_a_tensor_is_cut(operation: Operation, dtype: torch.dtype) -> None:
    call = plain_call(operation, dtype, shape=(203,))
    whole, cut = call.build(), call.build()
    run(ops, call, whole)
    pieces = {
        name: [piece for tensor in tensors for piece in tensor.split([1, 7, 2, 64, 0, 129])]
        for name, tensors in tensors_of(cut).items()
    }
    run(ops, call, cut | pieces)
    for name, tensors in tensors_of(whole).items():
        assert [bits(t) for t in tensors] == [bits(t) for t in cut[name]]


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_layout(operation: Operation, dtype: torch.dtype) -> None:
    call = plain_call(operation, dtype, shape=(3, 4, 5, 2))
    plain = call.build()
    run(ops, call, plain)
    for layout in ("channels_last", "gaps", "reversed"):
        other = call.build()
        for name, tensors in tensors_of(other).items():
            other[name] = [lay_out(tensor, layout) for tensor in tensors]
        run(ops, call, other)
        for name, tensors in tensors_of(plain).items():
            assert [bits(t) for t in tensors] == [bits(t) for t in other[name]]


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_value_is_accumulated_exactly(implementation: Any, dtype: torch.dtype) -> None:
    every_value = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    accumulators = [torch.empty(2**16)]
    implementation.accumulate_(accumulators, [every_value], overwrite=True)
    expected = every_value.float().numpy()
    np.testing.assert_array_equal(accumulators[0].numpy(), expected)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_rounded_to_nearest_even(implementation: Any, dtype: torch.dtype) -> None:
    patterns = torch.randint(-(2**31), 2**31, (2**18,), dtype=torch.int64).to(torch.int32)
    every_scale = torch.randn(2**18) * 10.0 ** torch.linspace(-10, 6, 2**18)
    values = torch.cat((patterns.view(torch.float32), every_scale))
    weights, zeros = [torch.zeros(len(values), dtype=dtype)], torch.zeros(len(values), dtype=dtype)
    implementation.local_corrected_(
        weights,
        [zeros],
        [values],
        [],
        step_size=-1.0,
        gradient_weight=0.0,
        correction_weight=1.0,
        weight_decay=0.0,
        accumulation=0,
    )
    np.testing.assert_array_equal(weights[0].float().numpy(), values.to(dtype).float().numpy())


# The checksum.


def expected_checksum(tensor: torch.Tensor) -> int:
    width = min(tensor.element_size(), 4)
    words = np.frombuffer(bits(tensor), dtype=f"<u{width}").tolist()
    total = sum(word * (word ^ 0x9E3779B9) for word in words)
    return (total + 2**63) % 2**64 - 2**63


CHECKSUM_DTYPES = (
    *DTYPES,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
)


@every_implementation
@pytest.mark.parametrize("dtype", CHECKSUM_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps", "offset", "reversed"])
def test_checksum_is_the_sum_of_mixed_words(implementation: Any, dtype: torch.dtype, layout: str) -> None:
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    tensor = values.to(dtype) if dtype.is_floating_point else values.mul_(100).to(dtype)
    tensor = lay_out(tensor, layout)
    tensors = [tensor, tensor[:1, :, 1:3], tensor.flatten()[:0], tensor[0, 0, 0, 0]]
    result = implementation.checksum(tensors)
    assert result.dtype == torch.int64
    assert result.device.type == "cpu"
    assert result.tolist() == [expected_checksum(t) for t in tensors]


@every_implementation
def test_checksum_of_large_tensors_wraps(implementation: Any) -> None:
    tensors = [torch.full((300_001,), -1.5, dtype=torch.float64), torch.randn(200_003)]
    assert implementation.checksum(tensors).tolist() == [expected_checksum(t) for t in tensors]


@every_implementation
@settings(deadline=None, max_examples=50)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 300) | st.sampled_from([2**8, 2**12, 2**16]),
    scale=st.sampled_from([0.0, 2.0**-16, 0.5, 0.9, 1.1, 2.0, -1.0, 65536.0]),
    seed=st.integers(0, 2**32),
)
def test_checksum_notices_a_scaled_replaced_or_zeroed_tensor(
    implementation: Any, dtype: torch.dtype, size: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.rand(size, generator=generator).add_(0.25).to(dtype)
    other = torch.rand(size, generator=generator).add_(2.25).to(dtype)
    before = int(implementation.checksum([tensor]))
    assert int(implementation.checksum([tensor.clone()])) == before
    assert int(implementation.checksum([other])) != before
    assert int(implementation.checksum([tensor * scale])) != before
