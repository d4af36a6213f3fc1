"""Per-tensor hooks, accumulators, and what is in flight.

In each step the hooks are armed in one of three ways: silent; handing over each gradient as it becomes
final (warm-up); adding it to the accumulator and handing that over (sync points of the delay stage).
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ssd_allreduce import layout, ops
from ssd_allreduce.accumulators import Accumulators, Sums
from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.errors import BackwardPassesError, UsageError
from ssd_allreduce.parameters import Parameters
from ssd_allreduce.transport import Pending, Transport
from ssd_allreduce.verdict import Contribution, Verdict
from ssd_allreduce.wire import WireFormat

_WIRE_BYTES = 4
"""Of one element, for putting small operations together. Nothing but speed depends on it."""


class HookMode(enum.Enum):
    """What a hook does when its gradient is final."""

    SILENT = enum.auto()
    REDUCE_GRADIENT = enum.auto()
    REDUCE_ACCUMULATOR = enum.auto()


@dataclass(frozen=True)
class _Wired:
    """One tensor on the wire: what travels, how to undo its compression, and where it goes back."""

    travelling: Tensor
    context: Any
    destination: Tensor


@dataclass
class _Unit:
    """Tensors that are reduced as one operation."""

    name: str
    indices: tuple[int, ...]
    ready: int = 0
    pending: list[Pending] = field(default_factory=list)
    wired: list[_Wired] = field(default_factory=list)


@dataclass
class _Handed:
    """What a gradient was when its hook handed it over."""

    gradient: Tensor
    version: int
    checksum: Tensor | None


class Reducer:
    """Collects gradients from hooks and reduces them.

    Args:
        parameters: the trained parameters.
        transport: access to the engine.
        wire: how gradients travel.
        groups: indices reduced together; tensors in none of them, or all where there are none, are
            one operation each.
        passes: backward passes that make a step's gradient final.
        sparse_as_dense: make sparse gradients dense instead of refusing them.
        period: steps whose sum may travel, for the scale of compressed sums.
        with_squares: whether squares of gradients are summed and reduced too.
    """

    def __init__(
        self,
        parameters: Parameters,
        transport: Transport,
        wire: WireFormat,
        groups: Sequence[tuple[int, ...]] | None,
        passes: int,
        sparse_as_dense: bool,
        period: int,
        with_squares: bool = False,
    ) -> None:
        self._parameters = parameters
        self._transport = transport
        self._wire = wire
        self._announced = passes
        self._sparse_as_dense = sparse_as_dense
        self.set_period(period)
        grouped = list(groups or ())
        members = grouped + [(i,) for i in _outside(grouped, len(parameters))]
        self._units = [_Unit(parameters.names[indices[0]], indices) for indices in members]
        self._unit_of = {index: unit for unit in self._units for index in unit.indices}
        self.mode = HookMode.SILENT
        self.count_passes = True
        self.has_unreduced_gradients = False
        """Whether a backward pass has added to gradients since they were last reduced."""
        self.forbidden: str | None = None
        """Why no backward may run now, for the hooks to say."""
        self._passes = [0] * len(parameters)
        self._handed: dict[int, _Handed] = {}
        self.buffers = Accumulators(parameters, with_squares)
        self._control: list[Pending] = []
        self._sequence_announced = False
        # Autograd has a thread for each device, and the hooks of a model on several run side by side: an
        # operation may not leave while another thread's hook still announces the sequence. Engines take
        # locks of their own inside, and never call back.
        self._handing_over = threading.Lock()
        self._hooks = [self._attach(i, p) for i, p in enumerate(parameters.tensors)]

    def set_period(self, steps: int) -> None:
        """Say how many gradients a sum holds, for the scale of compressed sums."""
        self._compression_scale = float(steps) if self._wire.compresses else 1.0

    @property
    def label(self) -> str:
        """How messages call the optimizer that this reducer serves."""
        first = self._parameters.names[0] if self._parameters.names else "none"
        return f"the optimizer {self._transport.prefix!r} (its first parameter is {first!r})"

    @property
    def unit_names(self) -> list[list[str]]:
        """Names of the tensors in each operation."""
        return [[self._parameters.names[i] for i in unit.indices] for unit in self._units]

    # -- hooks ---------------------------------------------------------------------------------

    def _attach(self, index: int, parameter: Tensor) -> Any:
        # The parameter keeps its hook alive, and must not keep a dropped optimizer alive with it.
        me = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            reducer = me()
            if reducer is not None:
                reducer._on_gradient(index, parameter)

        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def linger(self, seconds: float) -> None:
        """Give what is in flight a moment to end, so that ranks a little behind are not cut off."""
        self._transport.linger([*self._in_flight(), *self._control], seconds)

    def observe(self) -> None:
        """Let a trace know what of the operations in flight is done."""
        self._transport.observe(self._in_flight())

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if self.forbidden is not None:
            raise UsageError(self.forbidden)
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            gradient = self._make_dense(index, parameter)
        self._transport.advance()
        self._transport.tracer.first_hook()
        self.has_unreduced_gradients = True
        if not self.count_passes:
            return
        self._passes[index] += 1
        if self._passes[index] > self._announced:
            raise BackwardPassesError(
                f"Parameter {self._parameters.names[index]!r} of {self.label} has received gradients from "
                f"{self._passes[index]} backward passes since the last step(), and "
                f"{self._announced} were announced. Announce them with backward_passes_per_step=, "
                "or pass issue='step' so that a gradient is final only at step()."
            )
        if self._passes[index] == self._announced and self.mode is not HookMode.SILENT:
            span = self._transport.tracer.span(f"hook {self._parameters.names[index]}")
            with self._handing_over, torch.no_grad(), span:
                self._on_final_gradient(index, gradient)

    def _make_dense(self, index: int, parameter: Tensor) -> Tensor:
        if not self._sparse_as_dense:
            raise TypeError(
                f"The gradient of parameter {self._parameters.names[index]!r} is sparse "
                f"({parameter.grad.layout if parameter.grad is not None else None}); accumulated "
                "gradients travel as dense tensors. Allowed: dense gradients. Build the layer with "
                "sparse=False, or wrap with hvd.DistributedOptimizer(..., sparse_as_dense=True)."
            )
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense()
        return parameter.grad

    def _on_final_gradient(self, index: int, gradient: Tensor) -> None:
        if gradient.requires_grad:
            raise UsageError(
                f"The gradient of parameter {self._parameters.names[index]!r} has a graph of its own "
                "(backward with create_graph=True) and cannot be reduced from its hook. Pass "
                "issue='step' and detach it before step()."
            )
        unit = self._unit_of[index]
        if self.mode is HookMode.REDUCE_GRADIENT:
            self._handed[index] = _Handed(gradient, gradient._version, None)
        else:
            self.buffers.add(index, gradient)
            checksum = ops.checksum([gradient])
            self._handed[index] = _Handed(gradient, gradient._version, checksum)
        unit.ready += 1
        if unit.ready == len(unit.indices):
            if self.mode is HookMode.REDUCE_GRADIENT:
                self._start_gradients(unit)
            else:
                self._start_accumulators(unit)

    # -- the step's gradients --------------------------------------------------------------------

    @property
    def handed_over(self) -> bool:
        """Whether hooks have taken any gradient of this step."""
        return bool(self._handed)

    @property
    def accumulated_by_hooks(self) -> frozenset[int]:
        """Indices of the tensors whose gradient of this step is already in the accumulator."""
        if self.mode is not HookMode.REDUCE_ACCUMULATOR:
            return frozenset()
        return frozenset(self._handed)

    def forget_passes(self) -> None:
        """Start counting backward passes anew: gradients have been zeroed, or a step was made."""
        if any(self._passes):
            self._passes = [0] * len(self._passes)

    def begin_step(self) -> None:
        """Forget what the hooks recorded of the step that has ended."""
        self.forget_passes()
        self._handed = {}
        for unit in self._units:
            unit.ready = 0

    def changed_gradients(self) -> list[str]:
        """Names of the parameters whose gradient changed after its hook had handed it over.

        Identity catches a replaced gradient. Version counters miss ``unscale_`` and writes through
        ``.data``, so at sync points the bits are compared; in warm-up the engine itself writes into
        the gradient, and the version counter is all there is.
        """
        if not self._handed:
            return []
        changed: list[int] = []
        compare: list[int] = []
        for index, handed in self._handed.items():
            gradient = self._parameters.tensors[index].grad
            if gradient is not handed.gradient:
                changed.append(index)
            elif handed.checksum is not None:
                compare.append(index)
            elif gradient._version != handed.version:
                changed.append(index)
        changed += self._changed_bits(compare)
        return [self._parameters.names[index] for index in sorted(changed)]

    def _changed_bits(self, indices: list[int]) -> list[int]:
        """Those of the handed-over gradients whose checksum has changed. Waits once for each device."""
        changed: list[int] = []
        for device in {self._handed[index].gradient.device for index in indices}:
            here = [index for index in indices if self._handed[index].gradient.device == device]
            handed = [self._handed[index] for index in here]
            before = torch.cat([h.checksum for h in handed if h.checksum is not None])
            differs = (before != ops.checksum([h.gradient for h in handed])).tolist()
            changed += [index for index, one in zip(here, differs, strict=True) if one]
        return changed

    # -- warm-up: gradients travel ---------------------------------------------------------------

    def reduce_gradients(self, contribute: Contribution) -> None:
        """Hand over every gradient that the hooks have not. Collective.

        Args:
            contribute: whether the gradients count; if not, they are replaced by zeros.
        """
        for unit in self._units:
            if unit.pending:
                continue
            for index in unit.indices:
                parameter = self._parameters.tensors[index]
                if parameter.grad is None:
                    parameter.grad = layout.zeros_like(parameter)
                elif isinstance(contribute, Verdict):
                    # Not by a product: infinity times 0 is no number.
                    parameter.grad.masked_fill_(contribute.overflowed, 0.0)
                elif not contribute:
                    parameter.grad.zero_()
                elif parameter.grad.layout is not torch.strided:
                    self._make_dense(index, parameter)
            self._start_gradients(unit)

    def finish_gradients(self) -> None:
        """Wait until every parameter's ``grad`` holds the reduced gradient."""
        self._finish_units()
        for unit in self._units:
            for index, wired in zip(unit.indices, unit.wired, strict=True):
                result = self._wire.compression.decompress(wired.travelling, wired.context)
                if result is not wired.destination:
                    wired.destination.copy_(result.view(wired.destination.shape))
                gradient = self._parameters.tensors[index].grad
                assert gradient is not None
                if gradient.data_ptr() != wired.destination.data_ptr():
                    gradient.copy_(_shaped(wired.destination, self._parameters.tensors[index]))
        self._clear_units()
        # What follows may edit the reduced gradients; the hooks' records are of the local ones.
        self._handed = {}
        self.has_unreduced_gradients = False

    def discard_gradients(self) -> None:
        """Wait for the gradients in flight without using them."""
        self._finish_units()
        self._clear_units()
        self._handed = {}

    def _wire_gradient(self, index: int) -> _Wired:
        parameter = self._parameters.tensors[index]
        gradient = parameter.grad
        assert gradient is not None
        flat = _engine_view(_flat(layout.matched(gradient, parameter)))
        supported = flat.dtype in self._transport.communicator.capabilities.dtypes
        travelling, context = self._wire.compression.compress(flat if supported else flat.float())
        return _Wired(travelling, context, flat)

    # -- delay stage: accumulators travel --------------------------------------------------------

    def reduce_accumulators(self) -> None:
        """Hand over every accumulator that the hooks have not, and begin new ones. Collective."""
        if self.buffers.empty and not self._handed:
            self.buffers.begin_with_zeros()
        for unit in self._units:
            if not unit.pending:
                self._start_accumulators(unit)
        self.buffers.depart()

    def finish_accumulators(self) -> Sums:
        """Wait for the sums over all ranks. May be called repeatedly."""
        assert self.buffers.travelling is not None
        self._finish_units()
        for unit in self._units:
            for wired in unit.wired:
                result = self._wire.compression.decompress(wired.travelling, wired.context)
                if result is not wired.destination:
                    wired.destination.copy_(result).mul_(self._compression_scale)
        self._clear_units()
        return self.buffers.travelling

    def _wire_accumulator(self, index: int) -> _Wired:
        flat = _engine_view(_flat(self.buffers.current.gradients[index]))
        # A sum of k half-precision gradients overflows where one does not.
        scaled = flat / self._compression_scale if self._compression_scale != 1.0 else flat
        travelling, context = self._wire.compression.compress(scaled)
        return _Wired(travelling, context, flat)

    # -- control row -----------------------------------------------------------------------------

    def send_control(self, sums: Tensor, extremes: Tensor) -> None:
        """Start the two short allreduces of the control row. Collective."""
        assert not self._control
        # The next operation of a unit belongs to the next event.
        self._sequence_announced = False
        self._control = [
            self._transport.start([sums], "control.sum", ReduceOp.SUM),
            self._transport.start([extremes], "control.max", ReduceOp.MAX),
        ]

    def finish_control(self) -> tuple[Tensor, Tensor]:
        """Wait for the control row; returns the two reduced vectors."""
        self._transport.finish(self._control)
        sums, extremes = (pending.tensors[0] for pending in self._control)
        self._control = []
        return sums, extremes

    # -- units -----------------------------------------------------------------------------------

    def _start_gradients(self, unit: _Unit) -> None:
        self._announce("gradient")
        unit.wired = [self._wire_gradient(index) for index in unit.indices]
        self._start(unit, [wired.travelling for wired in unit.wired], "gradient", self._wire.op)

    def _start_accumulators(self, unit: _Unit) -> None:
        squares = self.buffers.current.squares
        self._announce(*(["accumulated"] if squares is None else ["accumulated", "squares"]))
        unit.wired = [self._wire_accumulator(index) for index in unit.indices]
        self._start(unit, [wired.travelling for wired in unit.wired], "accumulated", ReduceOp.SUM)
        if squares is not None:
            # Never compressed: half precision has not the range of a square.
            flat = [_engine_view(_flat(squares[index])) for index in unit.indices]
            self._start(unit, flat, "squares", ReduceOp.SUM)

    def _announce(self, *suffixes: str) -> None:
        """Before the first operation of a sync event: all of them, as backward usually comes to them."""
        if self._sequence_announced:
            return
        self._sequence_announced = True
        sizes = [sum(self._parameters.tensors[i].numel() for i in unit.indices) for unit in self._units]
        units = reversed(list(zip(self._units, sizes, strict=True)))
        names = [(f"{unit.name}.{suffix}", size) for unit, size in units for suffix in suffixes]
        control = [("control.sum", 0), ("control.max", 0)]
        self._transport.announce([(name, _WIRE_BYTES * size) for name, size in names] + control)

    def _start(self, unit: _Unit, tensors: list[Tensor], suffix: str, op: ReduceOp) -> None:
        prescale, postscale = self._wire.factors
        name = f"{unit.name}.{suffix}"
        unit.pending.append(self._transport.start(tensors, name, op, prescale, postscale))

    def _in_flight(self) -> list[Pending]:
        return [pending for unit in self._units for pending in unit.pending]

    def _finish_units(self) -> None:
        self._transport.finish(self._in_flight())

    def _clear_units(self) -> None:
        for unit in self._units:
            unit.pending = []
            unit.wired = []


def _outside(groups: Sequence[tuple[int, ...]], count: int) -> list[int]:
    grouped = {index for group in groups for index in group}
    return [index for index in range(count) if index not in grouped]


def _engine_view(tensor: Tensor) -> Tensor:
    """The same memory with a version counter of its own: what an engine writes is no edit."""
    return tensor.data


def _flat(tensor: Tensor) -> Tensor:
    return layout.flat_view(tensor) if layout.is_dense(tensor) else tensor.contiguous()


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """A flat run of memory seen in the shape and layout of the parameter that it was made for."""
    if flat.shape == parameter.shape:
        return flat
    return flat.as_strided(parameter.shape, layout.empty_like(parameter).stride())
