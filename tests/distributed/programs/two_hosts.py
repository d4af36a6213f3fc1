"""An allreduce between virtual hosts: prints this rank's host and how long it took."""

from __future__ import annotations

import json
import socket
import sys
import time

import torch

MEGABYTES = 4


def main(engine: str) -> None:
    tensor = torch.ones(MEGABYTES * 250_000)
    if engine == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, reduce = hvd.rank(), lambda: hvd.allreduce_(tensor, op=hvd.Sum)
    else:
        torch.distributed.init_process_group("gloo")
        rank, reduce = torch.distributed.get_rank(), lambda: torch.distributed.all_reduce(tensor)
    reduce()
    began = time.monotonic()
    reduce()
    seconds = time.monotonic() - began
    result = {"host": socket.gethostname(), "rank": rank, "seconds": seconds, "sum": tensor[0].item()}
    # In one write, or the ranks' lines mingle.
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    if engine != "horovod":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
