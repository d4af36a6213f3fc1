"""Clipping by the norm over all gradients together (``max_grad_norm``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_allreduce.layout import compute_dtype

_TINY = 1e-6


def clip_coefficient(gradients: Sequence[Tensor], scale: float, max_norm: float) -> float:
    """What gradients times ``scale`` have to be multiplied by for a 2-norm of at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``.
    """
    norms = torch._foreach_norm([gradient.to(compute_dtype(gradient.dtype)) for gradient in gradients])
    # On one device: a model may lie on several, and numbers are put together on one alone.
    together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    norm = float(torch.linalg.vector_norm(together)) * scale
    return min(1.0, max_norm / (norm + _TINY))


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> None:
    """Scale the parameters' gradients in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    coefficient = clip_coefficient(gradients, 1.0, max_norm)
    if coefficient < 1.0:
        torch._foreach_mul_(gradients, coefficient)
