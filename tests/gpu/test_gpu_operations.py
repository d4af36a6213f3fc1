"""The CUDA kernels on a GPU, against the fallback in float64 and the CPU's kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from gpu_calls import (
    DEVICE,
    assert_as_the_fallback,
    assert_bits_of_the_cpu,
    fresh_seed,
    on_gpu,
    run_on_cpu,
    with_lists,
)
from hypothesis import assume, given, settings
from kernel_cases import (
    CLOSED_GATES,
    DTYPES,
    GATED_OPERATIONS,
    LAYOUTS,
    OPERATIONS,
    Call,
    Operation,
    Parameter,
    calls,
    lay_out,
    plain_call,
    tensors_of,
)

from ssd_allreduce import ops

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def fresh(operation: Operation, *parameters: Parameter) -> Call:
    return Call(operation, parameters, plain_call(operation).options, (), fresh_seed())


def parameter(
    operation: Operation, dtype: torch.dtype, shape: tuple[int, ...], layout: str = "contiguous"
) -> Parameter:
    return Parameter(shape, dtype, (layout,) * len(operation.lists))


@pytest.mark.parametrize("name", [operation.name for operation in OPERATIONS] + ["checksum"])
def test_every_operation_has_a_cuda_kernel(name: str) -> None:
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"ssd_allreduce::{name}", "CUDA"), "build with SSD_ALLREDUCE_CUDA=1"


@every_operation
@every_dtype
def test_odd_sizes(operation: Operation, dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 255, 2047, 2048, 2049, 1_000_003):
        call = fresh(operation, parameter(operation, dtype, (numel,)))
        assert_as_the_fallback(call)
        assert_bits_of_the_cpu(call)


@every_operation
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_in_any_layout(operation: Operation, dtype: torch.dtype, layout: str) -> None:
    shapes = ((3, 5, 7, 9), (2, 64, 31, 33), (5001,))
    call = fresh(operation, *(parameter(operation, dtype, shape, layout) for shape in shapes))
    assert_as_the_fallback(call)
    assert_bits_of_the_cpu(call)


@every_operation
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_call(operation: Operation, data: st.DataObject) -> None:
    call = data.draw(calls(operation))
    assume(call.parameters)
    assert_bits_of_the_cpu(call)


@every_operation
def test_ten_thousand_tensors_at_once(operation: Operation) -> None:
    sizes = [(i % 70,) for i in range(10_000)]
    call = fresh(operation, *(parameter(operation, torch.float32, size) for size in sizes))
    assert_as_the_fallback(call)


@every_operation
def test_mixed_dtypes(operation: Operation) -> None:
    call = fresh(operation, *(parameter(operation, dtype, (777,)) for dtype in DTYPES * 3))
    assert_as_the_fallback(call)
    assert_bits_of_the_cpu(call)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksums_are_those_of_the_cpu(dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    sizes = [(0,), (1,), (5, 3), (2, 3, 4, 5), (1_000_003,)] * 60
    tensors = [lay_out(torch.rand(size, generator=generator).mul_(100).to(dtype), layout) for size in sizes]
    result = ops.checksum([on_gpu(tensor) for tensor in tensors])
    assert result.device.type == DEVICE
    assert result.tolist() == ops.checksum(tensors).tolist()


def gpu_arguments(operation: Operation) -> tuple[Call, dict[str, Any]]:
    call = fresh(operation, *(parameter(operation, torch.float32, (size,)) for size in (3, 5000)))
    return call, with_lists(call.build(), on_gpu)


def assert_equal_lists(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensors in tensors_of(arguments).items():
        for tensor, other in zip(tensors, expected[name], strict=True):
            assert torch.equal(tensor.cpu(), other), name


@every_operation
def test_nothing_waits_for_the_device(operation: Operation) -> None:
    call, arguments = gpu_arguments(operation)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(ops, operation.name)(**arguments)
        ops.checksum(next(iter(tensors_of(arguments).values())))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_lists(arguments, run_on_cpu(call))


@pytest.mark.parametrize("operation", GATED_OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("gate", [0.0, *CLOSED_GATES])
def test_a_gate_is_read_on_the_gpu(operation: Operation, gate: float) -> None:
    call, arguments = gpu_arguments(operation)
    found_inf = torch.tensor(gate, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(ops, operation.name)(**arguments, found_inf=found_inf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_lists(arguments, run_on_cpu(call) if gate == 0.0 else call.build())


@every_operation
def test_the_current_stream_is_used(operation: Operation) -> None:
    call, arguments = gpu_arguments(operation)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        getattr(ops, operation.name)(**arguments)
    assert not stream.query(), "the call waited, or used another stream"
    stream.synchronize()
    assert_equal_lists(arguments, run_on_cpu(call))


@every_operation
def test_a_cuda_graph_repeats_the_call(operation: Operation) -> None:
    call, arguments = gpu_arguments(operation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(ops, operation.name)(**arguments)
    assert_equal_lists(arguments, call.build())
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    expected = call.build()
    for _ in range(2):
        getattr(ops, operation.name)(**expected)
    assert_equal_lists(arguments, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_several_gpus() -> None:
    for operation in OPERATIONS:
        call = fresh(operation, *(parameter(operation, torch.float32, (5000,)) for _ in range(6)))
        devices = ["cuda:0", "cuda:1"] * 3
        arguments = call.build()
        for tensors in tensors_of(arguments).values():
            tensors[:] = [tensor.to(device) for tensor, device in zip(tensors, devices, strict=True)]
        getattr(ops, operation.name)(**arguments)
        assert_equal_lists(arguments, run_on_cpu(call))


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
@pytest.mark.timeout(600)
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "77", sys.executable]
    probe = subprocess.run(
        [*command, "-c", "import torch; torch.ones(1, device='cuda').sum().item()"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if probe.returncode != 0:
        # As in containers that may not debug the device, or with a tool that is older than the GPU.
        pytest.skip(f"compute-sanitizer does not run here: {(probe.stdout + probe.stderr)[-300:]}")
    program = Path(__file__).parent / "sanitized_calls.py"
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
