"""Reference trajectories in float64 of all rules, reproduced on as many ranks as they have workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_plan import PARAMETER, make_launches
from ranks import hvd
from support import RecordingCommunicator, is_gradient, wrap
from torch import Tensor

from ssd_allreduce import ops

FOLDER = Path(__file__).parents[1] / "vectors"
LAUNCHES = [
    ("mpirun", "compiled"),
    ("mpirun", "reference"),
    ("mpirun-mpi4py", "compiled"),
    ("torchrun", "compiled"),
]
TOLERANCE = 1e-9
SMALLEST_SCALE = 1e-3


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each vector on its own number of ranks, with the extension and with its fallback."""
    pairs = []
    for launcher, kernels in LAUNCHES:
        for name in sorted(path.stem for path in FOLDER.glob("*.json")):
            ranks = load(name)["case"]["workers"]
            (launch,) = make_launches(launcher, ranks, env={"SSD_ALLREDUCE_KERNELS": kernels})
            pairs.append(pytest.param(launch, name, id=f"{launch}-{name}"))
    metafunc.parametrize((PARAMETER, "vector"), pairs, indirect=[PARAMETER])


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "horovod_wrapped"])
@pytest.mark.parametrize("issue", ["backward", "step"])
def test_trajectory_is_reproduced(vector: str, issue: str, wrapped: bool, launch: object) -> None:
    content = load(vector)
    case, expected = content["case"], content["expected"]
    assert hvd.size() == case["workers"]
    assert f"-{ops.IMPLEMENTATION}" in str(launch)

    trained = Trained(content, issue, wrapped)
    for step in range(case["steps"]):
        communicated = trained.make_step(step)
        assert communicated == expected["communicated"][step], f"step {step}"
        assert_close(trained.weights, expected["local"][step][hvd.rank()], f"local weights, step {step}")
        with trained.optimizer.global_weights():
            assert_close(trained.weights, expected["global"][step], f"global weights, step {step}")


class Trained:
    """The least-squares problem of a vector, trained by the optimizer under test."""

    def __init__(self, content: dict[str, Any], issue: str, wrapped: bool) -> None:
        self.case = case = content["case"]
        self.features = torch.tensor(content["features"], dtype=torch.float64)[:, hvd.rank()]
        self.targets = torch.tensor(content["targets"], dtype=torch.float64)[:, hvd.rank()]
        self.weights = torch.nn.Parameter(torch.tensor(content["start"], dtype=torch.float64))
        self.communicator = RecordingCommunicator()
        named = [("weights", self.weights)]
        options = {name: case[name] for name in ("alpha", "beta", "local_lr_scale") if name in case}
        optimizer: torch.optim.Optimizer = make_base_optimizer([self.weights], case)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        else:
            options["named_parameters"] = named
        self.optimizer = wrap(
            optimizer,
            delay_steps=case["delay_steps"],
            overlap_steps=case["overlap_steps"],
            warmup_steps=case["warmup_steps"],
            glu=case["glu"],
            issue=issue,
            communicator=self.communicator,
            **options,
        )

    def make_step(self, step: int) -> bool:
        """Returns whether gradients were handed to the engine; at most once in a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.case["lr"] * self.case["lr_decay"] ** step
        self.optimizer.zero_grad()
        error = self.features[step] @ self.weights - self.targets[step]
        (0.5 * (error**2).mean()).backward()
        self.optimizer.step()
        count = sum(map(is_gradient, self.communicator.take_names()))
        assert count in (0, 1)
        return count == 1


def make_base_optimizer(parameters: list[Tensor], case: dict[str, Any]) -> torch.optim.Optimizer:
    options = dict(case["optimizer"])
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = classes[options.pop("name")]
    return kind(parameters, lr=case["lr"], **options)  # type: ignore[no-any-return]


def assert_close(actual: Tensor, expected: list[float], what: str) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    error = (actual.detach() - wanted).abs() / wanted.abs().clamp_min(SMALLEST_SCALE)
    assert error.max().item() <= TOLERANCE, f"{what}: {actual.tolist()} instead of {expected}"
