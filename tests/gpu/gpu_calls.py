"""Kernel calls on CUDA tensors, and how their results are compared."""

from __future__ import annotations

import os
from typing import Any

import torch
from kernel_cases import Call, tensors_of
from torch import Tensor

from ssd_allreduce import ops, reference

DEVICE = "cuda"


def fresh_seed() -> int:
    """Other inputs in every run; the failing call's representation holds the seed."""
    return int.from_bytes(os.urandom(4), "little")


def on_gpu(tensor: Tensor) -> Tensor:
    """The same values in the same layout: strides, gaps and offset."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.detach().as_strided((whole,), (1,), 0).to(DEVICE)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def with_lists(arguments: dict[str, Any], convert: Any) -> dict[str, Any]:
    lists = {name: [convert(tensor) for tensor in tensors] for name, tensors in tensors_of(arguments).items()}
    return arguments | lists


def run_on_gpu(call: Call) -> dict[str, Any]:
    arguments = with_lists(call.build(), on_gpu)
    getattr(ops, call.operation.name)(**arguments)
    return with_lists(arguments, Tensor.cpu)


def run_fallback_in_float64(call: Call) -> dict[str, Any]:
    arguments = with_lists(call.build(), Tensor.double)
    getattr(reference, call.operation.name)(**arguments)
    return arguments


def run_on_cpu(call: Call) -> dict[str, Any]:
    arguments = call.build()
    getattr(ops, call.operation.name)(**arguments)
    return arguments


def tolerance(tensor: Tensor) -> tuple[float, float]:
    """Relative and absolute: the storage's rounding, and a few roundings of the arithmetic."""
    arithmetic = torch.finfo(torch.float64 if tensor.dtype == torch.float64 else torch.float32).eps
    return float(torch.finfo(tensor.dtype).eps), 1000 * arithmetic


def assert_as_the_fallback(call: Call) -> None:
    ours, expected = run_on_gpu(call), run_fallback_in_float64(call)
    for name, tensors in tensors_of(ours).items():
        for index, tensor in enumerate(tensors):
            rtol, atol = tolerance(tensor)
            torch.testing.assert_close(
                tensor.double(),
                expected[name][index],
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda message, name=name, index=index: f"{name}[{index}] of {call}: {message}",
            )


def assert_bits_of_the_cpu(call: Call) -> None:
    ours, expected = run_on_gpu(call), run_on_cpu(call)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensors in tensors_of(ours).items():
        for index, tensor in enumerate(tensors):
            kind = integers[tensor.element_size()]
            same = torch.equal(tensor.contiguous().view(kind), expected[name][index].contiguous().view(kind))
            assert same, f"{name}[{index}] of {call}"
