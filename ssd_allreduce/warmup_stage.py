"""The warm-up stage: synchronous SGD by the very calls that plain Horovod makes."""

from __future__ import annotations

import torch

from ssd_allreduce.clipping import clip_gradients
from ssd_allreduce.control import ControlResult, Failure
from ssd_allreduce.training import Training
from ssd_allreduce.verdict import Contribution, contributes


class WarmupStage:
    """Makes synchronous steps. The model itself holds the global weights."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.synchronized: ControlResult | None = None
        """What the ranks said in ``synchronize()``, until the step that uses it."""

    def synchronize(self) -> None:
        """Reduce the gradients for the user to edit, before the step that uses them. Collective."""
        self.synchronized = self._reduce_gradients(contribute=True, synchronizing=True)

    def _reduce_gradients(self, contribute: Contribution, synchronizing: bool = False) -> ControlResult:
        """Make every ``grad`` the mean (or sum) over the contributing ranks. Collective."""
        training = self._training
        training.reducer.reduce_gradients(contribute)
        event = training.schedule.events
        # The host may have to wait for the device here: everything that the device has to do is queued,
        # and only the row, which is made on the host, leaves later.
        steps = [(training.own_options(), contributes(contribute))]
        training.control.send(event, 1, steps, synchronizing=synchronizing)
        return self._finish_gradients(event)

    def _finish_gradients(self, event: int) -> ControlResult:
        training = self._training
        training.reducer.finish_gradients()
        result = training.control.receive(event, 1)
        training.stats.sync_event(completed=event)
        count = result.counts[0]
        if 0 < count < training.size:
            gradients = [p.grad for p in training.parameters.tensors if p.grad is not None]
            torch._foreach_mul_(gradients, training.size / count)
        return result

    def step(self, contribute: Contribution) -> None:
        """Reduce the gradients, unless that has been done, and step. Collective."""
        synchronized, self.synchronized = self.synchronized, None
        if synchronized is None:
            self._apply(self._reduce_gradients(contribute))
        elif contributes(contribute):
            self._apply(synchronized)
        else:
            # The reduced gradients are equal on all ranks, and so is their overflow.
            self._training.schedule.close_warmup_event(contributed=False)

    def drop_synchronized(self) -> None:
        """Make no step of what ``synchronize()`` has reduced. On all ranks alike."""
        self.synchronized = None
        self._training.schedule.close_warmup_event(contributed=False)

    def _apply(self, result: ControlResult) -> None:
        """The base optimizer's own step on the model; left out where no rank contributed."""
        training, rule = self._training, self._training.rule
        contributed = result.counts[0] > 0
        if contributed:
            before = None
            if rule.wants_weights_before_warmup_step:
                before = [p.detach().clone() for p in training.parameters.tensors]
            if training.settings.max_grad_norm is not None:
                clip_gradients(training.parameters.tensors, training.settings.max_grad_norm)
            row = result.options[0]
            tracer = training.transport.tracer
            with training.options.written(training.base.groups, row), tracer.span("global update"):
                training.base.step()
            if not training.schedule.always_synchronous:
                rule.observe_warmup(before, training.view(row))
        training.schedule.close_warmup_event(contributed)

    def flush_event(self) -> ControlResult:
        """Take part in the step of ranks that still make one. Collective."""
        training = self._training
        # Those that are not exchanged yet too, or the base optimizer would step them.
        parameters = [parameter for group in training.base.groups for parameter in group["params"]]
        own_gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        training.reducer.reduce_gradients(contribute=False)
        event = training.schedule.events
        training.control.send(event, 1, [], flushing=True)
        result = self._finish_gradients(event)
        self._apply(result)
        for parameter, gradient in zip(parameters, own_gradients, strict=True):
            parameter.grad = gradient
        return result

    def announce_failure(self, failure: Failure) -> None:
        """Send this rank's part, marked as useless, so that nobody waits for it. Collective."""
        training = self._training
        training.reducer.reduce_gradients(contribute=False)
        training.control.send(training.schedule.events, 1, [], failure=failure)
        training.reducer.discard_gradients()
        training.control.wait()
        training.control.discard()
