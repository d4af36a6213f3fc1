"""Run under a launcher by ``test_missing_rank.py``: the last rank stops taking part, and the others wait.

    missing_rank.py FOLDER WHERE HOW

WHERE: where the others wait: ``first_step``, ``warmup``, ``sync_point``, ``completion`` or ``flush``.
HOW: what the last rank does: ``sleep``, ``stop`` (SIGSTOP), ``kill`` (SIGKILL), ``end`` (a normal end).

The others write what happened to them to ``FOLDER/<rank>.json`` and let their exception end them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import perceptron, regression_loss
from ranks import hvd

import ssd_allreduce as ssd

TIMEOUT = 3.0
WARMUP_STEPS, DELAY_STEPS, OVERLAP_STEPS = 2, 4, 1
# The first step that the last rank does not make, by the place where the others come to wait for it.
LAST_RANK_MAKES = {"first_step": 0, "warmup": 1, "sync_point": 5, "completion": 5, "flush": 8}


def stop_taking_part(how: str) -> NoReturn:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "end":
        sys.exit(0)
    time.sleep(600)
    raise AssertionError("nobody ended this rank")


def main() -> None:
    folder, where, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    hvd.init()
    torch.set_num_threads(1)
    model = perceptron()
    optimizer = ssd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        warmup_steps=WARMUP_STEPS,
        delay_steps=DELAY_STEPS,
        overlap_steps=0 if where == "sync_point" else OVERLAP_STEPS,
        timeout=TIMEOUT,
    )
    # Horovod forgets it when it shuts down.
    rank = hvd.rank()
    missing = rank == hvd.size() - 1
    # Ranks that start late are not missing.
    hvd.allgather_object(None, name="start")
    step = 0
    while True:
        if missing and step == LAST_RANK_MAKES[where]:
            # As long as the others compute, nothing is missing yet.
            time.sleep(0.5)
            stop_taking_part(how)
        optimizer.zero_grad()
        regression_loss(model, rank, step).backward()
        began, cpu_began, all_cpu_began = time.monotonic(), time.thread_time(), time.process_time()
        try:
            if where == "flush" and step == LAST_RANK_MAKES["flush"]:
                optimizer.zero_grad()
                optimizer.flush()
            else:
                optimizer.step()
        except BaseException as error:
            result = {
                "error": type(error).__name__,
                "message": str(error),
                "seconds": time.monotonic() - began,
                "cpu_seconds": time.thread_time() - cpu_began,
                "cpu_seconds_of_all_threads": time.process_time() - all_cpu_began,
                "steps": optimizer.stats().steps,
            }
            (folder / f"{rank}.json").write_text(json.dumps(result))
            raise
        step += 1


if __name__ == "__main__":
    main()
