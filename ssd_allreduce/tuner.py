"""``delay_steps="auto"``: measures steps and transfers, and changes the period on all ranks at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ssd_allreduce.autotune import Costs, choose_period
from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.training import Training

_logger = logging.getLogger("ssd_allreduce")
_FIRST_CORRECTION = 4
"""Periods after which the first choice, made before a transfer beside steps was seen, is looked at again."""


class Tuner:
    """Decides when to measure, by the number of sync events, which all ranks share.

    Measuring takes place between two periods, after a sync event that is waited for at once: the steps of
    the periods before tell what computation costs, and one sync event without a step what a transfer costs.

    Args:
        training: the parts.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._automatic = training.settings.automatic
        self._next_event: int | None = None
        self._measurements = 0

    def begin(self) -> None:
        """The delay stage begins: look at its first period."""
        if self._automatic is not None and self._next_event is None and self._measurements == 0:
            self._next_event = self._training.schedule.events + 1

    def export_state(self) -> dict[str, int | None]:
        """When to measure next, for a checkpoint; the same on all ranks."""
        return {"next_event": self._next_event, "measurements": self._measurements}

    def import_state(self, state: dict[str, int | None]) -> None:
        """Undo :meth:`export_state`."""
        self._next_event, self._measurements = state["next_event"], int(state["measurements"] or 0)

    def _plan_next(self) -> None:
        assert self._automatic is not None
        periods = self._automatic.periods
        if self._measurements == 1:
            self._next_event = self._training.schedule.events + _FIRST_CORRECTION
        else:
            self._next_event = self._training.schedule.events + periods if periods else None

    @property
    def is_due(self) -> bool:
        """Whether the sync event that has just been issued is the one to measure after."""
        schedule = self._training.schedule
        return self._next_event is not None and schedule.position == 0 and schedule.events >= self._next_event

    def tune_if_due(self, empty_event: Callable[[], None]) -> None:
        """Measure and choose, if it is time. Collective then.

        Args:
            empty_event: sends and completes a sync event without a step.
        """
        if not self.is_due or self._training.schedule.in_flight:
            return
        self._next_event = None
        costs = self._measure(empty_event)
        assert self._automatic is not None
        if costs.compute == 0.0:
            # No rank has made a step to measure.
            self._next_event = self._training.schedule.events + 1
            return
        delay_steps, overlap_steps = choose_period(costs, self._automatic.limits)
        self._training.set_period(delay_steps, overlap_steps)
        self._measurements += 1
        self._plan_next()
        if self._training.rank == 0:
            _logger.info(
                "a step computes for %.4f s, an allreduce of all tensors takes %.4f s and %.4f s of "
                "processor, a global update %.4f s (slowest rank); steps beside an allreduce waited for "
                "one of %.4f s (0: for none): delay_steps=%d, overlap_steps=%d",
                costs.compute,
                costs.transfer,
                costs.processor,
                costs.update,
                costs.transfer_beside_steps,
                delay_steps,
                overlap_steps,
            )

    def _measure(self, empty_event: Callable[[], None]) -> Costs:
        transport, stats = self._training.transport, self._training.stats
        compute, update = stats.recent_compute_seconds(), stats.recent_update_seconds()
        beside = stats.recent_transfer_seconds()
        # All ranks begin together, with nothing left to do, so that none takes another's delay, or its own
        # device's, for the network's.
        stats.clock.settle()
        transport.reduce_now(torch.zeros(1, dtype=torch.float64), "tuning.begin", ReduceOp.SUM)
        began, used = time.monotonic(), time.process_time()
        empty_event()
        stats.clock.settle()
        transfer, processor = time.monotonic() - began, time.process_time() - used
        if stats.clock.spares_the_host:
            # What the transfer takes from the host's processor, it does not take from the steps.
            processor = 0.0
        # A rank that is early waits for the others, not for the network: the shortest wait counts.
        own = torch.tensor([compute, transfer, processor, update, -beside], dtype=torch.float64)
        compute, transfer, processor, update, beside = transport.reduce_now(
            own, "tuning.costs", ReduceOp.MAX
        ).tolist()
        return Costs(compute, transfer, processor, update, transfer_beside_steps=-beside)
