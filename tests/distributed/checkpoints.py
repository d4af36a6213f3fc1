"""A training run that can be saved after any step and continued elsewhere, for the tests of resuming."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from typing import Any

import torch
from problems import perceptron, regression_loss
from ranks import hvd
from support import bits, wrap
from torch import nn

WARMUP_STEPS = 3
DELAY_STEPS = 4
STEPS = 16
"""The warm-up, three periods, and one step more."""
RULES: dict[str, dict[str, Any]] = {
    "momentum": {"glu": "momentum"},
    "gradient": {"glu": "gradient", "alpha": 0.5, "beta": 0.5},
    "displacement": {"glu": "displacement", "beta": 0.3, "local_lr_scale": 0.5},
    "none": {"glu": "none"},
}


def settings_of(rule: str, overlap_steps: int) -> dict[str, Any]:
    return {
        "delay_steps": DELAY_STEPS,
        "overlap_steps": overlap_steps,
        "warmup_steps": WARMUP_STEPS,
        **RULES[rule],
    }


@dataclass
class Run:
    """The training of this rank's perceptron, with a scheduler, as a script would set it up.

    Attributes:
        settings: options of the optimizer under test.
        sgd: options of the base optimizer.
        horovod: options of Horovod's wrapper.
        seed: of the model's first weights.
    """

    settings: dict[str, Any]
    sgd: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
    horovod: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.model: nn.Module = perceptron(self.dtype, self.seed)
        base = torch.optim.SGD(self.model.parameters(), **self.sgd)
        wrapped = hvd.DistributedOptimizer(
            base, named_parameters=self.model.named_parameters(), **self.horovod
        )
        self.optimizer = wrap(wrapped, **self.settings)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.97)
        self.step = 0
        self.history: dict[int, list[bytes]] = {}
        """Local weights after each step, global weights and momenta with them."""

    def train(self, until: int) -> None:
        while self.step < until:
            self.optimizer.zero_grad()
            regression_loss(self.model, hvd.rank(), self.step).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.history[self.step] = self.snapshot()

    def snapshot(self) -> list[bytes]:
        local = bits(self.model.parameters())
        return local + self.global_snapshot()

    def global_snapshot(self) -> list[bytes]:
        with self.optimizer.global_weights():
            weights = bits(self.model.parameters())
        state = [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters()]
        return weights + bits(tensor for tensor in state if tensor is not None)

    def save(self, order: str = "one after the other") -> bytes:
        """What a script would write to disk on this rank."""
        buffer = io.BytesIO()
        content: dict[str, Any] = {"scheduler": self.scheduler.state_dict(), "step": self.step}
        if order != "all inside":
            content["optimizer"] = self.optimizer.state_dict()
        with self.optimizer.global_weights():
            content["model"] = self.model.state_dict()
            if order == "one after the other":
                content["model"] = copy.deepcopy(content["model"])
            elif order == "all inside":
                content["optimizer"] = self.optimizer.state_dict()
                torch.save(content, buffer)
            else:
                assert order == "written inside"
                torch.save(content, buffer)
        if order == "one after the other":
            torch.save(content, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes, with_model: bool = True) -> None:
        content = torch.load(io.BytesIO(saved), weights_only=False)
        if with_model:
            self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])
        self.step = content["step"]
