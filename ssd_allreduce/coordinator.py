"""The algorithm: what happens in a step, at a sync point, at its completion, and in ``flush()``.

Puts schedule, reducer, rule and global model together. Knows nothing of the optimizer object that the
user holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from ssd_allreduce import agreement
from ssd_allreduce import description as describe
from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.control import ControlResult, Failure
from ssd_allreduce.delay_stage import DelayStage
from ssd_allreduce.errors import (
    CommunicationError,
    GradientChangedError,
    SequenceMismatchError,
    SSDError,
    UsageError,
    WeightsChangedError,
)
from ssd_allreduce.reducer import HookMode
from ssd_allreduce.schedule import Schedule, Stage, StepPlan
from ssd_allreduce.training import Training
from ssd_allreduce.verdict import Contribution
from ssd_allreduce.warmup_stage import WarmupStage
from ssd_allreduce.weight_guard import WeightGuard, some_names

_STEP_REMEDY = (
    "Pass issue='step' to ssd_allreduce.DistributedOptimizer, so that a gradient is final only at step()."
)
_INSIDE_GLOBAL_WEIGHTS = (
    "backward(), step() and other changes are refused inside global_weights(): the model holds the "
    "global weights there, and gradients taken at them belong to no local step. Leave the context first."
)


_LINGERING_SECONDS = 5.0


class Coordinator:
    """Runs the algorithm for one optimizer on one of several ranks.

    Args:
        training: the parts.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.parameters = training.parameters
        self._schedule = training.schedule
        self._reducer = training.reducer
        self._model = training.global_model
        self._rule = training.rule
        self.warmup = WarmupStage(training)
        self.delay = DelayStage(training)
        self.needs_new_period = False
        """Whether a checkpoint was loaded whose partial period is another rank's."""
        self._guard = WeightGuard(training.parameters.names, training.parameters.tensors)
        self._issue_at_step = training.settings.issue == "step"
        self._agreed = False
        self._failed: SSDError | None = None
        self._inside_global_weights = False
        self._held_local_weights: list[Tensor] | None = None
        training.transport.progress = training.stats.describe_progress
        self._arm()

    @property
    def schedule(self) -> Schedule:
        """Stages and sync points."""
        return self._schedule

    @property
    def failed(self) -> bool:
        """Whether an error has ended training on this rank, until it is mended."""
        return self._failed is not None

    # -- agreement -------------------------------------------------------------------------------

    def agree(self) -> None:
        """Compare all ranks before the first step, and before the first after a load. Collective."""
        if self._agreed:
            return
        self._discard_created_state()
        self._restart_period_on_all_ranks_if_any_must()
        self.training.control.settings_digest = agreement.compare_ranks(
            self._describe(),
            self.training.rank,
            self.training.size,
            partial(self._reduce_named, "agreement"),
            "Give every rank the same script, options and data types, and broadcast the weights "
            "(hvd.broadcast_parameters) and the optimizer's state before the first step.",
        )
        self._agreed = True
        # The comparison ends with the ranks' last answer, which all of them see at once.
        self.training.transport.tracer.align(self.training.rank)

    def _reduce_named(self, prefix: str, tensor: Tensor, name: str, op: ReduceOp) -> Tensor:
        return self.training.transport.reduce_now(tensor, f"{prefix}.{name}", op)

    def _discard_created_state(self) -> None:
        """Drop state that was created for a broadcast, but not where any rank's is real.

        A rank that received zeros has what it had created. It must keep them, as the one that sent them
        does: first steps tell none from zero.
        """
        base = self.training.base
        real = base.has_real_state()
        count = len(real)
        summary = torch.tensor([float(base.has_materialised_state), count, -count], dtype=torch.float64)
        created, most, least = self._reduce_named("agreement", summary, "created", ReduceOp.MAX).tolist()
        keep: set[int] = set()
        # Ranks with other numbers of parameters are told so by the comparison.
        if created and most == -least:
            real_anywhere = torch.tensor(real, dtype=torch.float64)
            self._reduce_named("agreement", real_anywhere, "real", ReduceOp.MAX)
            keep = set(real_anywhere.nonzero().flatten().tolist())
        base.discard_materialised_state(keep)

    def _restart_period_on_all_ranks_if_any_must(self) -> None:
        must = torch.tensor([float(self.needs_new_period)], dtype=torch.float64)
        if self.training.transport.reduce_now(must, "agreement.period", ReduceOp.MAX).item() > 0:
            self.start_new_period()
        self.needs_new_period = False

    def start_new_period(self) -> None:
        """Drop partial sums and local steps: the model takes the global weights."""
        self._schedule.restart_period()
        self.delay.drop_period()
        if self._model.weights is not None:
            self._rule.follow(self._model.weights, self._model)
            self._guard.accept()

    def _describe(self) -> list[tuple[str, agreement.Lines]]:
        names, model = self.parameters.names, self._model
        return [
            describe.describe_settings(
                self.training.settings,
                self.training.wire,
                self._reducer.unit_names,
                [parameter.device.type for parameter in self.parameters.tensors],
            ),
            ("the averaged buffers", self.training.buffers.describe()),
            describe.describe_base(self.training.base, self.training.options),
            describe.describe_parameters(self.parameters),
            describe.describe_progress(self._schedule),
            describe.describe_weights(names, model.current()),
            describe.describe_state(names, model),
        ]

    # -- step ------------------------------------------------------------------------------------

    def step(self, contribute: Contribution = True, scaler: bool = False) -> None:
        """Make one step with the gradients that the parameters hold. Collective at sync events.

        Args:
            contribute: whether this rank's gradients count (not after an overflow).
            scaler: whether a GradScaler drives the step.
        """
        tracer = self.training.transport.tracer
        tracer.computed()
        self._refuse_if_unusable("step()")
        self.agree()
        self._drop_overtaken_synchronize()
        plan = self._schedule.plan()
        # In warm-up every step is a sync event.
        quiet = not plan.is_sync_point and not self._schedule.in_flight
        self.training.stats.stage = plan.stage
        self._check_before_step(plan, scaler)
        # Not by the context manager below, whose generator would cost more than a tiny step's kernel.
        try:
            if plan.stage is Stage.WARMUP:
                self.warmup.step(contribute)
            else:
                self.delay.step(plan, contribute)
        except SSDError as error:
            self._fail_after_own_changes(error)
            raise
        self.training.stats.step(undisturbed=quiet)
        if tracer.active:
            self._reducer.observe()
        self._prepare_next_step()
        tracer.step_ended()

    @contextmanager
    def _ending_training_on_errors(self) -> Iterator[None]:
        """What fails half-way leaves nothing to go on from but ``adopt_weights()`` or a load."""
        try:
            yield
        except SSDError as error:
            self._fail_after_own_changes(error)
            raise

    def _fail_after_own_changes(self, error: SSDError) -> None:
        """What failed may have changed the weights before, and nobody else is to blame for that."""
        self._guard.accept()
        self._fail(error)

    def _fail(self, error: SSDError) -> None:
        self._failed = error
        self._reducer.begin_step()
        self._arm()

    def _refuse_inside_global_weights(self) -> None:
        if self._inside_global_weights:
            raise UsageError(_INSIDE_GLOBAL_WEIGHTS)

    def _refuse_if_unusable(self, call: str) -> None:
        self._refuse_inside_global_weights()
        if self._failed is not None:
            remedy = "Call adopt_weights() on all ranks, or load a checkpoint."
            if self._engine_is_lost:
                remedy = "The engine cannot be used any more: restart from the last checkpoint."
            raise UsageError(
                f"{call} after an error that ended training on this rank ({self._failed}). {remedy}"
            ) from self._failed

    @property
    def _engine_is_lost(self) -> bool:
        return isinstance(self._failed, CommunicationError | SequenceMismatchError)

    def _check_before_step(self, plan: StepPlan, scaler: bool) -> None:
        problem, failure = self._find_problem(scaler, plan.is_sync_point)
        if problem is None and plan.is_sync_point and self.training.buffers.with_sync_events:
            problem, failure = self.training.buffers.find_change("step()"), Failure.BUFFERS_CHANGED
        if problem is None:
            return
        if plan.is_sync_point:
            self._end_training(problem, failure)
        raise problem

    def _end_training(self, problem: SSDError, failure: Failure) -> NoReturn:
        """Raise this rank's own error, of which the others hear as far as they still can."""
        try:
            self._announce_failure(failure)
        except SSDError as unheard:
            # What is left to do here depends on the engine; what is to be mended, on the rank's own error.
            self._fail(unheard)
            raise problem from unheard
        self._fail(problem)
        raise problem

    def _announce_failure(self, failure: Failure) -> None:
        """Take part in the next sync event with a part marked as useless, so that nobody waits for it."""
        if self._schedule.in_flight:
            self.delay.complete(rebase=False)
        if self.warmup.synchronized is not None:
            # The step's own event is over: the others will hear of it at their next one.
            self.warmup.synchronized = None
            self._schedule.close_warmup_event(contributed=True)
            self._reducer.begin_step()
        stage = self.warmup if self._schedule.stage is Stage.WARMUP else self.delay
        stage.announce_failure(failure)

    def _find_problem(self, scaler: bool, at_sync_point: bool) -> tuple[SSDError | None, Failure]:
        if scaler and self._reducer.handed_over:
            problem: SSDError = UsageError(
                "A GradScaler drives step(), and the hooks have already sent scaled gradients, whose "
                f"scales differ between ranks. {_STEP_REMEDY}"
            )
            return problem, Failure.GRADIENT_SCALER
        if scaler:
            self.issue_at_step()
        newcomer = self.parameters.find_newcomer(thoroughly=at_sync_point)
        if newcomer is not None:
            return newcomer, Failure.OTHER
        changed = self._reducer.changed_gradients()
        if changed:
            problem = GradientChangedError(
                f"The gradient of {some_names(changed)} was changed after its allreduce had been issued: "
                "clipped, unscaled, zeroed, replaced, or given another backward between backward() "
                f"and step(). {_STEP_REMEDY}"
            )
            return problem, Failure.GRADIENT_CHANGED
        return self._guard.find_change("step()"), Failure.WEIGHTS_CHANGED

    def _prepare_next_step(self) -> None:
        self._guard.accept()
        self._reducer.begin_step()
        self._arm()

    def _arm(self) -> None:
        self._reducer.count_passes = not self._issue_at_step and self._failed is None
        if not self._reducer.count_passes or not self._agreed or not self._schedule.at_sync_event:
            self._reducer.mode = HookMode.SILENT
        elif self._schedule.stage is Stage.WARMUP:
            self._reducer.mode = HookMode.REDUCE_GRADIENT
        else:
            self._reducer.mode = HookMode.REDUCE_ACCUMULATOR

    @property
    def issues_at_step(self) -> bool:
        """Whether gradients are final only at ``step()``."""
        return self._issue_at_step

    def issue_at_step(self) -> None:
        """From now on gradients are final only at ``step()``."""
        if self._issue_at_step:
            return
        self._issue_at_step = True
        if not self._reducer.handed_over:
            self._arm()

    def synchronize(self) -> None:
        """As Horovod's: in warm-up ``grad`` becomes the global mean; later it stays local."""
        self._refuse_if_unusable("synchronize()")
        self.agree()
        self._drop_overtaken_synchronize()
        plan = self._schedule.plan()
        if plan.stage is Stage.WARMUP and self.warmup.synchronized is None:
            self.training.stats.stage = plan.stage
            self._check_before_step(plan, scaler=False)
            with self._ending_training_on_errors():
                self.warmup.synchronize()
        self.issue_at_step()

    @property
    def _is_synchronized(self) -> bool:
        """Whether gradients are those that ``synchronize()`` has reduced, edited or not."""
        return self.warmup.synchronized is not None and not self._reducer.has_unreduced_gradients

    def _drop_overtaken_synchronize(self) -> None:
        """After another backward pass gradients are local again, and reduced anew, as in Horovod."""
        if self.warmup.synchronized is not None and not self._is_synchronized:
            self.warmup.drop_synchronized()

    @property
    def needs_synchronize(self) -> bool:
        """Whether a step without communication of its own would be wrong."""
        return self._schedule.stage is Stage.WARMUP and not self._is_synchronized

    # -- flush and adopt -------------------------------------------------------------------------

    def flush(self) -> bool:
        """Take part in sync events until all ranks flush; then ``w == W`` everywhere. Collective.

        Returns:
            Whether on any rank other parameters are trainable now, so that ranks must agree anew.
        """
        self._refuse_if_unusable("flush()")
        self._refuse_between_backward_and_step("flush()")
        self.agree()
        problem: SSDError | None = self.parameters.find_edit()
        if problem is not None:
            self._end_training(problem, Failure.OTHER)
        problem = self._guard.find_change("flush()")
        if problem is not None:
            self._end_training(problem, Failure.WEIGHTS_CHANGED)
        problem = self.training.buffers.find_change("flush()")
        if problem is not None:
            self._end_training(problem, Failure.BUFFERS_CHANGED)
        with self._ending_training_on_errors():
            if self._schedule.in_flight:
                self.delay.complete()
            self.training.control.regrouping = self.parameters.have_changed()
            result = self._flush_event()
            while result.flushing < self.training.size:
                result = self._flush_event()
            self.training.buffers.average_now()
        self._prepare_next_step()
        self.training.transport.tracer.write()
        return result.regrouping > 0

    def _flush_event(self) -> ControlResult:
        """Take part in one sync event without a step."""
        stage = self._schedule.stage
        self.training.stats.stage = stage
        return (self.warmup if stage is Stage.WARMUP else self.delay).flush_event()

    def _refuse_between_backward_and_step(self, call: str) -> None:
        if self._reducer.handed_over:
            raise UsageError(
                f"{call} between backward() and step(): the hooks have already sent gradients of the "
                "step. Call step() first."
            )
        if self.warmup.synchronized is not None:
            raise UsageError(
                f"{call} between synchronize() and step(): gradients have been reduced for a step that was "
                "not made. Call step() or zero_grad() first."
            )

    def adopt_weights(self) -> None:
        """Make the model's weights the global ones on all ranks. Collective."""
        self._refuse_inside_global_weights()
        self._refuse_between_backward_and_step("adopt_weights()")
        if not self._guard.active:
            # Before the first step, weights may be changed anyhow.
            return
        self._complete_without_rebase()
        agreement.compare_ranks(
            [
                ("the averaged buffers", self.training.buffers.describe()),
                describe.describe_progress(self._schedule),
                describe.describe_weights(self.parameters.names, self.parameters.tensors),
                describe.describe_state(self.parameters.names, self._model),
            ],
            self.training.rank,
            self.training.size,
            partial(self._reduce_named, "adopt"),
            "adopt_weights() needs the same weights and optimizer state on all ranks, after the same "
            "steps: load or broadcast them first.",
        )
        self.needs_new_period = False
        self._schedule.restart_period()
        self.delay.drop_period()
        if self._model.weights is not None:
            self._model.take_from_model()
            self._rule.seed(self._model)
        self._failed = None
        self._prepare_next_step()

    def _complete_without_rebase(self) -> None:
        """Bring the global state up to date; the local weights are about to replace the global ones."""
        if not self._schedule.in_flight:
            return
        try:
            self.delay.complete(rebase=False)
        except SSDError:
            # Another rank's failure is what adopt_weights() mends; no rank uses this event's sums.
            self.delay.drop_period()
            self._schedule.restart_period()

    # -- views of the state ----------------------------------------------------------------------

    @contextmanager
    def holding_global_weights(self) -> Iterator[None]:
        """The model holds ``W`` inside the context."""
        if self._inside_global_weights:
            yield
            return
        problem = self._guard.find_change("global_weights()")
        # After an error they are still to be saved, and where they are kept apart no edit has reached them.
        if problem is not None and not (self.failed and self._model.weights is not None):
            raise problem
        local = self._held_local_weights = self._put_global_weights()
        inside = self._guard.versions()
        self._inside_global_weights = True
        self._reducer.forbidden = _INSIDE_GLOBAL_WEIGHTS
        try:
            yield
        finally:
            self._inside_global_weights = False
            self._held_local_weights = None
            self._reducer.forbidden = None
            now = self._guard.versions()
            if local is not None:
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters.tensors, local)
                self._guard.accept()
        if now != inside and local is not None:
            raise WeightsChangedError(
                "Weights were changed inside global_weights(), and the change has been undone by "
                "leaving it. Change them outside, on all ranks, and call adopt_weights()."
            )

    def _put_global_weights(self) -> list[Tensor] | None:
        if self._model.weights is None:
            return None
        with torch.no_grad():
            local = [p.detach().clone() for p in self.parameters.tensors]
            torch._foreach_copy_(self.parameters.tensors, self._model.weights)
        return local

    def local_weights(self) -> list[Tensor]:
        """Copies of this rank's local weights, also while the model holds the global ones.

        Copies, because a checkpoint taken before ``global_weights()`` may be written inside it.
        """
        held = self._held_local_weights
        return [p.detach().clone() for p in (self.parameters.tensors if held is None else held)]

    def before_zero_grad(self) -> None:
        """Forget gradients of the step, also reduced ones; raise if the hooks have sent some of them."""
        if self._reducer.handed_over:
            raise UsageError(
                "zero_grad() between backward() and step() at a sync point: the hooks of "
                f"{self._reducer.label} have already sent these gradients (those of another loss whose "
                "backward() reaches its parameters count too). Call zero_grad() before backward() or "
                "after step(), or pass issue='step' to ssd_allreduce.DistributedOptimizer."
            )
        if self.warmup.synchronized is not None:
            self.warmup.drop_synchronized()
        self._reducer.forget_passes()

    def optimizer_state_loaded(self) -> None:
        """Follow a load of the base optimizer's state: local momentum starts from it."""
        self.training.control.loads += 1
        if self._model.weights is not None:
            with torch.no_grad():
                self._rule.seed(self._model)

    def refuse_load(self) -> None:
        """Raise if a checkpoint cannot be loaded now."""
        self._refuse_inside_global_weights()
        if self._engine_is_lost:
            # It would wait once more for what was in flight, in the middle of the load.
            self._refuse_if_unusable("load_state_dict()")
        self._refuse_between_backward_and_step("load_state_dict()")

    def after_load(self) -> None:
        """Compare ranks again before the next step."""
        self._agreed = False
        self._failed = None
        self.training.control.loads = 0
        if self._model.weights is None:
            # The model's own checkpoint may still be loaded: the comparison will see its weights.
            self._guard.release()
        else:
            self._guard.accept()
        self._reducer.begin_step()
        self._arm()

    def close(self) -> None:
        """Remove the hooks, and give up the engine's channel. Rank-local."""
        self.detach()
        self.training.transport.close()
        self.training.transport.tracer.write()

    def detach(self) -> None:
        """Remove the hooks. Rank-local."""
        self._reducer.detach()
        self._reducer.mode = HookMode.SILENT

    def linger(self) -> None:
        """Give what is in flight a moment, for a script that takes the engine down when it ends."""
        if self._schedule.in_flight and self._failed is None:
            self._reducer.linger(_LINGERING_SECONDS)
