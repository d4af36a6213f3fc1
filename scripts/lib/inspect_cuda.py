"""Looks at the machine code of the CUDA kernels in an extension, without a GPU.

Every rule must have a kernel for every dtype; each kernel must load and store 16 bytes at a time, and
none may touch local memory, which is where registers go that the compiler ran out of.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

DTYPES = {"f": "float32", "d": "float64", "N3c104HalfE": "float16", "N3c108BFloat16E": "bfloat16"}
LOCAL_RULES = ("LocalMomentum", "LocalCorrected", "LocalPlain", "LocalAdam")
RULES = {
    *(f"{wrapper}{rule}" for rule in LOCAL_RULES for wrapper in ("", "Accumulating ", "Overwriting ")),
    "Accumulating OnlyGradient",
    "Overwriting OnlyGradient",
    "AccumulatingSquare OnlyGradient",
    "OverwritingSquare OnlyGradient",
    *(f"ReplaySgd {momentum} {correction}" for momentum in (0, 1) for correction in (0, 1, 2)),
    *(f"ReplayAdam {correction}" for correction in (0, 1, 2)),
    "RebaseMomentum",
    "RebaseAdam",
    "RebaseShift",
}
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)")
KERNEL = re.compile(r"apply_ruleI(?P<dtype>f|d|N3c104HalfE|N3c108BFloat16E)(?P<rule>.*?)EEvNS_5BatchI")
WORDS = {word for rule in RULES for word in rule.split() if not word.isdigit()}


def find_cuobjdump() -> str | None:
    """The toolkit's, else the one that Triton's package carries."""
    found = shutil.which("cuobjdump")
    if found is None:
        triton = importlib.util.find_spec("triton")
        for folder in (triton.submodule_search_locations or []) if triton else []:
            carried = Path(folder) / "backends/nvidia/bin/cuobjdump"
            if carried.is_file():
                found = str(carried)
    return found


def rule_name(mangled: str) -> str:
    """``Accumulating LocalPlain`` for ``NS_12AccumulatingINS_10LocalPlainIfEEEE``."""
    lengths = list(re.finditer(r"\d+", mangled))
    identifiers = [mangled[length.end() : length.end() + int(length[0])] for length in lengths]
    names = [name for name in identifiers if name in WORDS]
    # Adam's local step accumulates squares wherever it accumulates.
    if "LocalAdam" in names:
        names = [name for name in names if not name.endswith("Square")]
    constants = re.findall(r"(?:Lb|CorrectionE)(\d)E", mangled)
    return " ".join([*names, *constants])


def disassemble(cuobjdump: str, extension: Path, architecture: str) -> dict[str, list[str]]:
    """The instructions of each function for one architecture (``sm_90``)."""
    command = [cuobjdump, "--dump-sass", "--gpu-architecture", architecture, str(extension)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    functions: dict[str, list[str]] = {}
    current: list[str] = []
    for line in listing.splitlines():
        if header := FUNCTION.match(line):
            current = functions.setdefault(header[1], [])
        elif instruction := INSTRUCTION.match(line):
            current.append(instruction[1])
    return functions


def starting(instructions: list[str], *beginnings: str) -> list[str]:
    return [instruction for instruction in instructions if instruction.startswith(beginnings)]


def find_problems(functions: dict[str, list[str]]) -> list[str]:
    problems = [
        f"{name} uses local memory ({', '.join(sorted(set(spilled)))})"
        for name, instructions in functions.items()
        if (spilled := starting(instructions, "LDL", "STL"))
    ]
    found: set[tuple[str, str]] = set()
    for name, instructions in functions.items():
        kernel = KERNEL.search(name)
        if kernel is None:
            continue
        rule, dtype = rule_name(kernel["rule"]), DTYPES[kernel["dtype"]]
        found.add((rule, dtype))
        for access in ("LDG.E.128", "STG.E.128"):
            if not starting(instructions, access):
                problems.append(f"the kernel of {rule} for {dtype} has no {access}")
    expected = {(rule, dtype) for rule in RULES for dtype in DTYPES.values()}
    problems += [f"there is no kernel of {rule} for {dtype}" for rule, dtype in sorted(expected - found)]
    problems += [f"unknown kernel: {rule} for {dtype}" for rule, dtype in sorted(found - expected)]
    if not any("add_checksums" in name for name in functions):
        problems.append("there is no kernel of the checksum")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extension", type=Path)
    parser.add_argument("--architecture", default="9.0", help="compute capability; default: 9.0")
    arguments = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        sys.exit(
            "inspect_cuda.py: there is no cuobjdump, neither on PATH nor in Triton's package. Install "
            "the CUDA toolkit's, or triton."
        )
    architecture = "sm_" + arguments.architecture.replace(".", "")
    functions = disassemble(cuobjdump, arguments.extension, architecture)
    problems = find_problems(functions)
    if problems:
        sys.exit("\n".join([f"{len(problems)} problems in the code for {architecture}:", *problems]))
    print(
        f"{len(functions)} kernels for {architecture}: all rules and dtypes, 16-byte loads and stores, "
        "no local memory"
    )


if __name__ == "__main__":
    main()
