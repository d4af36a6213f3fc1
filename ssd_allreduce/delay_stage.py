"""The delay stage: local steps, sync points, and their completions."""

from __future__ import annotations

from typing import Any, TypeAlias

from ssd_allreduce import layout
from ssd_allreduce.accumulators import Sums
from ssd_allreduce.autotune import SHORTEST
from ssd_allreduce.clipping import clip_coefficient, clip_gradients
from ssd_allreduce.control import ControlResult, Failure
from ssd_allreduce.group_options import Row
from ssd_allreduce.ops import Accumulation
from ssd_allreduce.schedule import Stage, StepPlan
from ssd_allreduce.training import Training
from ssd_allreduce.tuner import Tuner
from ssd_allreduce.update_family import Replay
from ssd_allreduce.verdict import Contribution, Verdict, contributes, gate_of

Step: TypeAlias = tuple[Row, Contribution]
"""The options in force in a step, and whether this rank contributes to it."""


class DelayStage:
    """Makes periods of local steps, each ended by one asynchronous allreduce of what accumulated."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.period_steps: list[Step] = []
        """Each step of the current period."""
        self.steps_since_sync: list[Step] = []
        """The local steps made since the sync point in flight."""
        self._undecided: Verdict | None = None
        """Says of the last local step whether it has changed anything, until the host has to know."""
        self.tuner = Tuner(training)

    def step(self, plan: StepPlan, contribute: Contribution) -> None:
        """One local step; at a sync point also the sending, at a completion the global update."""
        training = self._training
        self._enter()
        row = training.own_options()
        if training.settings.max_grad_norm is not None or not training.rule.can_be_gated:
            # Clipping reads its norm on the host, and a step of the user's own optimizer is made or not.
            contribute = contributes(contribute)
        if contribute is not False:
            if training.settings.max_grad_norm is not None:
                clip_gradients(training.parameters.tensors, training.settings.max_grad_norm)
            self._local_step(row, contribute)
            if training.schedule.in_flight:
                self.steps_since_sync.append((row, contribute))
        self.period_steps.append((row, contribute))
        if plan.is_sync_point:
            self._issue(flushing=False)
        training.schedule.advance()
        tuning = self.tuner.is_due
        if plan.completes or tuning:
            self.complete(overlapped=plan.completes and training.schedule.overlap_steps > 0)
        if tuning:
            self.tuner.tune_if_due(self._empty_event)

    def _enter(self) -> None:
        model = self._training.global_model
        if model.weights is None:
            model.take_from_model()
            self._training.rule.seed(model)
            self.tuner.begin()

    def _local_step(self, row: Row, contribution: Contribution) -> None:
        self._settle_last_step()
        training, buffers = self._training, self._training.reducer.buffers
        by_hooks = training.reducer.accumulated_by_hooks
        gradients = [layout.zeros_like(p) if p.grad is None else p.grad for p in training.parameters.tensors]
        found_inf = gate_of(contribution)
        if found_inf is not None and buffers.empty:
            # Whether this step will overwrite what they hold, nobody knows yet.
            buffers.begin_with_zeros()
        with training.transport.tracer.span("local update"):
            training.rule.local_step(
                training.view(row),
                gradients,
                buffers.current,
                by_hooks,
                Accumulation.OVERWRITE if buffers.empty else Accumulation.ADD,
                found_inf,
            )
            if not training.rule.accumulates_squares:
                buffers.add_squares(gradients, by_hooks, found_inf)
        buffers.empty = False
        self._undecided = contribution if isinstance(contribution, Verdict) else None

    def _settle_last_step(self) -> None:
        """Have the rule count the last local step, or not.

        The next local step asks for it, and by then the device has that one's whole backward pass to make:
        it does not run dry while the host waits. Where the rule counts nothing, nobody waits.
        """
        verdict, self._undecided = self._undecided, None
        rule = self._training.rule
        if verdict is not None and rule.counted and not verdict.wait():
            rule.uncount()

    def known_steps(self) -> list[tuple[Row, bool]]:
        """Options of each step of the current period, and whether this rank contributed."""
        return [(row, contributes(contribution)) for row, contribution in self.period_steps]

    def contributed_since_sync(self) -> list[Row]:
        """Options of the local steps since the sync point in flight that this rank contributed to."""
        return [row for row, contribution in self.steps_since_sync if contributes(contribution)]

    def _issue(self, flushing: bool) -> None:
        training = self._training
        training.reducer.reduce_accumulators()
        # The host may have to wait for this step's backward here: the local update and the sums are on
        # their way, and only the row, which is made on the host, leaves later.
        training.control.send(
            training.schedule.events, training.schedule.delay_steps, self.known_steps(), flushing
        )
        self._settle_last_step()
        training.stats.sync_event()
        if training.schedule.overlap_steps > 0 and not flushing:
            training.rule.snapshot()
        self.period_steps = []
        self.steps_since_sync = []

    def complete(self, rebase: bool = True, overlapped: bool = False) -> ControlResult:
        """Wait for the sums in flight, update the global model and rebase the local weights on it.

        Args:
            rebase: whether the local weights follow.
            overlapped: whether the sums have travelled for all of their overlap steps.
        """
        training = self._training
        event = training.schedule.events - 1
        sums = training.reducer.finish_accumulators()
        result = training.control.receive(event, training.schedule.delay_steps)
        contributions = sum(result.counts)
        tracer = training.transport.tracer
        with training.stats.updating():
            if contributions:
                with tracer.span("replay"):
                    self._replay(result, sums, contributions)
            if rebase:
                with tracer.span("rebase"):
                    self._rebase(moved=contributions > 0)
        training.reducer.buffers.release()
        training.schedule.complete()
        training.stats.completed(event, overlapped, empty=not contributions)
        return result

    def _replay(self, result: ControlResult, sums: Sums, contributions: int) -> None:
        training = self._training
        scale = float(training.size) if training.sums_gradients else 1.0
        max_norm = training.settings.max_grad_norm
        if max_norm is not None:
            scale *= clip_coefficient(sums.gradients, scale / contributions, max_norm)
        made = [(row, count) for row, count in zip(result.options, result.counts, strict=True) if count]
        training.global_model.replay(
            Replay(
                sums=sums.gradients,
                squares=sums.squares,
                contributions=contributions,
                gradient_scale=scale,
                steps=[training.view(row) for row, _ in made],
                counts=[count for _, count in made],
                corrections=training.rule.corrections,
                correction=training.rule.correction,
            )
        )

    def _rebase(self, moved: bool) -> None:
        model, rule = self._training.global_model, self._training.rule
        assert model.weights is not None
        self._settle_last_step()
        rows = self.contributed_since_sync()
        if not rows:
            rule.follow(model.weights, model)
        elif moved:
            rule.rebase(model.weights, model, [self._training.view(row) for row in rows])
        self.steps_since_sync = []

    def flush_event(self) -> ControlResult:
        """Sync the partial period and complete at once. Collective."""
        self._enter()
        result = self._event_at_once(flushing=True)
        self.tuner.tune_if_due(self._empty_event)
        return result

    def restore_period(self, saved: dict[str, Any], tuning: dict[str, int | None]) -> None:
        """Take k and d from a saved schedule, where they are chosen by measuring, and go on measuring."""
        training, automatic = self._training, self._training.settings.automatic
        chosen = int(saved["delay_steps"]) >= SHORTEST
        if automatic is not None and chosen and training.schedule.stage is Stage.DELAY:
            delay_steps = min(int(saved["delay_steps"]), automatic.limits.longest)
            training.schedule.delay_steps = delay_steps
            overlap_steps = min(int(saved["overlap_steps"]), automatic.limits.overlap_at(delay_steps))
            training.schedule.overlap_steps = overlap_steps
            training.reducer.set_period(delay_steps)
            self.tuner.import_state(tuning)
            self.tuner.begin()

    def _empty_event(self) -> None:
        """A sync event without any step, waited for at once."""
        self._event_at_once(flushing=False)

    def _event_at_once(self, flushing: bool) -> ControlResult:
        self._issue(flushing)
        self._training.schedule.close_period()
        return self.complete()

    def announce_failure(self, failure: Failure) -> None:
        """Send this rank's part of a sync point, marked as useless, so that nobody waits for it."""
        training = self._training
        training.reducer.reduce_accumulators()
        training.control.send(training.schedule.events, training.schedule.delay_steps, [], failure=failure)
        training.reducer.finish_accumulators()
        training.control.wait()
        self.drop_period()
        training.schedule.position = training.schedule.delay_steps
        training.schedule.close_period()
        training.schedule.restart_period()

    def settle(self) -> None:
        """Wait for this rank's own operations in flight, without using what arrives. Rank-local."""
        self._settle_last_step()
        if self._training.schedule.in_flight:
            self._training.reducer.finish_accumulators()
            self._training.control.wait()

    def drop_period(self) -> None:
        """Forget the current period and what has arrived of the last."""
        self._training.reducer.buffers.drop()
        self._training.control.discard()
        self._training.stats.dropped()
        self.period_steps = []
        self.steps_since_sync = []
        self._undecided = None
