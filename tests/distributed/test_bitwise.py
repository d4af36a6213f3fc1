"""``delay_steps=1`` and the warm-up stage are plain Horovod, bit for bit, and global state is one state.

From three ranks on Horovod's fusion depends on timing, so that it does not equal itself; it is off there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from problems import cnn, image_loss
from support import bits, on_every_rank, wrap
from torch import Tensor, nn

pytestmark = [
    pytest.mark.ranks("mpirun", 2),
    pytest.mark.ranks("mpirun", 3, 4, env={"HOROVOD_FUSION_THRESHOLD": "0"}),
    pytest.mark.ranks("horovodrun-gloo", 2),
    pytest.mark.ranks("horovodrun-gloo", 3, 4, env={"HOROVOD_FUSION_THRESHOLD": "0"}),
    pytest.mark.ranks("horovodrun-mpi", 2),
]

STEPS = 50
Scheduler = torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Variant:
    """One way of training: options of SGD, options of ``hvd.DistributedOptimizer``, a scheduler."""

    sgd: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    horovod: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Scheduler] | None = None
    two_param_groups: bool = False


def one_cycle(optimizer: torch.optim.Optimizer) -> Scheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)


VARIANTS = {
    "plain": Variant(sgd={"lr": 0.05}),
    "momentum": Variant(),
    "weight_decay": Variant(sgd={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "nesterov": Variant(sgd={"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "dampening_and_maximize": Variant(sgd={"lr": 0.001, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "number_of_groups": Variant(groups=lambda model: 2),
    "list_of_groups": Variant(groups=lambda model: [list(model.parameters())[:3]]),
    "predivide_factor": Variant(horovod={"gradient_predivide_factor": 2.0}),
    "fp16_compression": Variant(horovod={"compression": hvd.Compression.fp16}),
    "sum": Variant(sgd={"lr": 0.02, "momentum": 0.9}, horovod={"op": hvd.Sum}),
    "two_backward_passes": Variant(horovod={"backward_passes_per_step": 2}),
    "scheduler": Variant(scheduler=one_cycle),
    "two_param_groups": Variant(two_param_groups=True),
}

ON_THE_WIRE = (
    "momentum",
    "weight_decay",
    "number_of_groups",
    "list_of_groups",
    "predivide_factor",
    "fp16_compression",
)
"""Variants to try with every launcher and number of ranks, above all those that change what is sent."""


def on_two_ranks(test: Callable[..., None]) -> Callable[..., None]:
    for launcher in ("mpirun", "horovodrun-gloo"):
        test = pytest.mark.ranks(launcher, 2)(test)
    return test


class Trained:
    """A CNN that this rank trains, and how."""

    def __init__(
        self, variant: Variant, wrap_again: Callable[[Any, nn.Module], Any], horovod: bool = True
    ) -> None:
        self.model = cnn()
        self.passes = variant.horovod.get("backward_passes_per_step", 1)
        parameters: Any = list(self.model.parameters())
        if variant.two_param_groups:
            parameters = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "momentum": 0.5}]
        self.optimizer: Any = torch.optim.SGD(parameters, **variant.sgd)
        if horovod:
            options = dict(variant.horovod)
            if variant.groups is not None:
                options["groups"] = variant.groups(self.model)
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters(), **options
            )
        self.optimizer = wrap_again(self.optimizer, self.model)
        self.scheduler = variant.scheduler(self.optimizer) if variant.scheduler else None

    def make_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for index in range(self.passes):
            image_loss(self.model, hvd.rank(), self.passes * step + index).backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Weights, the gradients that step() leaves, and the state of the base optimizer."""
        for name, parameter in self.model.named_parameters():
            yield f"{name}", parameter
            yield f"the gradient of {name}", parameter.grad
            yield f"the momentum of {name}", self.optimizer.state[parameter].get("momentum_buffer")


