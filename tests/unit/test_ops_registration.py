"""How the kernel operations behave as torch operations: autograd, opcheck, errors, selection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import OPERATIONS, Operation, plain_call, tensors_of

from ssd_allreduce import ops, reference

every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
every_implementation = pytest.mark.parametrize(
    "implementation", [ops, reference], ids=["compiled", "reference"]
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def on_parameters(operation: Operation) -> dict[str, Any]:
    """Arguments whose weights are parameters that require grad, as a model's are."""
    arguments = plain_call(operation).build()
    if "weights" in arguments:
        arguments["weights"] = [torch.nn.Parameter(w) for w in arguments["weights"]]
    return arguments


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


# Autograd.


@every_implementation
@every_operation
def test_versions_of_changed_tensors_are_bumped(operation: Operation, implementation: Any) -> None:
    call = plain_call(operation)
    arguments = on_parameters(operation)
    changed = call.expected(arguments)[0]
    before = {name: [t._version for t in ts] for name, ts in tensors_of(arguments).items()}
    getattr(implementation, operation.name)(**arguments)
    for name, tensors in tensors_of(arguments).items():
        for tensor, version in zip(tensors, before[name], strict=True):
            if name in changed:
                assert tensor._version > version, name
            else:
                assert tensor._version == version, name


@every_implementation
@every_operation
def test_parameters_stay_leaves_and_no_graph_is_recorded(operation: Operation, implementation: Any) -> None:
    arguments = on_parameters(operation)
    getattr(implementation, operation.name)(**arguments)
    for tensors in tensors_of(arguments).values():
        assert all(tensor.is_leaf and tensor.grad_fn is None for tensor in tensors)
    assert all(weight.requires_grad for weight in arguments.get("weights", []))


@every_implementation
def test_a_step_between_forward_and_backward_is_noticed(implementation: Any) -> None:
    arguments = on_parameters(BY_NAME["local_plain_"])
    loss = sum((weight * weight).sum() for weight in arguments["weights"])
    implementation.local_plain_(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_implementation
@every_operation
def test_inference_tensors_are_served(operation: Operation, implementation: Any) -> None:
    with torch.inference_mode():
        arguments = plain_call(operation).build()
        getattr(implementation, operation.name)(**arguments)


@every_implementation
def test_copies_back_into_parameters_are_not_refused(implementation: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    gradient = torch.arange(24.0).view(6, 4).t()
    implementation.local_plain_([weight[:, ::2].detach()], [gradient[:, ::2]], [], 1.0, 1.0, 0.0, 0)
    expected = torch.zeros(4, 6)
    expected[:, ::2] = -gradient[:, ::2]
    torch.testing.assert_close(weight.detach(), expected)
    other = torch.nn.Parameter(torch.zeros(6, 4).t())
    implementation.local_plain_([other], [gradient.contiguous()], [], 1.0, 1.0, 0.0, 0)
    torch.testing.assert_close(other.detach(), -gradient)


# opcheck.


def opcheck_every_operation() -> None:
    for operation in OPERATIONS:
        overload = getattr(torch.ops.ssd_allreduce, operation.name).default
        torch.library.opcheck(overload, (), on_parameters(operation))
        if operation.is_gated:
            torch.library.opcheck(overload, (), on_parameters(operation) | {"found_inf": torch.ones(())})
    tensors = [torch.nn.Parameter(torch.randn(3, 4)), torch.randn(5).half(), torch.arange(6)]
    torch.library.opcheck(torch.ops.ssd_allreduce.checksum.default, (tensors,))


def test_opcheck_passes() -> None:
    opcheck_every_operation()


def test_opcheck_passes_for_the_reference() -> None:
    code = (
        "import test_ops_registration as t; assert t.ops.IMPLEMENTATION == 'reference'; "
        "t.opcheck_every_operation()"
    )
    result = run_python(code, SSD_ALLREDUCE_KERNELS="reference")
    assert result.returncode == 0, result.stderr


# Refusals.


def arguments_of(name: str, **changes: Any) -> dict[str, Any]:
    return plain_call(BY_NAME[name]).build() | changes


@every_implementation
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gradients": [torch.zeros(5, 3)]},
            r"local_plain_: gradients has 1 tensors, weights has 2; give one for each",
        ),
        (
            {"accumulators": []},
            r"accumulators has 0 tensors, weights has 2; give one for each",
        ),
        (
            {"gradients": [torch.zeros(5, 3), torch.zeros(3, 5)]},
            r"gradients\[1\] has shape \[3, 5\], weights\[1\] has \[5, 3\]; they must be equal",
        ),
        (
            {"gradients": [torch.zeros(5, 3), torch.zeros(5, 3).double()]},
            r"gradients\[1\] has dtype float64; with weights\[1\] of float32 it must be float32",
        ),
        (
            {"accumulators": [torch.zeros(5, 3).half(), torch.zeros(5, 3)]},
            r"accumulators\[0\] has dtype float16; with weights\[0\] of float32 it must be float32",
        ),
        (
            {"weights": [torch.zeros(5, 3).int(), torch.zeros(5, 3).int()]},
            r"weights\[0\] has dtype int32; allowed are float16, bfloat16, float32 and float64",
        ),
        (
            {"accumulation": 3},
            r"accumulation is 3; allowed are 0 \(none\), 1 \(add\), 2 \(overwrite\)",
        ),
    ],
)
def test_wrong_lists_are_refused(implementation: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        implementation.local_plain_(**arguments_of("local_plain_", **changes))


@every_implementation
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divisor": 0.0}, r"divisor is 0; give the number of gradients"),
        (
            {"dampenings": [0.0]},
            r"dampenings and weight_decays have \[2, 2, 1, 2\] entries; give one of each",
        ),
        ({"momenta": []}, r"momenta has 0 tensors, weights has 2"),
        ({"corrections": []}, r"corrections has 0 tensors, weights has 2"),
        (
            {"correction": -1},
            r"correction is -1; allowed are 0 \(none\), 1 \(mean_gradient\), 2 \(displacement\)",
        ),
    ],
)
def test_wrong_replays_are_refused(implementation: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        implementation.replay_sgd_(**arguments_of("replay_sgd_", **changes))


def test_tensors_on_other_devices_are_refused() -> None:
    elsewhere = [torch.zeros(5, 3, device="meta")] * 2
    with pytest.raises(ValueError, match=r"gradients\[0\] is on meta, weights\[0\] is on cpu"):
        reference.local_plain_(**arguments_of("local_plain_", gradients=elsewhere))


@every_implementation
def test_checksum_refuses_wider_elements(implementation: Any) -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\] .* elements of 16 bytes; 1, 2, 4 and 8"):
        implementation.checksum([torch.zeros(1), torch.zeros(1, dtype=torch.complex128)])


