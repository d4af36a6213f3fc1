"""The optimizer that the user holds."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ssd_allreduce import checkpoint
from ssd_allreduce.assembly import assemble, make_transport, reassemble
from ssd_allreduce.base_optimizer import (
    ENTRY,
    BaseOptimizer,
    optimizers_sharing_groups,
    refuse_differentiable,
)
from ssd_allreduce.buffers import BufferAverager, check_average_buffers
from ssd_allreduce.clocks import clock_for
from ssd_allreduce.communicators.protocol import Communicator
from ssd_allreduce.coordinator import Coordinator
from ssd_allreduce.errors import UsageError
from ssd_allreduce.families import choose_family
from ssd_allreduce.parameters import Parameters, name_new_group
from ssd_allreduce.request import read_communicator, read_request, refuse_other_engines
from ssd_allreduce.settings import DEFAULT_BUCKET_BYTES, check_settings
from ssd_allreduce.single import SingleProcess
from ssd_allreduce.statistics import Stats, StatsRecorder
from ssd_allreduce.update_family import Family
from ssd_allreduce.verdict import Contribution, Verdict, can_be_deferred, unscale_on_device


class DistributedOptimizer(torch.optim.Optimizer):
    """Several Steps Delay SGD: a local step at a time, with allreduce every ``delay_steps`` steps.

    Wrap a Horovod optimizer (whose allreduce hooks are intercepted and whose options are honoured) or
    a bare torch optimizer, and use it as you used that one. Construction does not communicate.

    Args:
        optimizer: result of ``hvd.DistributedOptimizer``, or a ``torch.optim.Optimizer``. Supported:
            ``torch.optim.SGD``, ``Adam`` and ``AdamW``, and by its own ``step()`` any other class
            that makes one update from ``p.grad`` (not ``LBFGS``).
        delay_steps: steps in a period, k in the paper, at least 1; 4 by default. The gradient traffic
            shrinks by this factor. Larger values hide slower networks and drift further; 4 to 16 are
            usual. ``"auto"``: by measuring, the smallest k that is predicted to be within 2 % of the
            fastest, with the smallest d that hides the transfer as far as allowed: after the first
            period (of 4 steps), four periods later, and then every ``retune_periods``. All ranks change
            at once, the choice is kept in checkpoints, and ``stats()`` and the log of
            ``ssd_allreduce`` tell it.
        overlap_steps: steps made between sending and using the sums, ``0 <= d < delay_steps``. By
            default ``delay_steps // 2``, which costs no visible accuracy. 0 waits at each sync point.
            With ``delay_steps="auto"``, the largest d that may be chosen.
        warmup_steps: steps of plain synchronous SGD at the start, 0 by default. Raise it where the
            first updates are large; a few epochs' worth in the paper.
        glu: rule of the local update (Global gradient for Local Update). ``"momentum"``: the base
            optimizer's own update, its momentum seeded with the global one. ``"gradient"``:
            ``w -= c lr (alpha g + beta s + wd w)`` with ``s`` the last global mean gradient.
            ``"displacement"``: the same with ``s`` read off the last displacement of the global
            weights, the paper's form. ``"none"``: local SGD.
        alpha: weight of the local gradient in the last two-parameter rules; 1 by default.
        beta: weight of the global gradient there; 0.5 by default. Smaller is more stable.
        local_lr_scale: factor c on the local learning rate there; 1 by default.
        issue: from which moment a gradient is final: ``"backward"``, the default (its hook, so that
            sending overlaps the rest of backward), or ``"step"``. ``"step"`` is needed with a GradScaler,
            gradient clipping, or any code that edits gradients.
        named_parameters: pairs of name and parameter, for a bare optimizer. Ranks match tensors by
            name. Not needed where the optimizer's groups hold ``param_names``.
        backward_passes_per_step: backward passes before each ``step()``, for a bare optimizer.
        compression: ``hvd.Compression.fp16``, or any object with ``compress(tensor)``, which returns
            the smaller tensor and a context, and ``decompress(tensor, context)``; for a bare optimizer.
        process_set: the ``hvd.ProcessSet`` that trains together, for a bare optimizer.
        communicator: the engine: ``"horovod"``, ``"mpi"``, ``"torch"``, or an object with the methods of
            ``ssd_allreduce.communicators.Communicator``. ``"auto"``: Horovod where it is initialised, else
            ``torch.distributed`` where that is, else what the launcher (``torchrun``, ``mpirun``) asks for,
            else one rank.
        bucket_bytes: up to which size tensors are put together into one allreduce, 1 MiB by default, for
            engines other than Horovod, which has ``HOROVOD_FUSION_THRESHOLD``. 0 for each tensor alone.
        max_grad_norm: clip by the 2-norm over all gradients: in warm-up the global mean, in the delay
            stage the local gradient in every step, and at completion the global mean, the same on all
            ranks. Gradients are final at ``step()`` then.
        max_delay_steps: largest k that ``delay_steps="auto"`` may choose; 16 by default.
        retune_periods: periods between measurements there; 100 by default, 0 for none after the second.
        average_buffers: when floating-point buffers of ``model`` (BatchNorm's statistics) are averaged
            over the ranks: ``"sync"`` (with every sync event, and in ``flush()``), ``"flush"``, or
            ``"never"``, the default, as in Horovod.
        model: the module whose buffers are averaged, those that it has at the time. Adding, removing or
            reshaping them needs :meth:`flush` before and :meth:`adopt_weights` after, on all ranks alike.
        sparse_as_dense: make sparse gradients dense instead of refusing them, for a bare optimizer.
        timeout: seconds that one wait for other ranks may last, 600 by default. Raise it where
            ranks pause for long (evaluation on rank 0 alone).
        trace: file for a trace in Chrome's format, which Perfetto opens: forward, backward, local and
            global updates, waiting, and each tensor's allreduce. Each rank writes one of its own
            (``trace.json``: ``trace.rank0.json``, ...; ``trace.rank0.optimizer2.json`` for a second
            optimizer) in ``flush()`` and ``close()``; times count from the first step, where all ranks
            meet. Not with one rank.

    Raises:
        TypeError, ValueError: an option is not allowed; the message says what is.
        UsageError: the optimizer is already wrapped, or cannot be wrapped now.

    Source: SSD-SGD, ACM TACO 20(1), 2022, doi 10.1145/3563038, carried over from a parameter server
    to allreduce.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        delay_steps: int | str = 4,
        overlap_steps: int | None = None,
        warmup_steps: int = 0,
        glu: str = "momentum",
        alpha: float | None = None,
        beta: float | None = None,
        local_lr_scale: float | None = None,
        issue: str = "backward",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        backward_passes_per_step: int | None = None,
        compression: Any = None,
        process_set: Any = None,
        communicator: Communicator | str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_grad_norm: float | None = None,
        max_delay_steps: int | None = None,
        retune_periods: int | None = None,
        average_buffers: str = "never",
        model: torch.nn.Module | None = None,
        sparse_as_dense: bool | None = None,
        timeout: float = 600.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._closed = True
        settings = check_settings(
            delay_steps=delay_steps,
            overlap_steps=overlap_steps,
            warmup_steps=warmup_steps,
            glu=glu,
            alpha=alpha,
            beta=beta,
            local_lr_scale=local_lr_scale,
            issue=issue,
            timeout=timeout,
            max_grad_norm=max_grad_norm,
            max_delay_steps=max_delay_steps,
            retune_periods=retune_periods,
            bucket_bytes=bucket_bytes,
        )
        when = check_average_buffers(average_buffers, model)
        _refuse_wrong_optimizer(type(self), optimizer)
        _refuse_live_wrapper(optimizer)
        request = read_request(
            optimizer,
            named_parameters=named_parameters,
            backward_passes_per_step=backward_passes_per_step,
            compression=compression,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
        )
        engine = read_communicator(request, communicator)
        parameters = Parameters(optimizer.param_groups, request.names)
        refuse_other_engines(parameters)
        self._request = request
        self._base = BaseOptimizer(optimizer)
        self._family = choose_family(self._base, parameters)
        self._family.check(settings)
        self._constructing = True
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._constructing = False
        # Marks on a device cost something, and only the choice of a period reads them.
        measures = engine is not None and settings.automatic is not None
        self._stats = StatsRecorder(clock_for(parameters.tensors) if measures else None)
        self._skip_synchronize = False
        # Made once: making it costs a good part of a tiny step, and steps do not nest.
        self._no_grad = torch.no_grad()
        self._engine: Coordinator | SingleProcess
        if engine is None:
            self._engine = SingleProcess(parameters, self._base, settings, self._stats)
        else:
            path = None if trace is None else Path(trace)
            transport = make_transport(engine, settings, self._stats, path)
            self._make_buffers = partial(BufferAverager, transport, model, when)
            training = assemble(transport, self._family, settings, request, self._make_buffers(), self._stats)
            self._engine = Coordinator(training)
        self._base.attach(_other_holders(optimizer))
        self._base.share_with(self)
        self._connect_engine()
        self._closed = False

    def _connect_engine(self) -> None:
        self._base.before_load = partial(_check_load, self._engine, self._family)
        self._base.on_load = partial(_follow_load, self._engine, self._family)
        # A wrapper that is dropped without close() must not leave hooks and refusals behind.
        linger = partial(_linger_at_exit, weakref.ref(self._engine))
        atexit.register(linger)
        self._release = weakref.finalize(self, _release, self._engine, self._base, linger)
        self._release.atexit = False
        self._forget_exit = partial(atexit.unregister, linger)

    # -- training loop ---------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Communicates in warm-up, at sync points and at the first step.

        Args:
            closure: computes the loss and its gradients; called once.

        Returns:
            What the closure returned, or None.
        """
        self._refuse_if_closed("step()")
        if self._skip_synchronize and self._engine.needs_synchronize:
            raise UsageError(
                "step() inside skip_synchronize() without synchronize() before it, in the warm-up "
                "stage: every rank would go its own way. Call synchronize() first."
            )
        arguments = () if closure is None else (closure,)
        self._base.run_hooks("pre", arguments, {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._no_grad:
            try:
                contribute, scaler = self._unscale_own_gradients()
                self._engine.step(contribute, scaler)
            except BaseException:
                self._forget_scaler()
                raise
        self._base.mark_stepped()
        self._base.run_hooks("post", arguments, {})
        return loss

    def _unscale_own_gradients(self) -> tuple[Contribution, bool]:
        """Follow torch's protocol for optimizers that handle a GradScaler's scale themselves.

        Returns:
            Whether this rank's gradients are finite, and whether a scaler is in use.
        """
        if not hasattr(self, "found_inf"):
            return True, False
        # Without any gradient, the scaler passes the int 0; after unscale_(), no scale.
        found_inf, scale = self.found_inf, getattr(self, "grad_scale", None)
        already_sent = isinstance(self._engine, Coordinator) and self._engine.training.reducer.handed_over
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        tensors = self._engine.parameters.tensors + gradients
        if not already_sent and can_be_deferred(found_inf, scale, tensors):
            if scale is not None:
                unscale_on_device(gradients, scale)
            return Verdict(found_inf), True
        finite = float(found_inf) == 0.0
        if scale is not None and finite and not already_sent and gradients:
            torch._foreach_mul_(gradients, 1.0 / float(scale))
        return finite, True

    def _forget_scaler(self) -> None:
        """torch removes a GradScaler's scale only after a step that succeeds, and multiplies what is left."""
        for left_behind in ("grad_scale", "found_inf"):
            self.__dict__.pop(left_behind, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as torch does.

        Raises:
            UsageError: hooks have already sent gradients of this step.
        """
        self._engine.before_zero_grad()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """As Horovod's. In warm-up (and with ``delay_steps=1``): collective; ``p.grad`` becomes the
        global mean, and ``step()`` uses it as you leave it; after another backward pass gradients
        are reduced anew. In the delay stage: sends nothing, leaves the local gradient, and from then
        on gradients are final only at ``step()``. Calling it twice does nothing more.

        Raises:
            UsageError: in warm-up, on all ranks, while another rank is inside ``flush()`` already.
        """
        self._refuse_if_closed("synchronize()")
        with torch.no_grad():
            self._engine.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """As Horovod's: around a ``step()`` whose ``synchronize()`` has been called already."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    def flush(self) -> None:
        """Collective. Complete what is in flight and sync the partial period: ``w == W`` everywhere.

        Ranks may have made different numbers of steps: those with fewer take part in the others' sync
        points without contributing, until all ranks flush. Call it on all ranks at the end of an
        epoch, before saving, and at the end of training.

        Parameters that were unfrozen or frozen since, and groups that were added, on all ranks alike,
        take part from here on.

        Raises:
            UsageError: parameters were put into or taken out of a param group by other means.
        """
        self._refuse_if_closed("flush()")
        with _writing_state():
            if self._engine.flush():
                self._regroup()

    def _regroup(self) -> None:
        """Make the parts anew for the parameters that are trainable now."""
        parameters = Parameters(self.param_groups, self._request.names)
        refuse_other_engines(parameters)
        self._family = choose_family(self._base, parameters)
        old = self._engine
        if isinstance(old, SingleProcess):
            old.parameters = parameters
            return
        old.detach()
        training = reassemble(old.training, self._family, self._request, self._make_buffers())
        self._engine = Coordinator(training)
        self._engine.delay.tuner.import_state(old.delay.tuner.export_state())
        if old.issues_at_step:
            self._engine.issue_at_step()
        self._release.detach()
        self._forget_exit()
        self._connect_engine()

    def adopt_weights(self) -> None:
        """Collective. Make the model's present weights the global ones, and begin a new period.

        For weights that something else has changed, alike on all ranks (``load_state_dict``, a
        broadcast, ``clamp_``), and for averaged buffers that were added, removed or reshaped. The partial
        period is dropped; the optimizer's state stays.

        Edits through ``.data`` cannot be noticed: call this after them too.

        Raises:
            RankMismatchError: weights, averaged buffers or progress differ between ranks.
        """
        self._refuse_if_closed("adopt_weights()")
        with _writing_state():
            self._engine.adopt_weights()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """The model holds the global weights inside the context. Rank-local, no communication.

        For evaluation and for saving ``model.state_dict()``; may be entered on rank 0 alone. Values
        are copied, so that parameters keep their memory. ``backward()`` and ``step()`` are refused
        inside.
        """
        self._refuse_if_closed("global_weights()")
        with self._engine.holding_global_weights():
            yield

    def stats(self) -> Stats:
        """Counters of this rank so far. Rank-local, no communication."""
        schedule = self._engine.schedule
        return dataclasses.replace(
            self._stats.snapshot(),
            delay_steps=schedule.delay_steps,
            overlap_steps=schedule.overlap_steps,
        )

    def close(self) -> None:
        """Remove the hooks, and give a Horovod-wrapped optimizer its own behaviour back. Rank-local.

        The model keeps its local weights: call :meth:`flush` first to make them equal on all ranks.
        """
        if self._closed:
            return
        self._closed = True
        self._engine.linger()
        self._release()

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and what this package adds. Rank-local, no communication.

        Per-parameter tensors are the live ones, as in torch. Waits for this rank's own operations in
        flight. The model's ``state_dict()`` holds global weights only inside :meth:`global_weights`.

        Raises:
            UsageError: hooks have already sent gradients of the next step, or parameters were put into
                or taken out of a param group.
        """
        self._engine.parameters.refuse_edits("state_dict()")
        with _writing_state():
            if isinstance(self._engine, SingleProcess):
                if self._engine.flush():
                    self._regroup()
                entry = self._engine.export_checkpoint()
            else:
                self._refuse_between_backward_and_step("state_dict()")
                if (
                    self._engine.training.schedule.events == 0
                    and self._engine.training.schedule.position == 0
                ):
                    self._base.materialise_state(self._family.initial_state)
                entry = checkpoint.export(self._engine)
        packed: dict[str, Any] = super().state_dict()
        packed["state"][ENTRY] = {
            **entry,
            "optimizer": self._base.kind.__qualname__,
            "state_is_initial": self._base.initial_state_places(),
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the base optimizer. Rank-local.

        The model's weights are set too. Ranks are compared at the next ``step()``. A state dict of
        another rank or world size gives global weights and state, and begins a new period.

        Raises:
            ValueError: it belongs to other parameters; nothing has been changed.
            UsageError: parameters were put into or taken out of a param group.
        """
        self._refuse_if_closed("load_state_dict()")
        with _writing_state():
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict["state"])
        # The dictionary may be this optimizer's own, whose tensors are about to be written.
        entry = copy.deepcopy(state.pop(ENTRY, None))
        _check_load(self._engine, self._family, state_dict)
        super().load_state_dict({**state_dict, "state": state})
        self._base.take_over(self.param_groups, self.state)
        self._base.share_with(self)
        self._base.complete_loaded_state()
        _restore(self._engine, self._family, entry)

    def _refuse_between_backward_and_step(self, call: str) -> None:
        if isinstance(self._engine, Coordinator) and self._engine.training.reducer.handed_over:
            raise UsageError(
                f"{call} between backward() and step() at a sync point: the hooks have already sent "
                "gradients of the step. Call it after step()."
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "An ssd_allreduce optimizer cannot be copied or pickled: hooks and operations in flight "
            "belong to this process. Copy or save its state_dict()."
        )

    # -- being an optimizer ----------------------------------------------------------------------

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given to the constructor."""
        return self._base.given

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. Rank-local; call it on all ranks alike, and then :meth:`flush`.

        Args:
            param_group: ``params`` and options. Ranks match tensors by name: give (name, parameter)
                pairs for parameters that were not in ``named_parameters=`` (or Horovod's).

        Raises:
            ValueError: a name is missing or used twice, or an option cannot be honoured.
            TypeError: a parameter cannot be trained.
        """
        if self._constructing:
            super().add_param_group(param_group)
            return
        self._refuse_if_closed("add_param_group()")
        with_names = "param_names" in self.param_groups[0]
        group, names = name_new_group(param_group, self._request.names, with_names)
        refuse_differentiable([group])
        self._family.check_groups([group])
        super().add_param_group(group)
        self._request = dataclasses.replace(self._request, names=names)

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise UsageError(f"{call} after close(). Wrap the base optimizer anew.")


@contextmanager
def _writing_state() -> Iterator[None]:
    """Without autograd, and outside of a caller's inference mode, whose tensors no later step may write."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _release(engine: Coordinator | SingleProcess, base: BaseOptimizer, linger: Callable[[], None]) -> None:
    atexit.unregister(linger)
    try:
        engine.close()
    finally:
        base.release()


def _linger_at_exit(engine: weakref.ref[Coordinator | SingleProcess]) -> None:
    """Ranks that end a little later still need this one's part of what is in flight."""
    alive = engine()
    if alive is not None:
        alive.linger()


def _check_load(engine: Coordinator | SingleProcess, family: Family, state_dict: dict[str, Any]) -> None:
    """Refuse a load through any of the optimizer objects before anything has changed."""
    engine.refuse_load()
    engine.parameters.refuse_edits("load_state_dict()")
    refuse_differentiable(state_dict["param_groups"])
    family.check_groups(state_dict["param_groups"])
    entry = state_dict["state"].get(ENTRY)
    if entry is not None:
        checkpoint.check(entry, engine.parameters, family.base.kind.__qualname__)


def _follow_load(engine: Coordinator | SingleProcess, family: Family, entry: dict[str, Any] | None) -> None:
    """Follow a load through the user's or Horovod's optimizer."""
    with _writing_state():
        if entry is None:
            engine.optimizer_state_loaded()
        else:
            _restore(engine, family, copy.deepcopy(entry))


def _restore(engine: Coordinator | SingleProcess, family: Family, entry: dict[str, Any] | None) -> None:
    if entry is not None:
        family.base.regard_state_as_initial(_initial_places(entry, family))
    if isinstance(engine, SingleProcess):
        engine.load_checkpoint(entry)
    else:
        checkpoint.restore(engine, entry)


def _initial_places(entry: dict[str, Any], family: Family) -> list[int]:
    """The parameters whose loaded state was created for a broadcast."""
    stored: bool | list[int] = entry["state_is_initial"]
    if isinstance(stored, list):
        return stored
    if not stored:
        return []
    # One flag for all parameters is set also where only some had their state created.
    with torch.no_grad():
        return family.base.places_with_state_like(family.initial_state)


def _refuse_wrong_optimizer(kind: type, optimizer: object) -> None:
    if "_allreduce_grad_async" in kind.__dict__:
        raise TypeError(
            "hvd.DistributedOptimizer cannot wrap an ssd_allreduce optimizer. Wrap the other way "
            "round: ssd_allreduce.DistributedOptimizer(hvd.DistributedOptimizer(...))."
        )
    if isinstance(optimizer, DistributedOptimizer):
        raise UsageError(
            "The optimizer is already an ssd_allreduce.DistributedOptimizer; wrapping it twice would "
            "delay twice. Wrap the base optimizer once."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}. Allowed: a torch.optim.Optimizer, bare or "
            "wrapped by hvd.DistributedOptimizer."
        )


def _refuse_live_wrapper(optimizer: torch.optim.Optimizer) -> None:
    if _has_live_wrapper(optimizer):
        # It may be garbage that has not been collected yet.
        gc.collect()
        if _has_live_wrapper(optimizer):
            raise UsageError(
                "The optimizer is already wrapped by an ssd_allreduce.DistributedOptimizer that is still "
                "in use. Call its close() first."
            )


def _has_live_wrapper(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(holder, DistributedOptimizer) and not holder._closed
        for holder in optimizers_sharing_groups(optimizer)
    )


def _other_holders(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Optimizers of the user's that share the groups."""
    return [
        holder
        for holder in optimizers_sharing_groups(optimizer)
        if not isinstance(holder, DistributedOptimizer)
    ]
