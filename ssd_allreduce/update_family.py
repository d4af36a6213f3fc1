"""What the algorithm needs to know of a class of base optimizers."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.group_options import StepOptions, is_number
from ssd_allreduce.ops import Correction
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.settings import Settings

if TYPE_CHECKING:
    from ssd_allreduce.compensation import LocalRule


@dataclass(frozen=True)
class Replay:
    """One global update: the same mean gradient, once for each step that any rank made.

    Attributes:
        sums: gradients summed over ranks and steps.
        squares: squared gradients summed likewise, where the family needs them.
        contributions: number of gradients in each sum (n).
        gradient_scale: factor on the mean: the world size where the user chose ``op=Sum``, and what
            clipping asks for.
        steps: the options of each step.
        counts: ranks that contributed to each step.
        corrections: tensors that receive what the GLU rule reads, if it does.
        correction: what they receive.
    """

    sums: Sequence[Tensor]
    squares: Sequence[Tensor] | None
    contributions: int
    gradient_scale: float
    steps: Sequence[StepOptions]
    counts: Sequence[int]
    corrections: Sequence[Tensor] | None
    correction: Correction

    @property
    def divisor(self) -> float:
        """What the sums are divided by to give the gradient of the global update."""
        # Clipping scales by 0 where the norm is infinite; sums over inf give what torch's clipping does.
        return self.contributions / self.gradient_scale if self.gradient_scale else math.inf


class Family(abc.ABC):
    """One kind of base optimizer.

    Args:
        base: the user's optimizer.
        parameters: the trained parameters.
    """

    needs_squares = False
    """Whether squared gradients have to be accumulated and reduced too."""
    reads_lr = True
    """Whether the momentum rule and the replay read the groups' learning rates."""

    def __init__(self, base: BaseOptimizer, parameters: Parameters) -> None:
        self.base = base
        self.parameters = parameters

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:  # noqa: B027
        """Refuse options of param groups, present or to be loaded, that cannot be honoured.

        Raises:
            ValueError: naming the option and what is allowed.
        """

    def check(self, settings: Settings) -> None:
        """Refuse options that cannot be honoured.

        Raises:
            ValueError: naming the option, what is allowed and what to do.
        """
        self.check_groups(self.base.groups)
        if self.reads_lr or settings.glu != "momentum":
            self._check_learning_rates(settings)
        if self.needs_squares and settings.warmup_steps < 1 and settings.delay_steps > 1:
            raise ValueError(
                f"warmup_steps={settings.warmup_steps} with {self.base.kind.__name__}: its second moment has "
                "to start from synchronous steps. Allowed: at least 1; a few hundred are usual."
            )

    def _check_learning_rates(self, settings: Settings) -> None:
        for index in dict.fromkeys(self.parameters.group_of):
            lr = self.base.groups[index].get("lr")
            if not is_number(lr):
                raise ValueError(
                    f"param_groups[{index}] has lr={lr!r}, and glu={settings.glu!r} makes its local steps "
                    f"with {self.base.kind.__name__}'s learning rate. Allowed: a number under 'lr' in each "
                    "group; glu='momentum' leaves local steps to the optimizer's own code where it is not "
                    "torch's SGD, Adam or AdamW."
                )

    @abc.abstractmethod
    def replay(self, weights: Sequence[Tensor], replay: Replay) -> None:
        """Run the base optimizer on the global weights, its state being the base optimizer's own."""

    @abc.abstractmethod
    def momentum_rule(self, gradient_scale: float) -> LocalRule:
        """The rule ``glu="momentum"``: the base optimizer's own update on the local weights."""

    @abc.abstractmethod
    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """State equal in effect to none, with every entry that the first step would create."""
