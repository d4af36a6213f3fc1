"""What one allreduce of many tensors costs, by engine and bucket size, with two ranks on this machine.

    python benchmarks/buckets.py --json docs/buckets.json

The tensors are shaped like ResNet-20's and two dense layers', about five million float32 values in all.
benchmarks/README.md defines the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measured_on import measured_on

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {"torch": "torchrun", "mpi": "mpirun", "horovod": "mpirun"}
SIZES = (0, 1 << 18, 1 << 20, 1 << 22, 1 << 25)
REPEATS = 12
SHAPES = [
    *[(16, 16, 3, 3)] * 20,
    *[(32, 32, 3, 3)] * 20,
    *[(64, 64, 3, 3)] * 20,
    *[(64,)] * 5,
    (4096, 1024),
    (1024, 640),
]
COMPUTE_SECONDS = 0.2


def measure(engine: str) -> list[dict[str, Any]]:
    """All bucket sizes in turn, several rounds; runs in a rank."""
    import ssd_allreduce
    from ssd_allreduce.communicators.ordered import Ordered
    from ssd_allreduce.communicators.protocol import Communicator, ReduceOp

    torch.set_num_threads(1)
    if engine == "horovod":
        import horovod.torch as hvd

        hvd.init()
    communicator = ssd_allreduce.choose_communicator(engine)
    # Horovod puts tensors together itself.
    sizes = (None,) if communicator.capabilities.matches_by == "name" else SIZES
    channels: dict[int | None, Communicator] = {
        size: communicator if size is None else Ordered(communicator, size, 60.0) for size in sizes
    }
    tensors = [torch.zeros(shape) for shape in SHAPES]
    sequence = [(f"tensor{index}", tensor.numel() * 4) for index, tensor in enumerate(tensors)]

    def start(channel: Communicator) -> list[Any]:
        if isinstance(channel, Ordered):
            channel.announce(sequence)
        pairs = zip(sequence, tensors, strict=True)
        return [channel.allreduce_async([tensor.view(-1)], name, ReduceOp.SUM) for (name, _), tensor in pairs]

    alone, processor, hidden = ({size: [] for size in channels} for _ in range(3))
    for _ in range(REPEATS):
        for size, channel in channels.items():
            began, used = time.monotonic(), time.process_time()
            for handle in start(channel):
                channel.wait(handle, 60.0)
            alone[size].append(time.monotonic() - began)
            processor[size].append(time.process_time() - used)
            handles = start(channel)
            until = time.monotonic() + COMPUTE_SECONDS
            while time.monotonic() < until:
                torch.mm(tensors[-1], tensors[-1].t())
                if isinstance(channel, Ordered):
                    channel.progress()
            began = time.monotonic()
            for handle in handles:
                channel.wait(handle, 60.0)
            hidden[size].append(time.monotonic() - began)
    return [
        {
            "engine": engine,
            "bucket_bytes": size,
            "seconds": min(alone[size]),
            "cpu_seconds": statistics.median(processor[size]),
            "seconds_left_after_computing": statistics.median(hidden[size]),
            "rank": communicator.rank,
        }
        for size in channels
    ]


def launch(engine: str) -> list[dict[str, Any]]:
    own = [str(Path(__file__)), "--engine", engine]
    if engine == "torch":
        command = ["torchrun", "--nproc-per-node", "2", *own]
    else:
        script = str(ROOT / "scripts" / "launch.sh")
        command = ["bash", script, "--launcher", "mpirun", "-n", "2", "--", sys.executable, *own]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode != 0:
        raise RuntimeError(f"{engine} failed:\n{result.stdout}\n{result.stderr}")
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return [row for row in rows if row.pop("rank") == 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=LAUNCHERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        lines = [json.dumps(row) + "\n" for row in measure(arguments.engine)]
        # In one write, or the ranks' lines mingle.
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
        return
    results = [row for engine in LAUNCHERS for row in launch(engine)]
    for row in results:
        print(row)
    if arguments.json is not None:
        report = {
            **measured_on(),
            "tensors": len(SHAPES),
            "elements": sum(torch.Size(shape).numel() for shape in SHAPES),
            "compute_seconds": COMPUTE_SECONDS,
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