def test_refused_calls_change_nothing() -> None:
    arguments = arguments_of("local_momentum_", accumulators=[torch.zeros(5, 3)])
    before = arguments_of("local_momentum_")
    with pytest.raises(ValueError, match="accumulators"):
        ops.local_momentum_(**arguments)
    for ours, unchanged in zip(arguments["weights"], before["weights"], strict=True):
        assert torch.equal(ours, unchanged)


# Which kernels serve.

WITHOUT_EXTENSION = "import sys; sys.modules['ssd_allreduce._C'] = None; "
REPORT = "from ssd_allreduce import ops; print(ops.IMPLEMENTATION)"


def test_the_reference_can_be_demanded() -> None:
    result = run_python(REPORT, SSD_ALLREDUCE_KERNELS="reference")
    assert result.stdout.strip() == "reference"
    assert "ExtensionNotBuiltWarning" not in result.stderr


def test_a_missing_extension_is_said_once() -> None:
    result = run_python(
        WITHOUT_EXTENSION + REPORT + "; import torch; ops.accumulate_([torch.zeros(1)], "
        "[torch.ones(1)], True); ops.checksum([torch.ones(1)])",
        SSD_ALLREDUCE_KERNELS="",
    )
    assert result.stdout.strip() == "reference"
    assert result.stderr.count("ExtensionNotBuiltWarning") == 1
    assert "plain torch is used" in result.stderr


def test_a_demanded_extension_that_is_missing_is_an_error() -> None:
    result = run_python(WITHOUT_EXTENSION + REPORT, SSD_ALLREDUCE_KERNELS="compiled")
    assert result.returncode != 0
    assert "ImportError: SSD_ALLREDUCE_KERNELS=compiled" in result.stderr
    assert "unset SSD_ALLREDUCE_KERNELS" in result.stderr


def test_other_choices_are_refused() -> None:
    result = run_python(REPORT, SSD_ALLREDUCE_KERNELS="fast")
    assert result.returncode != 0
    assert "SSD_ALLREDUCE_KERNELS='fast'; allowed are 'compiled' and 'reference'" in result.stderr


# A type of device for which no kernels are written: as a GPU is where they were built without nvcc.
ON_ANOTHER_DEVICE = (
    "from ssd_allreduce import ops; print(ops.implementation('mps')); ops.check_kernels(['cpu', 'mps'])"
)


def test_devices_without_compiled_kernels_are_told_apart() -> None:
    result = run_python(ON_ANOTHER_DEVICE, SSD_ALLREDUCE_KERNELS="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "reference"
    assert result.stderr.count("ExtensionNotBuiltWarning") == 1
    assert "not for parameters on mps, for which plain torch serves" in result.stderr


def test_kernels_that_are_demanded_and_missing_for_a_device_are_an_error() -> None:
    result = run_python(ON_ANOTHER_DEVICE, SSD_ALLREDUCE_KERNELS="compiled")
    assert result.returncode != 0
    assert (
        "ImportError: SSD_ALLREDUCE_KERNELS=compiled, and the kernels were compiled, but not" in result.stderr
    )


@pytest.mark.parametrize("choice", ["compiled", "reference"])
def test_devices_of_the_chosen_kernels_need_no_word(choice: str) -> None:
    demand = "from ssd_allreduce import ops; print(ops.implementation('cpu')); ops.check_kernels(['cpu'])"
    result = run_python(demand, SSD_ALLREDUCE_KERNELS=choice)
    assert (result.returncode, result.stdout.strip()) == (0, choice), result.stderr
    assert "ExtensionNotBuiltWarning" not in result.stderr


def checksums_of_results() -> list[int]:
    results: list[int] = []
    for operation in OPERATIONS:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            arguments = plain_call(operation, dtype, shape=(37, 29)).build()
            getattr(ops, operation.name)(**arguments)
            for tensors in tensors_of(arguments).values():
                results += ops.checksum(tensors).tolist()
    return results


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_do_not_depend_on_the_processor(capability: str) -> None:
    code = "import test_ops_registration as t; print(t.checksums_of_results())"
    result = run_python(code, ATEN_CPU_CAPABILITY=capability)
    assert result.stdout.strip() == str(checksums_of_results()), result.stderr
