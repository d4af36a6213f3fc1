"""Averages a model's floating-point buffers (BatchNorm's running statistics) over the ranks.

Buffers are changed by forward passes and differ between ranks, as in any data-parallel training. Their
copies travel with sync events; on arrival each buffer moves by what the mean differs from its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.errors import UsageError
from ssd_allreduce.layout import compute_dtype
from ssd_allreduce.transport import Pending, Transport
from ssd_allreduce.weight_guard import some_names

When = Literal["sync", "flush", "never"]


@dataclass(frozen=True)
class _Layout:
    """What travels of one buffer, on which ranks must agree; and where from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(compare=False)

    @staticmethod
    def of(buffer: Tensor) -> _Layout:
        return _Layout(tuple(buffer.shape), compute_dtype(buffer.dtype), buffer.device)


class BufferAverager:
    """The buffers of one model.

    They are looked up by name whenever they are needed: a forward pass (``self.ema = ...``), a load
    (``assign=True``) or a conversion (``half()``) puts other tensors in the place of those seen before.

    Args:
        transport: access to the engine.
        model: whose buffers; not needed with ``"never"``.
        when: ``"sync"``: with every sync event and in ``flush()``; ``"flush"``: there only; ``"never"``.
    """

    def __init__(self, transport: Transport, model: torch.nn.Module | None, when: When) -> None:
        self._transport = transport
        self._model = None if when == "never" else model
        self.with_sync_events = when == "sync"
        self._names = list(self._present())
        self._layouts: list[_Layout] = []
        self._sent: list[Tensor] = []
        self._means: list[Tensor] = []
        self._pending: list[Pending] = []

    def _present(self) -> dict[str, Tensor]:
        pairs = () if self._model is None else self._model.named_buffers()
        return {name: buffer for name, buffer in pairs if buffer.is_floating_point()}

    def describe(self) -> list[tuple[str, str]]:
        """Name, shape and type of every buffer; from here on those on which ranks must agree."""
        present = self._present()
        self._names, self._layouts = list(present), [_Layout.of(buffer) for buffer in present.values()]
        lines = [("buffers averaged at sync", str(self.with_sync_events))]
        for name, layout in zip(self._names, self._layouts, strict=True):
            lines.append((f"the shape of the averaged buffer {name!r}", str(layout.shape)))
            lines.append((f"the dtype in which the averaged buffer {name!r} travels", str(layout.dtype)))
        return lines

    def find_change(self, call: str) -> UsageError | None:
        """An error that names the buffers that are others than those described, if any."""
        agreed = dict(zip(self._names, self._layouts, strict=True))
        present = {name: _Layout.of(buffer) for name, buffer in self._present().items()}
        if present == agreed:
            return None
        names = [name for name in {**agreed, **present} if agreed.get(name) != present.get(name)]
        return UsageError(
            f"{call}: the averaged buffers {some_names(names)} of model= were added, removed, or given "
            "another shape or precision since the ranks agreed on them, and have no mean over the ranks. "
            "Allowed: other values, and other tensors of the same shape. Before a change of another kind "
            "call flush(), and after it adopt_weights(), all of it on all ranks. To go on from here, load a "
            "checkpoint."
        )

    def start(self) -> None:
        """Send copies with a sync event. Collective."""
        if self.with_sync_events and self._names:
            self._send()

    def _send(self) -> None:
        present = self._present()
        pairs = zip(self._names, self._layouts, strict=True)
        self._sent = [_copy(present.get(name), layout) for name, layout in pairs]
        self._means = [copy.clone() for copy in self._sent]
        self._transport.announce(
            [
                (f"buffer.{name}", mean.numel() * mean.element_size())
                for name, mean in zip(self._names, self._means, strict=True)
            ]
        )
        self._pending = [
            self._transport.start([mean.reshape(-1)], f"buffer.{name}", ReduceOp.AVERAGE)
            for name, mean in zip(self._names, self._means, strict=True)
        ]

    def wait(self) -> None:
        """Wait for the means in flight. Rank-local."""
        self._transport.finish(self._pending)
        self._pending = []

    def apply(self) -> None:
        """Move each buffer by what the mean differs from the copy that was sent."""
        for buffer, sent, mean in self._arrived():
            buffer.add_((mean - sent).to(buffer.device, buffer.dtype))
        self.discard()

    def _arrived(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Buffers as they are, what was sent of them, and its mean.

        Without those changed since in a way that :meth:`find_change` will tell at the next sync event,
        where all ranks hear of it.
        """
        present = self._present()
        triples = zip(self._names, self._sent, self._means, strict=True) if self._sent else ()
        return [
            (present[name], sent, mean)
            for name, sent, mean in triples
            if name in present and present[name].shape == sent.shape
        ]

    def discard(self) -> None:
        """Forget what has arrived."""
        self._sent, self._means = [], []

    def average_now(self) -> None:
        """Set every buffer to its mean over the ranks. Collective."""
        if not self._names:
            return
        self._send()
        self.wait()
        for buffer, _, mean in self._arrived():
            buffer.copy_(mean)
        self.discard()

    def export_state(self) -> dict[str, Any]:
        """What has arrived and waits for its completion, for a checkpoint."""
        return {"sent_buffers": list(self._sent), "mean_buffers": list(self._means)}

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo :meth:`export_state`. Without averaging at sync events here, nothing waits for one."""
        self._sent = list(state["sent_buffers"]) if self.with_sync_events else []
        self._means = list(state["mean_buffers"]) if self.with_sync_events else []


def _copy(buffer: Tensor | None, layout: _Layout) -> Tensor:
    """What travels of a buffer.

    Zeros where it has changed: this rank refuses the event, as does then every other, and sends its part
    only so that nobody waits for it.
    """
    if buffer is None or _Layout.of(buffer) != layout:
        return torch.zeros(layout.shape, dtype=layout.dtype, device=layout.device)
    return buffer.detach().to(layout.dtype, copy=True).contiguous()


def check_average_buffers(when: str, model: object) -> When:
    """The option, checked together with the model that it needs.

    Raises:
        ValueError, TypeError: a value that is not known, or no model to take buffers from.
    """
    allowed: Sequence[str] = get_args(When)
    if when not in allowed:
        raise ValueError(f"average_buffers={when!r} is not known. Allowed: {', '.join(map(repr, allowed))}.")
    if when != "never" and not isinstance(model, torch.nn.Module):
        raise TypeError(f"average_buffers={when!r} needs model=, the module whose buffers are averaged.")
    return when  # type: ignore[return-value]
