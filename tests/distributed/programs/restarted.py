"""Run under ``torchrun`` with a restart: fails half-way the first time, and goes on from its checkpoint.

    restarted.py FOLDER never|once

Rank 0 writes the weights at the end to ``FOLDER/<when>.weights``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import perceptron, regression_loss

import ssd_allreduce as ssd

EPOCHS, STEPS_PER_EPOCH, FAILING_EPOCH = 4, 6, 2


def main() -> None:
    folder, when = Path(sys.argv[1]), sys.argv[2]
    fails = when == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    engine = ssd.choose_communicator("auto")
    model = perceptron()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = ssd.DistributedOptimizer(
        base,
        named_parameters=model.named_parameters(),
        delay_steps=4,
        warmup_steps=2,
        timeout=30.0,
        communicator=engine,
    )
    path = folder / f"{when}.pt"
    first_epoch = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epochs_done"]
    for epoch in range(first_epoch, EPOCHS):
        for step in range(STEPS_PER_EPOCH):
            if fails and (epoch, step, engine.rank) == (FAILING_EPOCH, 3, engine.size - 1):
                raise RuntimeError("this rank fails")
            optimizer.zero_grad()
            regression_loss(model, engine.rank, epoch * STEPS_PER_EPOCH + step).backward()
            optimizer.step()
        optimizer.flush()
        if engine.rank == 0:
            with optimizer.global_weights():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epochs_done": epoch + 1}, path)
    if engine.rank == 0:
        torch.save([parameter.detach() for parameter in model.parameters()], folder / f"{when}.weights")
        (folder / f"{when}.first_epoch").write_text(str(first_epoch))


if __name__ == "__main__":
    main()