def assert_same_training(plain: Trained, others: dict[str, Trained]) -> None:
    start = bits(plain.model.parameters())
    for step in range(STEPS):
        plain.make_step(step)
        for name, other in others.items():
            other.make_step(step)
            for (what, wanted), (_, actual) in zip(plain.tensors(), other.tensors(), strict=True):
                same = wanted is actual is None or torch.equal(wanted, actual)  # type: ignore[arg-type]
                assert same, f"{name}: {what} differs after step {step}"
    assert bits(plain.model.parameters()) != start


def same(optimizer: Any, model: nn.Module) -> Any:
    return optimizer


def with_settings(**settings: Any) -> Callable[[Any, nn.Module], Any]:
    return lambda optimizer, model: wrap(optimizer, **settings)


SYNCHRONOUS = {
    "delay_steps=1": {"delay_steps": 1},
    "warm-up": {"delay_steps": 4, "overlap_steps": 2, "warmup_steps": STEPS},
}


def assert_equals_plain_horovod(variant: Variant) -> None:
    others = {name: Trained(variant, with_settings(**s)) for name, s in SYNCHRONOUS.items()}
    assert_same_training(Trained(variant, same), others)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ON_THE_WIRE)
def test_synchronous_training_equals_plain_horovod(variant: str) -> None:
    assert_equals_plain_horovod(VARIANTS[variant])


@on_two_ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(ON_THE_WIRE)))
def test_options_that_every_launcher_treats_alike_equal_plain_horovod(variant: str) -> None:
    assert_equals_plain_horovod(VARIANTS[variant])


@on_two_ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", ["momentum", "fp16_compression", "two_backward_passes"])
def test_bare_optimizer_equals_plain_horovod(variant: str) -> None:
    chosen = VARIANTS[variant]

    def bare(**settings: Any) -> Callable[[Any, nn.Module], Any]:
        options = {**settings, **chosen.horovod}
        return lambda optimizer, model: wrap(optimizer, named_parameters=model.named_parameters(), **options)

    others = {name: Trained(chosen, bare(**s), horovod=False) for name, s in SYNCHRONOUS.items()}
    assert_same_training(Trained(chosen, same), others)


@on_two_ranks
@pytest.mark.timeout(120)
def test_gradients_sent_from_step_equal_plain_horovod() -> None:
    chosen = VARIANTS["momentum"]
    others = {
        name: Trained(chosen, with_settings(issue="step", **settings))
        for name, settings in SYNCHRONOUS.items()
    }
    assert_same_training(Trained(chosen, same), others)


RULES = {
    "momentum": {"glu": "momentum"},
    "gradient": {"glu": "gradient", "beta": 0.5},
    "displacement": {"glu": "displacement", "beta": 0.3, "local_lr_scale": 0.5},
    "none": {"glu": "none"},
}
WIRES = {
    "as_it_is": Variant(sgd={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "fp16": Variant(horovod={"compression": hvd.Compression.fp16}),
    "groups": Variant(groups=lambda model: 2),
}


STATES = [(rule, overlap_steps, "as_it_is") for rule in RULES for overlap_steps in (0, 1, 3)]
STATES += [("momentum", 1, "fp16"), ("momentum", 1, "groups")]


@pytest.mark.parametrize(("rule", "overlap_steps", "wire"), STATES)
def test_global_weights_and_state_are_equal_on_all_ranks(rule: str, overlap_steps: int, wire: str) -> None:
    settings = {"delay_steps": 4, "overlap_steps": overlap_steps, "warmup_steps": 2, **RULES[rule]}
    trained = Trained(WIRES[wire], with_settings(**settings))
    history = []
    for step in range(16):
        trained.make_step(step)
        with trained.optimizer.global_weights():
            history.append(bits(state for _, state in global_tensors(trained)))

    assert on_every_rank(history) == [history] * hvd.size()
    changed = [step for step in range(1, 16) if history[step] != history[step - 1]]
    assert changed == [1, *(step for step in range(5 + overlap_steps, 16, 4))]


def global_tensors(trained: Trained) -> Iterator[tuple[str, Tensor]]:
    for what, tensor in trained.tensors():
        if "gradient" not in what and tensor is not None:
            yield what, tensor
