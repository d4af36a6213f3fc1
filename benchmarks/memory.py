"""Bytes that training keeps for each parameter element: plain torch, plain Horovod and SSD-SGD.

    python benchmarks/memory.py --json docs/memory.json

Each method trains in ranks of its own, launched one after the other, and what is counted is the peak
of the resident memory less what the process held before the model was made. Activations are small beside the
parameters here. Beside it stands the count: what the method has to keep.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measured_on import measured_on

ROOT = Path(__file__).resolve().parents[1]
MEGABYTE = 2**20
WIDTH = 2048
LAYERS = 6
SGD = {"lr": 1e-4, "momentum": 0.9}
# Weight, gradient and momentum in float32.
PLAIN = 12
METHODS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "torch": (PLAIN, None),
    "horovod": (PLAIN, None),
    "ssd d=0": (PLAIN + 12, {"delay_steps": 4, "overlap_steps": 0}),
    "ssd d>0": (PLAIN + 24, {"delay_steps": 4, "overlap_steps": 2}),
}


def peak() -> int:
    """Largest resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not tell the peak of the resident memory (Linux only)")


def measure(method: str) -> dict[str, Any]:
    """Train a few periods and report; runs in a rank."""
    import horovod.torch as hvd

    import ssd_allreduce as ssd

    hvd.init()
    torch.set_num_threads(1)
    data = torch.randn(2, WIDTH)
    hvd.allreduce(torch.ones(8), name="warm")
    # So that libraries have loaded and allocated what they keep.
    before = peak()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    elements = sum(p.numel() for p in model.parameters())
    counted, settings = METHODS[method]
    optimizer: Any = torch.optim.SGD(model.parameters(), **SGD, foreach=False)
    names = list(model.named_parameters())
    if method == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
    elif settings is not None:
        optimizer = ssd.DistributedOptimizer(optimizer, named_parameters=names, **settings)
    for _ in range(10):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    bytes_per_element = (peak() - before) / elements
    return {"method": method, "bytes_per_element": bytes_per_element, "counted": counted, "rank": hvd.rank()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(method: str, ranks: int) -> dict[str, Any]:
    script = [sys.executable, str(Path(__file__)), "--method", method]
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--launcher", "mpirun", "-n", str(ranks), "--"]
    result = subprocess.run([*command, *script], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{method} failed:\n{result.stdout}\n{result.stderr}")
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    largest: dict[str, Any] = max(reports, key=lambda report: report["bytes_per_element"])
    return largest


def main() -> None:
    arguments = parse_arguments()
    if arguments.method is not None:
        sys.stdout.write(json.dumps(measure(arguments.method)) + "\n")
        sys.stdout.flush()
        return
    results = [launch(method, arguments.ranks) for method in METHODS]
    for result in results:
        print(f"{result['method']:>8} {result['bytes_per_element']:6.1f} bytes, counted {result['counted']}")
    if arguments.json is not None:
        report = {
            **measured_on(),
            "elements": LAYERS * WIDTH * (WIDTH + 1),
            "results": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
