"""One rank: training is the base optimizer's own, step for step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ssd_allreduce import checkpoint
from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.clipping import clip_gradients
from ssd_allreduce.errors import UsageError
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.schedule import Schedule
from ssd_allreduce.settings import Settings
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.verdict import Contribution, contributes


class SingleProcess:
    """Stands in for the coordinator where there is nobody to communicate with.

    Args:
        parameters: the trained parameters.
        base: the user's optimizer.
        settings: what the user chose, of which warm-up and clipping matter here.
        stats: where steps are counted.
    """

    def __init__(
        self,
        parameters: Parameters,
        base: BaseOptimizer,
        settings: Settings,
        stats: StatsRecorder,
    ) -> None:
        self.parameters = parameters
        self._base = base
        self._stats = stats
        self._max_grad_norm = settings.max_grad_norm
        self.schedule = Schedule(settings.warmup_steps, delay_steps=1, overlap_steps=0)
        self._inside_global_weights = False

    needs_synchronize = False

    def step(self, contribute: Contribution = True, scaler: bool = False) -> None:
        """The base optimizer's own step, left out after an overflow."""
        if self._inside_global_weights:
            raise UsageError("step() is refused inside global_weights(). Leave the context first.")
        self._base.discard_materialised_state()
        # The user's optimizer is stepped or not: no kernel of ours could look at the device's own number.
        if contributes(contribute):
            if self._max_grad_norm is not None:
                stepped = [parameter for group in self._base.groups for parameter in group["params"]]
                clip_gradients(stepped, self._max_grad_norm)
            self._base.step()
        self._stats.step()
        self.schedule.advance()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def flush(self) -> bool:
        """Local weights are the global ones. Returns whether other parameters are trainable now."""
        self.parameters.refuse_edits("flush()")
        return self.parameters.have_changed()

    def adopt_weights(self) -> None:
        """Local weights are the global ones."""

    def before_zero_grad(self) -> None:
        """Zeroing is always allowed: nothing has been sent."""

    def refuse_load(self) -> None:
        """Raise if a checkpoint cannot be loaded now."""
        if self._inside_global_weights:
            raise UsageError("load_state_dict() is refused inside global_weights(). Leave it first.")

    def optimizer_state_loaded(self) -> None:
        """Nothing depends on the state."""

    @contextmanager
    def holding_global_weights(self) -> Iterator[None]:
        """The model always holds the global weights."""
        outer = self._inside_global_weights
        self._inside_global_weights = True
        try:
            yield
        finally:
            self._inside_global_weights = outer

    def export_checkpoint(self) -> dict[str, Any]:
        """The entry for ``state_dict()``."""
        return checkpoint.global_entry(
            self.parameters.names, self.parameters.tensors, self.schedule, rank=0, size=1
        )

    def load_checkpoint(self, entry: dict[str, Any] | None) -> None:
        """Take over global weights and progress."""
        if entry is None:
            return
        with torch.no_grad():
            torch._foreach_copy_(self.parameters.tensors, entry["global_weights"])
        self.schedule.load_progress(entry["schedule"])
        self.schedule.restart_period()
        if entry["size"] != 1:
            checkpoint.warn_of_new_period(entry, rank=0, size=1)

    def linger(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """No hooks to remove."""
