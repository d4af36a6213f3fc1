"""The compiled loops in the disassembly: vectors throughout, and no fused multiply-adds."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
from functools import cache

import pytest
import torch

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="reads x86-64 instructions"
)

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
KERNEL = re.compile(r"apply_rule_(?P<target>avx2|baseline)<(?P<dtype>[\w:]+), (?P<rule>.*)>\(ssd")
SCALAR_ARITHMETIC = re.compile(r"^v?(add|sub|mul|div|sqrt)s[sd]\b")
PACKED_ARITHMETIC = re.compile(r"^v?(add|sub|mul|div|sqrt)p[sd]\b")
FUSED = re.compile(r"^vfn?m(add|sub)")

RULES = {
    *(
        f"{wrapped.format(rule)}"
        for rule in ("LocalMomentum", "LocalCorrected", "LocalPlain")
        for wrapped in ("{}", "Accumulating<{}>", "Overwriting<{}>")
    ),
    "Accumulating<OnlyGradient>",
    "Overwriting<OnlyGradient>",
    "LocalAdam",
    "AccumulatingSquare<Accumulating<LocalAdam>>",
    "OverwritingSquare<Overwriting<LocalAdam>>",
    "AccumulatingSquare<OnlyGradient>",
    "OverwritingSquare<OnlyGradient>",
    *(f"ReplayAdam {kind}" for kind in range(3)),
    "RebaseAdam",
    *(f"ReplaySgd {momentum} {kind}" for momentum in ("false", "true") for kind in range(3)),
    "RebaseMomentum",
    "RebaseShift",
}
DTYPES = {"float", "double", "c10::Half", "c10::BFloat16"}
TARGETS = {"avx2": "ymm", "baseline": "xmm"}


def short_name(rule: str) -> str:
    """LocalMomentum for ssd_allreduce::LocalMomentum<float>, and so on."""
    rule = rule.replace("ssd_allreduce::", "").replace(" ", "")
    replay = re.fullmatch(r"ReplaySgd<\w+,(false|true),\(Correction\)(\d)>", rule)
    if replay:
        return f"ReplaySgd {replay[1]} {replay[2]}"
    replay = re.fullmatch(r"ReplayAdam<\w+,\(Correction\)(\d)>", rule)
    if replay:
        return f"ReplayAdam {replay[1]}"
    return re.sub(r"<(float|double)>", "", rule)


def objdump(*options: str) -> str:
    path = importlib.import_module("ssd_allreduce._C").__file__
    assert path is not None
    command = ["objdump", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def kernels() -> dict[tuple[str, str, str], list[str]]:
    """The instructions of every compiled kernel, by target, dtype and rule."""
    listing = objdump("-d", "-C", "--no-show-raw-insn")
    found: dict[tuple[str, str, str], list[str]] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if header := FUNCTION.match(line):
            instructions = []
            if kernel := KERNEL.search(header[1]):
                name = short_name(kernel["rule"])
                found[kernel["target"], kernel["dtype"], name] = instructions
        elif "\t" in line:
            instructions.append(line.split("\t", 1)[1])
    return found


def matching(pattern: re.Pattern[str], instructions: list[str]) -> list[str]:
    return [instruction for instruction in instructions if pattern.match(instruction)]


def test_every_rule_is_compiled_for_every_dtype_and_target() -> None:
    expected = {(t, d, r) for t in TARGETS for d in DTYPES for r in RULES}
    assert set(kernels()) == expected


def test_kernels_compute_on_vectors_only() -> None:
    for (target, dtype, rule), instructions in kernels().items():
        name = f"{rule} of {dtype} for {target}"
        assert not matching(SCALAR_ARITHMETIC, instructions), name
        packed = matching(PACKED_ARITHMETIC, instructions)
        if rule == "Overwriting<OnlyGradient>":  # a copy, or a conversion
            assert any(TARGETS[target] in instruction for instruction in instructions), name
        else:
            assert packed, name
            assert all(TARGETS[target] in instruction for instruction in packed), name


def test_kernels_do_not_contract_multiplications_and_additions() -> None:
    for (target, dtype, rule), instructions in kernels().items():
        assert not matching(FUSED, instructions), f"{rule} of {dtype} for {target}"


def test_kernels_call_nothing_but_memcpy() -> None:
    for (target, dtype, rule), instructions in kernels().items():
        calls = [line for line in instructions if line.startswith("call") and "memcpy" not in line]
        assert not calls, f"{rule} of {dtype} for {target}: {calls}"


def test_kernels_run_on_the_threads_that_torch_uses() -> None:
    if "OpenMP" in torch.__config__.parallel_info().split("ATen parallel backend:")[1]:
        started = re.search(r"GOMP_parallel|__kmpc_fork_call", objdump("-T"))
        assert started, "built without -fopenmp, at::parallel_for uses one thread"
