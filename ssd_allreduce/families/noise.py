"""The gradient noise that a mean over many samples no longer shows.

A second moment fed with the square of a mean over n = N k gradients is too small: a synchronous step's
mean is over N, and has more noise. The noise is estimated from the accumulated squares, and what is
missing of it is put back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssd_allreduce.update_family import Replay


def mean_gradient(replay: Replay, index: int) -> Tensor:
    """The gradient of the global update for one parameter, float32 at least."""
    return replay.sums[index] / replay.divisor


def gradient_variance(replay: Replay, index: int) -> Tensor:
    """Variance of a single gradient, element by element; zero where only one was summed."""
    n = replay.contributions
    assert replay.squares is not None
    if n == 1:
        return torch.zeros_like(replay.squares[index])
    mean = replay.sums[index] / n
    variance = (replay.squares[index] / n - mean.square()).clamp_(min=0.0)
    return variance.mul_(n / (n - 1) * replay.gradient_scale**2)


def missing_noise(replay: Replay, step: int) -> float:
    """What of the variance a synchronous step's mean has more than the mean over the whole period."""
    return 1.0 / replay.counts[step] - 1.0 / replay.contributions
