"""Run under a launcher by ``test_resume_elsewhere.py``: trains and saves, or loads in a new process.

    resume.py save FOLDER              trains, saving after some steps and after a flush
    resume.py load FOLDER              continues every saved state, on as many ranks
    resume.py load-elsewhere FOLDER    continues rank 0's states on another number of ranks

Each rank writes what it found to ``FOLDER/<mode>.<rank>.json``: a list of complaints for each case.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoints import RULES, STEPS, Run, settings_of
from problems import gradient_of, perceptron, regression_loss, weights_of
from ranks import hvd
from simulation import Options, Simulation
from support import bits, on_every_rank

STOPPED_AT = (2, 5, 7, 8, 9)
"""In warm-up, in mid-period, at a sync point, in flight, at a completion."""
FLUSHED_AT = 12
OVERLAP_STEPS = 2
OTHER_SEED = 7


def make_run(rule: str, seed: int = 1) -> Run:
    return Run(settings_of(rule, OVERLAP_STEPS), seed=seed, dtype=torch.float64)


def save(folder: Path) -> dict[str, list[str]]:
    rank = hvd.rank()
    for rule in RULES:
        run = make_run(rule)
        for step in range(1, STEPS + 1):
            run.train(step)
            if step in STOPPED_AT:
                (folder / f"{rule}-{step}.{rank}.pt").write_bytes(run.save())
        (folder / f"{rule}.{rank}.history").write_bytes(pickle.dumps(run.history))

        flushed = make_run(rule)
        flushed.train(FLUSHED_AT)
        flushed.optimizer.flush()
        if rank == 0:
            (folder / f"{rule}-flushed.pt").write_bytes(flushed.save())
        flushed.train(STEPS)
        (folder / f"{rule}-flushed.{rank}.history").write_bytes(pickle.dumps(flushed.history))
    return {"saved": []}


def load(folder: Path) -> dict[str, list[str]]:
    found = {}
    for rule in RULES:
        for step in STOPPED_AT:
            saved = (folder / f"{rule}-{step}.{hvd.rank()}.pt").read_bytes()
            history = pickle.loads((folder / f"{rule}.{hvd.rank()}.history").read_bytes())
            found[f"{rule}-{step}"] = compare(rule, saved, history)
        saved = (folder / f"{rule}-flushed.pt").read_bytes()
        history = pickle.loads((folder / f"{rule}-flushed.{hvd.rank()}.history").read_bytes())
        found[f"{rule}-flushed"] = compare(rule, saved, history)
    return found


def compare(rule: str, saved: bytes, history: dict[int, list[bytes]]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = make_run(rule, seed=OTHER_SEED)
        resumed.load(saved)
        start = resumed.step
        resumed.train(STEPS)
    complaints = [f"warned: {warning.message}" for warning in caught]
    complaints += [
        f"step {step} differs"
        for step in range(start + 1, STEPS + 1)
        if resumed.history[step] != history[step]
    ]
    return complaints


def load_elsewhere(folder: Path) -> dict[str, list[str]]:
    found = {}
    for rule in RULES:
        for state in (*STOPPED_AT, "flushed"):
            path = folder / f"{rule}-{state}.pt"
            saved = (path if path.exists() else folder / f"{rule}-{state}.0.pt").read_bytes()
            found[f"{rule}-{state}"] = continue_elsewhere(rule, saved)
    return found


def continue_elsewhere(rule: str, saved: bytes) -> list[str]:
    """Global weights and state are those that were saved; training goes on by the formulas."""
    complaints = []
    resumed = make_run(rule, seed=OTHER_SEED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load(saved)
        start, weights = resumed.step, weights_of(resumed.model)
        expected = simulate_elsewhere(rule, resumed)
        resumed.train(start + 8)
        resumed.optimizer.flush()
    texts = [str(warning.message) for warning in caught]
    if len(texts) != 1 or "rank 0 of 2" not in texts[0] or "new period begins" not in texts[0]:
        complaints.append(f"warned {texts} instead of once of a new period")
    content = torch.load(io.BytesIO(saved), weights_only=False)
    model = perceptron()
    model.load_state_dict(content["model"])
    if not np.array_equal(weights, weights_of(model)):
        complaints.append("the model does not hold the saved global weights")
    mine = bits(resumed.model.parameters())
    if on_every_rank(mine) != [mine] * hvd.size():
        complaints.append("weights differ between ranks after a flush")
    if expected is not None and not np.allclose(
        weights_of(resumed.model), expected.weights, rtol=1e-9, atol=1e-12
    ):
        complaints.append("training did not go on from the saved global weights and momentum")
    return complaints


def simulate_elsewhere(rule: str, resumed: Run) -> Simulation | None:
    """What the next eight steps and a flush lead to, for rules without a correction to carry over."""
    if rule not in ("momentum", "none"):
        return None
    start = resumed.step
    warmup_steps = max(0, resumed.settings["warmup_steps"] - start)
    local = gradient_of(perceptron(), regression_loss)
    settings = {**resumed.settings, "warmup_steps": warmup_steps}
    simulation = Simulation(
        weights_of(resumed.model),
        hvd.size(),
        lambda rank, step, weights: local(rank, step + start, weights),
        lambda step: Options(0.05 * 0.97 ** (step + start), 0.9, 0.01),
        **settings,
    )
    momenta = [resumed.optimizer.state[p]["momentum_buffer"] for p in resumed.model.parameters()]
    simulation.momentum = torch.cat([m.reshape(-1) for m in momenta]).numpy().copy()
    for rank in simulation.ranks:
        rank.momentum = simulation.momentum
    simulation.run([8] * hvd.size())
    return simulation


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    found = {"save": save, "load": load, "load-elsewhere": load_elsewhere}[mode](folder)
    (folder / f"{mode}.{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
