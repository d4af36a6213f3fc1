"""A model that this rank trains with the optimizer under test, and its comparison with the simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from problems import Loss, flat, gradient_of, perceptron, regression_loss, weights_of
from ranks import hvd
from simulation import Gradient, Options, Simulation, Vector
from support import RecordingCommunicator, wrap
from torch import nn

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SETTINGS = {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": 2}
STEPS = 16


class Training:
    """Three optimizer objects on one model: the user's, Horovod's around it, and the one under test.

    Args:
        make_model: makes the model, the same on all ranks.
        loss: the loss of one step.
        sgd: options of the user's optimizer.
        horovod: options of Horovod's wrapper; None for a bare optimizer.
        between: called with the user's optimizer and Horovod's before they are wrapped.
        settings: options of the optimizer under test.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module] = perceptron,
        loss: Loss = regression_loss,
        sgd: dict[str, Any] = SGD,
        horovod: dict[str, Any] | None = None,
        before_wrapping: Callable[[Training], object] = lambda training: None,
        **settings: Any,
    ) -> None:
        self.model = make_model()
        self.loss = loss
        self.communicator = settings.pop("communicator", None) or RecordingCommunicator()
        self.user = torch.optim.SGD(self.model.parameters(), **sgd)
        self.horovod = self.user
        names: dict[str, Any] = {"named_parameters": self.model.named_parameters()}
        if horovod is not None:
            self.horovod = hvd.DistributedOptimizer(self.user, **names, **horovod)
            names = {}
        before_wrapping(self)
        options = {**SETTINGS, **settings, **names, "communicator": self.communicator}
        self.optimizer = wrap(self.horovod, **options)
        self.local_history: list[Vector] = []
        self.global_history: list[Vector] = []

    @property
    def steps(self) -> int:
        return len(self.local_history)

    def backward(self) -> torch.Tensor:
        loss = self.loss(self.model, hvd.rank(), self.steps)
        loss.backward()
        return loss

    def record(self) -> None:
        self.local_history.append(weights_of(self.model))
        with self.optimizer.global_weights():
            self.global_history.append(weights_of(self.model))

    def make_step(self, edit: Callable[[], object] = lambda: None) -> None:
        """One turn of the usual loop; ``edit`` is called between backward and step."""
        self.optimizer.zero_grad()
        self.backward()
        edit()
        self.optimizer.step()
        self.record()

    def train(self, steps: int = STEPS) -> Training:
        for _ in range(steps):
            self.make_step()
        return self

    def assert_follows(
        self, simulation: Simulation, tolerance: float = 1e-9, rank_in_simulation: int | None = None
    ) -> None:
        """Local and global weights after every step are the simulated ones."""
        rank = simulation.ranks[hvd.rank() if rank_in_simulation is None else rank_in_simulation]
        assert self.steps == len(rank.local_history) > 0
        for step in range(self.steps):
            for what, mine, expected in (
                ("local", self.local_history, rank.local_history),
                ("global", self.global_history, rank.global_history),
            ):
                np.testing.assert_allclose(
                    mine[step],
                    expected[step],
                    rtol=tolerance,
                    atol=tolerance / 1e3,
                    err_msg=f"{what} weights after step {step}",
                )


def simulate(
    steps: int = STEPS,
    make_model: Callable[[], nn.Module] = perceptron,
    loss: Loss = regression_loss,
    gradient: Gradient | None = None,
    options: Callable[[int], Options] = lambda step: Options(**SGD),
    start: Vector | None = None,
    ranks: int | None = None,
    **settings: Any,
) -> Simulation:
    """What :class:`Training` with the same arguments should do, by the formulas."""
    simulation = Simulation(
        weights_of(make_model()) if start is None else start,
        hvd.size() if ranks is None else ranks,
        gradient or gradient_of(make_model(), loss),
        options,
        **{**SETTINGS, **settings},
    )
    simulation.run([steps] * len(simulation.ranks), flush=False)
    return simulation


def no_gradient_left(model: nn.Module) -> bool:
    return not flat((p.grad for p in model.parameters()), model.parameters()).any()
