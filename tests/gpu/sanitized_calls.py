"""One call of each operation with awkward tensors, for compute-sanitizer to watch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from gpu_calls import assert_bits_of_the_cpu, on_gpu
from kernel_cases import DTYPES, OPERATIONS, Call, Parameter, plain_call, tensors_of

from ssd_allreduce import ops


def main() -> None:
    for operation in OPERATIONS:
        parameters = [
            Parameter(shape, dtype, (layout,) * len(operation.lists))
            for dtype in DTYPES
            for shape in ((0,), (1,), (2049,), (5, 7))
            for layout in ("contiguous", "offset", "gaps")
        ]
        call = Call(operation, tuple(parameters), plain_call(operation).options, (), 0)
        assert_bits_of_the_cpu(call)
        for tensors in tensors_of(call.build()).values():
            ops.checksum([on_gpu(tensor) for tensor in tensors]).tolist()


if __name__ == "__main__":
    main()
