"""The algorithm: what happens in a step, at a sync point, at its completion, and in ``flush()``.

Puts schedule, reducer, rule and global model together. Knows nothing of the optimizer object that the
user holds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ssd_allreduce import agreement, layout, ops
from ssd_allreduce.base_optimizer import BaseOptimizer
from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.compensation import make_rule
from ssd_allreduce.control import FAILURE_TEXT, ControlCodec, ControlResult, ControlRow, Failure
from ssd_allreduce.errors import (
    GradientChangedError,
    PeerFailedError,
    RankMismatchError,
    SSDError,
    UsageError,
    WeightsChangedError,
)
from ssd_allreduce.global_model import GlobalModel, StepOptions
from ssd_allreduce.group_options import GroupOptions, Row
from ssd_allreduce.ops import Accumulation
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.reducer import HookMode, Reducer
from ssd_allreduce.schedule import Schedule, Stage, StepPlan
from ssd_allreduce.settings import Settings
from ssd_allreduce.statistics import StatsRecorder
from ssd_allreduce.transport import Transport
from ssd_allreduce.wire import WireFormat

_log = logging.getLogger("ssd_allreduce")

_STEP_REMEDY = (
    "Pass issue='step' to ssd_allreduce.DistributedOptimizer, so that a gradient is final only at step()."
)
_INSIDE_GLOBAL_WEIGHTS = (
    "backward() and step() are refused inside global_weights(): the model holds the global weights "
    "there, and gradients taken at them belong to no local step. Leave the context first."
)


class Coordinator:
    """Runs the algorithm for one optimizer on one of several ranks.

    Args:
        parameters: the trained parameters.
        base: the user's optimizer.
        settings: the checked options.
        transport: access to the engine.
        reducer: hooks, accumulators and what is in flight.
        wire: how gradients travel.
        stats: counters.
    """

    def __init__(
        self,
        parameters: Parameters,
        base: BaseOptimizer,
        settings: Settings,
        transport: Transport,
        reducer: Reducer,
        wire: WireFormat,
        stats: StatsRecorder,
    ) -> None:
        self.parameters = parameters
        self.settings = settings
        self.schedule = Schedule(settings.warmup_steps, settings.delay_steps, settings.overlap_steps)
        self.reducer = reducer
        self.global_model = GlobalModel(parameters, base)
        self.size = transport.communicator.size
        self.rank = transport.communicator.rank
        self.rule = make_rule(settings, parameters, float(self.size) if wire.op is ReduceOp.SUM else 1.0)
        self.period_steps: list[tuple[Row, bool]] = []
        """Options of each step of the current period, and whether this rank contributed."""
        self.rows_since_sync: list[Row] = []
        """Options of the local steps made since the sync point in flight."""
        self.arrived_control: tuple[Tensor, Tensor] | None = None
        """The control row in flight, once it has been waited for early."""
        self.needs_new_period = False
        """Whether a checkpoint was loaded whose partial period is another rank's."""
        self._base = base
        self._wire = wire
        self._transport = transport
        self._stats = stats
        self.options = GroupOptions(base.groups, base.option_names)
        self._issue_at_step = settings.issue == "step"
        self._agreed = False
        self._settings_digest = 0
        self._failed: SSDError | None = None
        self._versions: list[int] | None = None
        self._inside_global_weights = False
        self._synchronized: ControlResult | None = None
        self._warned_options = False
        self._last_completed: int | None = None
        transport.progress = self._describe_progress
        reducer.count_passes = not self._issue_at_step

    # -- agreement -------------------------------------------------------------------------------

    def agree(self) -> None:
        """Compare all ranks before the first step, and before the first after a load. Collective."""
        if self._agreed:
            return
        self._restart_period_on_all_ranks_if_any_must()
        self._settings_digest = agreement.compare_ranks(
            self._describe(),
            self.rank,
            self.size,
            partial(self._reduce_named, "agreement"),
            "Give every rank the same script, options and data types, and broadcast the weights "
            "(hvd.broadcast_parameters) and the optimizer's state before the first step.",
        )
        self._agreed = True

    def _reduce_named(self, prefix: str, tensor: Tensor, name: str, op: ReduceOp) -> Tensor:
        return self._transport.reduce_now(tensor, f"{prefix}.{name}", op)

    def _restart_period_on_all_ranks_if_any_must(self) -> None:
        must = torch.tensor([float(self.needs_new_period)], dtype=torch.float64)
        if self._transport.reduce_now(must, "agreement.period", ReduceOp.MAX).item() > 0:
            self.start_new_period()
        self.needs_new_period = False

    def start_new_period(self) -> None:
        """Drop partial sums and local steps: the model takes the global weights."""
        self.schedule.restart_period()
        self._drop_period()
        if self.global_model.weights is not None:
            self.rule.follow(self.global_model.weights, self.global_model.momenta())
            self._changed_own_weights()

    def _drop_period(self) -> None:
        self.reducer.drop_period()
        self.arrived_control = None
        self.period_steps = []
        self.rows_since_sync = []

    def _describe(self) -> list[tuple[str, agreement.Lines]]:
        settings = [*self.settings.describe(), *self._wire.describe()]
        settings.append(("kernels", ops.IMPLEMENTATION))
        return [
            ("settings", settings),
            ("the optimizer", self._describe_base()),
            ("the parameters", self._describe_parameters()),
            ("progress", [("sync events", str(self.schedule.events))]),
            ("the weights", self._describe_tensors(self.global_model.current())),
            ("the optimizer's state", self._describe_tensors(self.global_model.momenta())),
        ]

    def _describe_base(self) -> agreement.Lines:
        lines = [("class", f"{self._base.kind.__module__}.{self._base.kind.__qualname__}")]
        for index, group in enumerate(self._base.groups):
            for option in ("nesterov", "maximize"):
                lines.append((f"param_groups[{index}][{option!r}]", repr(group.get(option))))
        columns = ", ".join(self.options.name(column) for column in range(len(self.options)))
        return [*lines, ("numeric options", columns)]

    def _describe_parameters(self) -> agreement.Lines:
        lines = []
        everything = zip(
            self.parameters.names, self.parameters.tensors, self.parameters.group_of, strict=True
        )
        for name, parameter, group in everything:
            lines += [
                (f"the shape of {name!r}", str(tuple(parameter.shape))),
                (f"the dtype of {name!r}", str(parameter.dtype)),
                (f"the strides of {name!r}", str(parameter.stride())),
                (f"the param group of {name!r}", str(group)),
            ]
        return [("number of trainable parameters", str(len(self.parameters))), *lines]

    def _describe_tensors(self, tensors: Sequence[Tensor | None]) -> agreement.Lines:
        return [
            (
                f"the digest of {name!r}",
                "none" if tensor is None else agreement.tensor_digest(tensor),
            )
            for name, tensor in zip(self.parameters.names, tensors, strict=True)
        ]

    # -- step ------------------------------------------------------------------------------------

    def step(self, contribute: bool = True, scaler: bool = False) -> None:
        """Make one step with the gradients that the parameters hold. Collective at sync events.

        Args:
            contribute: whether this rank's gradients count (not after an overflow).
            scaler: whether a GradScaler drives the step.
        """
        self._refuse_if_unusable("step()")
        if not self._agreed:
            self._base.discard_materialised_state()
            self.agree()
        plan = self.schedule.plan()
        self._stats.stage = plan.stage
        self._check_before_step(plan, scaler)
        if plan.stage is Stage.WARMUP:
            self._warmup_step(contribute)
        else:
            self._delay_step(plan, contribute)
        self._stats.step()
        self._prepare_next_step()

    def _refuse_if_unusable(self, call: str) -> None:
        if self._inside_global_weights:
            raise UsageError(_INSIDE_GLOBAL_WEIGHTS)
        if self._failed is not None:
            raise UsageError(
                f"{call} after an error that ended training on this rank ({self._failed}). Call "
                "adopt_weights() on all ranks, or load a checkpoint."
            ) from self._failed

    def _check_before_step(self, plan: StepPlan, scaler: bool) -> None:
        self.parameters.refuse_unfrozen()
        problem, failure = self._find_problem(scaler)
        if problem is None:
            return
        if plan.is_sync_point:
            # The others wait for this rank's part: it sends it, marked as useless.
            self._announce_failure(plan, failure)
            self._failed = problem
        raise problem

    def _find_problem(self, scaler: bool) -> tuple[SSDError | None, Failure]:
        if scaler and self.reducer.handed_over:
            problem: SSDError = UsageError(
                "A GradScaler drives step(), and the hooks have already sent scaled gradients, whose "
                f"scales differ between ranks. {_STEP_REMEDY}"
            )
            return problem, Failure.GRADIENT_SCALER
        if scaler:
            self.issue_at_step()
        changed = self.reducer.changed_gradients()
        if changed:
            problem = GradientChangedError(
                f"The gradient of {_some(changed)} was changed after its allreduce had been issued: "
                "clipped, unscaled, zeroed, replaced, or given another backward between backward() "
                f"and step(). {_STEP_REMEDY}"
            )
            return problem, Failure.GRADIENT_CHANGED
        names = self._weights_changed_by_others()
        if names:
            return WeightsChangedError(_weights_changed(names, "step()")), Failure.WEIGHTS_CHANGED
        return None, Failure.NONE

    def _weights_changed_by_others(self) -> list[str]:
        if self._versions is None:
            return []
        versions = [p._version for p in self.parameters.tensors]
        if versions == self._versions:
            return []
        both = zip(self.parameters.names, versions, self._versions, strict=True)
        return [name for name, now, before in both if now != before]

    def _changed_own_weights(self) -> None:
        self._versions = [p._version for p in self.parameters.tensors]

    def _announce_failure(self, plan: StepPlan, failure: Failure) -> None:
        if plan.stage is Stage.WARMUP:
            if self._synchronized is None:
                self.reducer.reduce_gradients(contribute=False)
                self._send_control([], failure=failure)
                self.reducer.finish_gradients()
                self.reducer.finish_control()
            return
        self.reducer.reduce_accumulators()
        self._send_control([], failure=failure)
        self.reducer.finish_accumulators()
        self.reducer.finish_control()
        self._drop_period()
        self.schedule.position = 0
        self.schedule.events += 1

    def _prepare_next_step(self) -> None:
        self._changed_own_weights()
        self.reducer.begin_step()
        self._arm()

    def _arm(self) -> None:
        plan = self.schedule.plan()
        if self._issue_at_step or not self._agreed or not plan.is_sync_point:
            self.reducer.mode = HookMode.SILENT
        elif plan.stage is Stage.WARMUP:
            self.reducer.mode = HookMode.REDUCE_GRADIENT
        else:
            self.reducer.mode = HookMode.REDUCE_ACCUMULATOR

    def issue_at_step(self) -> None:
        """From now on gradients are final only at ``step()``."""
        if self._issue_at_step:
            return
        self._issue_at_step = True
        self.reducer.count_passes = False
        if not self.reducer.handed_over:
            self._arm()

    # -- warm-up ---------------------------------------------------------------------------------

    def _warmup_step(self, contribute: bool) -> None:
        result = self._synchronized or self._reduce_warmup_gradients(contribute)
        self._synchronized = None
        self._apply_warmup_step(result)

    def _reduce_warmup_gradients(self, contribute: bool) -> ControlResult:
        self.reducer.reduce_gradients(contribute)
        self._send_control([(self.options.read(self._base.groups), contribute)])
        return self._finish_warmup_gradients()

    def _finish_warmup_gradients(self) -> ControlResult:
        self.reducer.finish_gradients()
        result = self._read_control(*self.reducer.finish_control(), period=1)
        self._stats.sync_event()
        self._last_completed = self.schedule.events
        count = result.counts[0]
        if 0 < count < self.size:
            torch._foreach_mul_(self._gradients(), self.size / count)
        return result

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.tensors if p.grad is not None]

    def _apply_warmup_step(self, result: ControlResult) -> None:
        contributed = result.counts[0] > 0
        if contributed:
            before = None
            if self.rule.wants_weights_before_warmup_step:
                before = [p.detach().clone() for p in self.parameters.tensors]
            row = result.options[0]
            with self.options.written(self._base.groups, row):
                self._base.step()
            if not self.schedule.always_synchronous:
                self.rule.observe_warmup(before, self._view(row))
        self.schedule.close_warmup_event(contributed)

    def synchronize(self) -> None:
        """As Horovod's: in warm-up ``grad`` becomes the global mean; later it stays local."""
        self._refuse_if_unusable("synchronize()")
        self.agree()
        plan = self.schedule.plan()
        if plan.stage is Stage.WARMUP and self._synchronized is None:
            self._stats.stage = plan.stage
            self._check_before_step(plan, scaler=False)
            self._synchronized = self._reduce_warmup_gradients(contribute=True)
        self.issue_at_step()

    @property
    def needs_synchronize(self) -> bool:
        """Whether a step without communication of its own would be wrong."""
        return self.schedule.stage is Stage.WARMUP and self._synchronized is None

    # -- delay stage -----------------------------------------------------------------------------

    def _enter_delay_stage(self) -> None:
        if self.global_model.weights is None:
            self.global_model.take_from_model()
            self.rule.seed(self.global_model.momenta())

    def _delay_step(self, plan: StepPlan, contribute: bool) -> None:
        self._enter_delay_stage()
        row = self.options.read(self._base.groups)
        if contribute:
            self._local_step(row)
            if self.schedule.in_flight:
                self.rows_since_sync.append(row)
        self.period_steps.append((row, contribute))
        if plan.is_sync_point:
            self._issue_accumulators(flushing=False)
        self.schedule.advance()
        if plan.completes:
            self._complete()

    def _local_step(self, row: Row) -> None:
        gradients = [layout.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.tensors]
        reducer = self.reducer
        self.rule.local_step(
            self._view(row),
            gradients,
            reducer.accumulators,
            reducer.accumulated_by_hooks,
            Accumulation.OVERWRITE if reducer.accumulators_empty else Accumulation.ADD,
        )
        reducer.mark_accumulated()

    def _view(self, row: Row) -> StepOptions:
        return partial(self.options.value, row)

    def _issue_accumulators(self, flushing: bool) -> None:
        self.reducer.reduce_accumulators()
        self._send_control(self.period_steps, flushing=flushing)
        self._stats.sync_event()
        if self.settings.overlap_steps > 0 and not flushing:
            self.rule.snapshot()
        self.period_steps = []
        self.rows_since_sync = []

    def _complete(self) -> ControlResult:
        sums = self.reducer.finish_accumulators()
        result = self._read_control(
            *(self.arrived_control or self.reducer.finish_control()),
            period=self.settings.delay_steps,
            event=self.schedule.events - 1,
        )
        self.arrived_control = None
        contributions = sum(result.counts)
        if contributions:
            self._replay(result, sums, contributions)
        self._rebase(moved=contributions > 0)
        self.reducer.release_sums()
        self.schedule.complete()
        self._last_completed = self.schedule.events - 1
        return result

    def _replay(self, result: ControlResult, sums: list[Tensor], contributions: int) -> None:
        divisor = contributions / self.size if self._wire.op is ReduceOp.SUM else contributions
        pairs = zip(result.options, result.counts, strict=True)
        self.global_model.replay(
            sums,
            float(divisor),
            [self._view(row) for row, count in pairs if count > 0],
            self.rule.corrections,
            self.rule.correction,
        )

    def _rebase(self, moved: bool) -> None:
        weights, momenta = self.global_model.weights, self.global_model.momenta()
        assert weights is not None
        if not self.rows_since_sync:
            self.rule.follow(weights, momenta)
        elif moved:
            self.rule.rebase(weights, momenta, [self._view(row) for row in self.rows_since_sync])
        self.rows_since_sync = []

    # -- control row -----------------------------------------------------------------------------

    def _codec(self, period: int) -> ControlCodec:
        return ControlCodec(period, len(self.options), self.rank)

    def _send_control(
        self,
        steps: Sequence[tuple[Row, bool]],
        flushing: bool = False,
        failure: Failure = Failure.NONE,
    ) -> None:
        period = 1 if self.schedule.stage is Stage.WARMUP else self.settings.delay_steps
        row = ControlRow(self.schedule.events, self._settings_digest, steps, flushing, failure)
        self.reducer.send_control(*self._codec(period).encode(row))

    def _read_control(
        self, sums: Tensor, extremes: Tensor, period: int, event: int | None = None
    ) -> ControlResult:
        result = self._codec(period).decode(sums, extremes)
        event = self.schedule.events if event is None else event
        if result.failures:
            failure, rank = result.failure
            self._fail(
                PeerFailedError(
                    f"Rank {rank} refused to go on at sync event {event} because "
                    f"{FAILURE_TEXT[failure]}; its own error says more. Training has ended on all "
                    "ranks; mend the cause, or load a checkpoint."
                )
            )
        for what, (low, high) in (("sync event", result.events), ("settings", result.digests)):
            if low != high:
                self._fail(
                    RankMismatchError(
                        f"Ranks are at different {what} numbers, from {low} to {high}; this rank "
                        f"is at sync event {event}. They loaded different checkpoints, or one of them "
                        "skipped step(). Load the same checkpoint on all ranks."
                    )
                )
        self._warn_of_differing_options(result)
        return result

    def _fail(self, error: SSDError) -> None:
        self._failed = error
        raise error

    def _warn_of_differing_options(self, result: ControlResult) -> None:
        if not result.differing or self._warned_options:
            return
        self._warned_options = True
        _, column, low, high = result.differing[0]
        warnings.warn(
            f"{self.options.name(column)} differs between ranks: {low!r} on one and {high!r} on another. "
            "All ranks use the larger. Drive schedulers by values that are equal on all ranks (reduce "
            "a validation loss over the ranks first).",
            stacklevel=2,
        )

    def _describe_progress(self) -> str:
        last = self._last_completed
        return (
            f"This rank has made {self._stats.snapshot().steps} steps and is at sync event "
            f"{self.schedule.events}; the last completed one is {'none' if last is None else last}."
        )

    # -- flush and adopt -------------------------------------------------------------------------

    def flush(self) -> None:
        """Take part in sync events until all ranks flush; then ``w == W`` everywhere. Collective."""
        self._refuse_if_unusable("flush()")
        self._refuse_between_backward_and_step("flush()")
        if not self._agreed:
            self._base.discard_materialised_state()
            self.agree()
        self._refuse_changed_weights("flush()")
        if self.schedule.in_flight:
            self._complete()
        everyone_flushes = False
        while not everyone_flushes:
            self._stats.stage = self.schedule.stage
            if self.schedule.stage is Stage.WARMUP:
                result = self._flush_warmup_event()
            else:
                result = self._flush_period()
            everyone_flushes = result.flushing == self.size
        self._prepare_next_step()

    def _flush_warmup_event(self) -> ControlResult:
        own_gradients = [p.grad for p in self.parameters.tensors]
        for parameter in self.parameters.tensors:
            parameter.grad = None
        self.reducer.reduce_gradients(contribute=False)
        self._send_control([], flushing=True)
        result = self._finish_warmup_gradients()
        self._apply_warmup_step(result)
        for parameter, gradient in zip(self.parameters.tensors, own_gradients, strict=True):
            parameter.grad = gradient
        return result

    def _flush_period(self) -> ControlResult:
        self._enter_delay_stage()
        self._issue_accumulators(flushing=True)
        self.schedule.close_period()
        return self._complete()

    def _refuse_between_backward_and_step(self, call: str) -> None:
        if self.reducer.handed_over or self._synchronized is not None:
            raise UsageError(
                f"{call} between backward() and step(): the hooks have already sent gradients of the "
                "step. Call step() first."
            )

    def _refuse_changed_weights(self, call: str) -> None:
        names = self._weights_changed_by_others()
        if names:
            raise WeightsChangedError(_weights_changed(names, call))

    def adopt_weights(self) -> None:
        """Make the model's weights the global ones on all ranks. Collective."""
        self._refuse_between_backward_and_step("adopt_weights()")
        if not self._agreed:
            return
        agreement.compare_ranks(
            [
                ("progress", [("sync events", str(self.schedule.events))]),
                ("the weights", self._describe_tensors(self.parameters.tensors)),
            ],
            self.rank,
            self.size,
            partial(self._reduce_named, "adopt"),
            "adopt_weights() needs the same weights on all ranks, after the same steps: load or "
            "broadcast them first.",
        )
        if self.schedule.in_flight:
            self.reducer.finish_accumulators()
            if self.arrived_control is None:
                self.reducer.finish_control()
        self.schedule.restart_period()
        self._drop_period()
        if self.global_model.weights is not None:
            self.global_model.take_from_model()
            self.rule.seed(self.global_model.momenta())
        self._failed = None
        self._prepare_next_step()

    # -- views of the state ----------------------------------------------------------------------

    @contextmanager
    def holding_global_weights(self) -> Iterator[None]:
        """The model holds ``W`` inside the context."""
        if self._inside_global_weights:
            yield
            return
        self._refuse_changed_weights("global_weights()")
        local = self._put_global_weights()
        inside = [p._version for p in self.parameters.tensors]
        self._inside_global_weights = True
        self.reducer.forbidden = _INSIDE_GLOBAL_WEIGHTS
        try:
            yield
        finally:
            self._inside_global_weights = False
            self.reducer.forbidden = None
            now = [p._version for p in self.parameters.tensors]
            if local is not None:
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters.tensors, local)
            if self._versions is not None:
                self._changed_own_weights()
        if now != inside and local is not None:
            raise WeightsChangedError(
                "Weights were changed inside global_weights(), and the change has been undone by "
                "leaving it. Change them outside, on all ranks, and call adopt_weights()."
            )

    def _put_global_weights(self) -> list[Tensor] | None:
        if self.global_model.weights is None:
            return None
        with torch.no_grad():
            local = [p.detach().clone() for p in self.parameters.tensors]
            torch._foreach_copy_(self.parameters.tensors, self.global_model.weights)
        return local

    def refuse_zero_grad(self) -> None:
        """Raise if the hooks have sent gradients that zeroing would make wrong."""
        if self.reducer.handed_over:
            raise UsageError(
                "zero_grad() between backward() and step() at a sync point: the hooks have already "
                "sent these gradients. Call zero_grad() before backward() or after step(), or pass "
                "issue='step' to ssd_allreduce.DistributedOptimizer."
            )
        self.reducer.forget_passes()

    def settle_in_flight(self) -> None:
        """Wait for this rank's own handles, so that the arrived sums can be stored. Rank-local."""
        if self.schedule.in_flight and self.arrived_control is None:
            self.reducer.finish_accumulators()
            self.arrived_control = self.reducer.finish_control()

    def optimizer_state_loaded(self) -> None:
        """Follow a load of the base optimizer's state: local momentum starts from it."""
        if self.global_model.weights is not None:
            with torch.no_grad():
                self.rule.seed(self.global_model.momenta())

    def after_load(self) -> None:
        """Compare ranks again before the next step."""
        self._agreed = False
        self._failed = None
        self._synchronized = None
        self._changed_own_weights()
        self.reducer.begin_step()
        self._arm()

    def close(self) -> None:
        """Remove the hooks. Rank-local."""
        self.reducer.detach()
        self.reducer.mode = HookMode.SILENT


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weights_changed(names: Sequence[str], call: str) -> str:
    return (
        f"{call}: the weights {_some(names)} were changed since the last step() by something other than "
        "this optimizer (load_state_dict, a broadcast, clamp_, ...), so that they no longer belong "
        "to the global weights. Change them on all ranks alike and call adopt_weights() on all ranks."
    )
