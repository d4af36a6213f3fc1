"""Averages a model's floating-point buffers (BatchNorm's running statistics) over the ranks.

Buffers are changed by forward passes and differ between ranks, as in any data-parallel training. Their
copies travel with sync events; on arrival each buffer moves by what the mean differs from its copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ssd_allreduce.communicators.protocol import ReduceOp
from ssd_allreduce.layout import compute_dtype
from ssd_allreduce.transport import Pending, Transport

When = Literal["sync", "flush", "never"]


class BufferAverager:
    """The buffers of one model.

    Args:
        transport: access to the engine.
        model: whose buffers; not needed with ``"never"``.
        when: ``"sync"``: with every sync event and in ``flush()``; ``"flush"``: there only; ``"never"``.
    """

    def __init__(self, transport: Transport, model: torch.nn.Module | None, when: When) -> None:
        self._transport = transport
        self._with_sync_events = when == "sync"
        pairs = [] if model is None or when == "never" else list(model.named_buffers())
        floating = [(name, buffer) for name, buffer in pairs if buffer.is_floating_point()]
        self.names = [name for name, _ in floating]
        self._buffers = [buffer for _, buffer in floating]
        self._sent: list[Tensor] = []
        self._means: list[Tensor] = []
        self._pending: list[Pending] = []

    def describe(self) -> list[tuple[str, str]]:
        """Name and shape of every buffer, on which ranks must agree."""
        pairs = zip(self.names, self._buffers, strict=True)
        lines = [(f"the shape of the averaged buffer {name!r}", str(tuple(b.shape))) for name, b in pairs]
        return [("buffers averaged at sync", str(self._with_sync_events)), *lines]

    def start(self) -> None:
        """Send copies with a sync event. Collective."""
        if self._with_sync_events and self._buffers:
            self._send()

    def _send(self) -> None:
        self._sent = [b.detach().to(compute_dtype(b.dtype), copy=True).contiguous() for b in self._buffers]
        self._means = [copy.clone() for copy in self._sent]
        self._transport.announce(
            [
                (f"buffer.{name}", mean.numel() * mean.element_size())
                for name, mean in zip(self.names, self._means, strict=True)
            ]
        )
        self._pending = [
            self._transport.start([mean.reshape(-1)], f"buffer.{name}", ReduceOp.AVERAGE)
            for name, mean in zip(self.names, self._means, strict=True)
        ]

    def wait(self) -> None:
        """Wait for the means in flight. Rank-local."""
        self._transport.finish(self._pending)
        self._pending = []

    def apply(self) -> None:
        """Move each buffer by what the mean differs from the copy that was sent."""
        for buffer, sent, mean in zip(self._buffers, self._sent, self._means, strict=bool(self._sent)):
            buffer.add_((mean - sent).to(buffer.dtype))
        self.discard()

    def discard(self) -> None:
        """Forget what has arrived."""
        self._sent, self._means = [], []

    def average_now(self) -> None:
        """Set every buffer to its mean over the ranks. Collective."""
        if not self._buffers:
            return
        self._send()
        self.wait()
        for buffer, mean in zip(self._buffers, self._means, strict=True):
            buffer.copy_(mean)
        self.discard()

    def export_state(self) -> dict[str, Any]:
        """What has arrived and waits for its completion, for a checkpoint."""
        return {"sent_buffers": list(self._sent), "mean_buffers": list(self._means)}

    def import_state(self, state: dict[str, Any]) -> None:
        """Undo :meth:`export_state`."""
        self._sent = list(state["sent_buffers"])
        self._means = list(state["mean_buffers"])


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
