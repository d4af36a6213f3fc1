"""Whether a step's gradients count: known to the host at once, or known to the device alone so far.

A GradScaler leaves what it found on the device. Reading it there and then would keep the host waiting
until the GPU has made the whole backward pass, in every step. So the device's own number gates what the
step does to tensors, and the host asks for it as late as it can.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

deferring_devices = frozenset({"cuda"})
"""Types of the devices that run behind the host. Tests put the CPU in their place."""


class Verdict:
    """What a GradScaler found in one step's gradients.

    Args:
        found_inf: one float32, not 0 where a gradient is not finite.
    """

    def __init__(self, found_inf: Tensor) -> None:
        self.found_inf = found_inf.detach().reshape(())
        # Into pinned memory; nobody waits.
        self._on_host = self.found_inf.to("cpu", non_blocking=True, copy=True)
        self._copied: torch.cuda.Event | None = None
        if self.found_inf.is_cuda:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.found_inf.device))

    def wait(self) -> bool:
        """Whether the gradients are finite. Waits until the device has come to the end of their backward."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host) == 0.0

    @functools.cached_property
    def overflowed(self) -> Tensor:
        """The opposite as the device knows it, one boolean."""
        return self.found_inf != 0.0


Contribution: TypeAlias = bool | Verdict
"""Whether a rank's gradients of a step count."""


def contributes(contribution: Contribution) -> bool:
    """Whether the gradients count, waiting for the device where it alone knows so far."""
    return contribution.wait() if isinstance(contribution, Verdict) else contribution


def gate_of(contribution: Contribution) -> Tensor | None:
    """What the kernels are to look at, if the host does not know."""
    return contribution.found_inf if isinstance(contribution, Verdict) else None


def can_be_deferred(found_inf: object, scale: object, tensors: Sequence[Tensor]) -> bool:
    """Whether a step over these parameters and gradients can be gated by the device alone.

    All of it lies on one device that runs behind the host; a scaler over several devices, and one that
    saw no gradient and hands over a plain 0, speak to the host.
    """
    if not isinstance(found_inf, Tensor) or found_inf.device.type not in deferring_devices:
        return False
    here = found_inf.device
    return (
        (found_inf.dtype, found_inf.numel()) == (torch.float32, 1)
        and (scale is None or (isinstance(scale, Tensor) and scale.device == here))
        and all(tensor.device == here and tensor.layout is torch.strided for tensor in tensors)
    )


def unscale_on_device(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Divide gradients by a scale that only their device knows, without rounding its inverse to theirs."""
    inverse = scale.double().reciprocal()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, alike in by_dtype.items():
        if dtype == torch.float64:
            torch._foreach_mul_(alike, inverse)
        else:
            # What torch's unscale_() calls. A product with a tensor on a GPU would round the inverse to half.
            ignored = torch.zeros_like(inverse, dtype=torch.float32)
            torch._amp_foreach_non_finite_check_and_unscale_(alike, ignored, inverse.float())
