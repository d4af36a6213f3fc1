"""The simulation that other tests take their expectations from reproduces the reference trajectories."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Options, Simulation, Vector
from test_vectors import FOLDER, load

SGD_VECTORS = sorted(
    path.stem for path in FOLDER.glob("*.json") if load(path.stem)["case"]["optimizer"]["name"] == "sgd"
)
SETTINGS = ("delay_steps", "overlap_steps", "warmup_steps", "glu", "alpha", "beta", "local_lr_scale")


@pytest.mark.parametrize("vector", SGD_VECTORS)
def test_simulation_reproduces_vector(vector: str) -> None:
    content = load(vector)
    case, expected = content["case"], content["expected"]
    features, targets = np.array(content["features"]), np.array(content["targets"])
    hyper = {k: v for k, v in case["optimizer"].items() if k in ("momentum", "weight_decay")}

    def gradient(rank: int, step: int, weights: Vector) -> Vector:
        x, y = features[step, rank], targets[step, rank]
        result: Vector = x.T @ (x @ weights - y) / len(y)
        return result

    simulation = Simulation(
        np.array(content["start"]),
        case["workers"],
        gradient,
        lambda step: Options(lr=case["lr"] * case["lr_decay"] ** step, **hyper),
        nesterov=case["optimizer"].get("nesterov", False),
        **{
            name: case[name]
            for name in (
                "delay_steps",
                "overlap_steps",
                "warmup_steps",
                "glu",
                "alpha",
                "beta",
                "local_lr_scale",
            )
            if name in case
        },
    )
    simulation.run([case["steps"]] * case["workers"], flush=False)

    for number, rank in enumerate(simulation.ranks):
        local = [steps[number] for steps in expected["local"]]
        np.testing.assert_allclose(rank.local_history, local, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(rank.global_history, expected["global"], rtol=1e-9, atol=1e-12)
