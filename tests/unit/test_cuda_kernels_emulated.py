"""The CUDA kernels' source, compiled for the host and run thread after thread: no GPU is needed.

What can be seen so: which elements each thread computes, at which alignment it loads and stores
sixteen bytes (the host's vector instructions trap on others), how tensors are cut into tiles and
launches, and how options travel. The arithmetic is the CPU kernels', so every bit must be theirs. What
a GPU's compiler makes of it, ``scripts/check_cuda.sh`` and ``tests/gpu`` look at.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from kernel_cases import (
    CLOSED_GATES,
    DTYPES,
    GATED_OPERATIONS,
    LAYOUTS,
    OPERATIONS,
    PER_STEP,
    Call,
    Operation,
    Parameter,
    calls,
    lay_out,
    plain_call,
    tensors_of,
)

from ssd_allreduce import ops

ROOT = Path(__file__).resolve().parents[2]
EMULATION = Path(__file__).parent / "emulated_cuda"
COMPILER = os.environ.get("CXX") or shutil.which("g++")

pytestmark = [
    pytest.mark.timeout(600),  # the first test waits for the compiler
    pytest.mark.skipif(COMPILER is None, reason="compiles C++, and neither CXX nor g++ is there"),
    pytest.mark.skipif(ops.IMPLEMENTATION != "compiled", reason="compares with the compiled CPU kernels"),
]
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)


def compile_emulation(library: Path) -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    headers = Path(found.origin).parent / "include"
    folders = [EMULATION, ROOT / "csrc", headers, headers / "torch/csrc/api/include"]
    command = [str(COMPILER), "-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
    command += [f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))]
    command += ["-x", "c++", str(EMULATION / "operations.cpp"), str(ROOT / "csrc/tensor_lists.cpp")]
    command += ["-o", str(library), f"-L{headers.parent / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``torch.ops.ssd_allreduce_emulated``, with the operations of ``torch.ops.ssd_allreduce``."""
    library = tmp_path_factory.mktemp("emulated_cuda") / "libemulated_cuda.so"
    compile_emulation(library)
    definitions: Any = torch.library.Library("ssd_allreduce_emulated", "DEF")
    for name in (*(operation.name for operation in OPERATIONS), "checksum"):
        schema = str(getattr(torch.ops.ssd_allreduce, name).default._schema)
        definitions.define(schema.split("::")[1])
    # Modules keep it for as long as the process lives: a test may not undefine what others use.
    sys.modules["ssd_allreduce_emulated_definitions"] = definitions
    torch.ops.load_library(str(library))
    return torch.ops.ssd_allreduce_emulated


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    assert torch.equal(ours.detach().view(integers), expected.detach().view(integers)), what


def assert_as_on_the_cpu(emulated: Any, call: Call, gate: float | None = None) -> None:
    arguments, expected = call.build(), call.build()
    found_inf = {} if gate is None else {"found_inf": torch.tensor(gate)}
    getattr(emulated, call.operation.name)(**arguments, **found_inf)
    getattr(ops, call.operation.name)(**expected, **found_inf)
    for name, tensors in tensors_of(arguments).items():
        for index, tensor in enumerate(tensors):
            assert_same_bits(tensor, expected[name][index], f"{name}[{index}] of {call}")


@every_operation
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_call_gives_the_bits_of_the_cpu(emulated: Any, operation: Operation, data: st.DataObject) -> None:
    call = data.draw(calls(operation))
    assume(call.parameters)  # without a tensor, no device's kernels are asked
    assert_as_on_the_cpu(emulated, call)


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_about_a_tile_s_size(emulated: Any, operation: Operation, dtype: torch.dtype) -> None:
    tile = 1024 if dtype == torch.float64 else 2048
    for numel in (1, tile - 1, tile, tile + 1, 3 * tile + 5):
        assert_as_on_the_cpu(emulated, plain_call(operation, dtype, (numel,)))


class Unaligned(Call):
    """A call whose tensors begin some elements after a multiple of 16 bytes."""

    def build(self) -> dict[str, Any]:
        arguments = super().build()
        generator = np.random.default_rng(self.seed)
        equally = bool(generator.integers(2))
        for tensors in tensors_of(arguments).values():
            for index, tensor in enumerate(tensors):
                offset = self.seed % 9 if equally else int(generator.integers(9))
                padded = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
                tensors[index] = padded[offset:].view(tensor.shape).copy_(tensor)
        return arguments


@every_operation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_begin_anywhere(emulated: Any, operation: Operation, dtype: torch.dtype) -> None:
    plain = plain_call(operation, dtype, (4500,))
    for seed in range(20):
        call = Unaligned(operation, plain.parameters, plain.options, (), seed)
        assert_as_on_the_cpu(emulated, call)


@every_operation
def test_more_tensors_than_a_launch_takes(emulated: Any, operation: Operation) -> None:
    plain = plain_call(operation)
    sizes = [Parameter((i % 7,), torch.float32, plain.parameters[0].layouts) for i in range(300)]
    assert_as_on_the_cpu(emulated, Call(operation, tuple(sizes), plain.options, (), seed=3))


@every_operation
def test_lists_of_several_dtypes(emulated: Any, operation: Operation) -> None:
    parameters = tuple(plain_call(operation, dtype).parameters[0] for dtype in DTYPES * 2)
    assert_as_on_the_cpu(emulated, Call(operation, parameters, plain_call(operation).options, (), seed=2))


@pytest.mark.parametrize("operation", GATED_OPERATIONS, ids=lambda op: op.name)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_gates_are_those_of_the_cpu(emulated: Any, operation: Operation, data: st.DataObject) -> None:
    call = data.draw(calls(operation))
    assume(call.parameters)
    assert_as_on_the_cpu(emulated, call, data.draw(st.sampled_from((0.0, *CLOSED_GATES))))


@pytest.mark.parametrize("operation", GATED_OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_every_launch_looks_at_the_gate(emulated: Any, operation: Operation, gate: float) -> None:
    plain = plain_call(operation)
    sizes = [Parameter((i % 7 * 1000,), torch.float32, plain.parameters[0].layouts) for i in range(300)]
    assert_as_on_the_cpu(emulated, Call(operation, tuple(sizes), plain.options, (), seed=5), gate)


@pytest.mark.parametrize("name", ["replay_sgd_", "replay_adam_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 500])
def test_more_replayed_steps_than_a_launch_takes(
    emulated: Any, name: str, dtype: torch.dtype, steps: int
) -> None:
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    plain = plain_call(operation, dtype)
    generator = np.random.default_rng(steps)
    options = {
        option: generator.uniform(0.0, 0.9, steps).tolist() if option in PER_STEP else value
        for option, value in plain.options.items()
    }
    assert_as_on_the_cpu(emulated, Call(operation, plain.parameters, options, (), seed=4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.int64, torch.bool], ids=str)
def test_checksums_are_those_of_the_cpu(emulated: Any, dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(0,), (1,), (5, 3), (2, 3, 4, 5), (40000,), (7, 5)] * 50
    tensors = [lay_out(torch.rand(size, generator=generator).mul_(100).to(dtype), layout) for size in sizes]
    assert emulated.checksum(tensors).tolist() == ops.checksum(tensors).tolist()
