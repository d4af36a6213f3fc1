"""One rank of one method: trains when the benchmark says so, and reports.

Started by throughput.py and scaling.py.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import models
import torch
from methods import Choice, Method, Trainer
from probes import METHODS_AND_PROBES


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True, help="where the benchmark listens")
    parser.add_argument("--model", choices=models.MODELS, required=True)
    parser.add_argument("--method", choices=METHODS_AND_PROBES, required=True)
    parser.add_argument("--delay-steps", type=int, required=True)
    parser.add_argument("--overlap-steps", type=int, required=True)
    return parser.parse_args()


def start_engine(method: Method) -> int:
    """Bring up what the method communicates with; returns the rank."""
    if method.engine == "horovod":
        import horovod.torch as hvd

        hvd.init()
        return int(hvd.rank())
    if method.launcher == "torchrun":
        torch.distributed.init_process_group("gloo")
        return int(torch.distributed.get_rank())
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def timed(run: Any) -> dict[str, float]:
    began, used = time.monotonic(), time.process_time()
    run()
    return {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}


def serve(connection: Connection, trainer: Trainer) -> None:
    while True:
        command, units = connection.recv()
        if command == "stop":
            return
        if command == "prepare":
            report: dict[str, Any] = timed(trainer.prepare)
        else:
            report = timed(partial(trainer.run, units))
        schedule = {"unit": trainer.steps_per_unit, "settings": trainer.settings}
        connection.send({**report, **schedule, "step_seconds": trainer.step_seconds})


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    method = METHODS_AND_PROBES[arguments.method]
    rank = start_engine(method)
    problem = models.make(arguments.model, rank)
    trainer = method.build(problem, Choice(arguments.delay_steps, arguments.overlap_steps))
    parameters = sum(p.numel() for p in problem.model.parameters())
    with Client(arguments.socket, "AF_UNIX") as connection:
        connection.send(
            {
                "method": arguments.method,
                "rank": rank,
                "pid": os.getpid(),
                "batch_size": problem.batch_size,
                "parameters": parameters,
            }
        )
        serve(connection, trainer)
    # Engines of ranks that were stopped for minutes do not always shut down in good order.
    os._exit(0)


if __name__ == "__main__":
    main()
