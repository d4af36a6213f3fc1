"""The control row: what ranks tell each other beside the gradients, with every sync event.

Two short float64 vectors travel. One is summed: per step of the period how many ranks contributed, how
many ranks flush, how many have failed, on how many other parameters are trainable than before, and how
many have called ``synchronize()``. One takes the maximum of ``x`` and of ``-x``: equal extremes mean that
all ranks hold the same number, and unequal ones name both.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_allreduce.group_options import Row


class Failure(enum.IntEnum):
    """Why a rank cannot go on, as a number that can travel."""

    NONE = 0
    GRADIENT_CHANGED = 1
    WEIGHTS_CHANGED = 2
    GRADIENT_SCALER = 3
    OTHER = 4
    BUFFERS_CHANGED = 5


FAILURE_TEXT = {
    Failure.GRADIENT_CHANGED: "a gradient was changed after its allreduce had been issued",
    Failure.WEIGHTS_CHANGED: "weights were changed by something other than this optimizer",
    Failure.GRADIENT_SCALER: "a GradScaler was used with issue='backward'",
    Failure.OTHER: "step() was refused",
    Failure.BUFFERS_CHANGED: "averaged buffers are others than those that the ranks agreed on",
}


@dataclass(frozen=True)
class ControlRow:
    """One rank's part.

    Attributes:
        event: number of the sync event.
        settings_digest: digest of everything on which ranks agreed at the first step.
        steps: for each step of this rank's period, the options in force, and whether the rank
            contributed a gradient.
        flushing: whether the rank is inside ``flush()``.
        failure: why the rank refuses to go on, if it does.
        regrouping: whether other parameters are trainable on the rank than when ranks agreed on them.
        synchronizing: whether the rank is inside ``synchronize()``, after which its gradients may be edited.
    """

    event: int
    settings_digest: int
    steps: Sequence[tuple[Row, bool]]
    flushing: bool = False
    failure: Failure = Failure.NONE
    regrouping: bool = False
    synchronizing: bool = False


@dataclass(frozen=True)
class ControlResult:
    """What all ranks said together.

    Attributes:
        counts: ranks that contributed, for each step of the period.
        options: the options for each step: the maximum over the ranks, element by element.
        differing: (step, column, smallest, largest) of options that differ between ranks.
        events: smallest and largest event number.
        digests: smallest and largest settings digest.
        flushing: ranks inside ``flush()``.
        failures: ranks that refuse to go on.
        failure: the failure of the highest failing rank, and that rank.
        regrouping: ranks on which other parameters are trainable than before.
        synchronizing: ranks inside ``synchronize()``.
    """

    counts: list[int]
    options: list[Row]
    differing: list[tuple[int, int, float, float]]
    events: tuple[int, int]
    digests: tuple[int, int]
    flushing: int
    failures: int
    failure: tuple[Failure, int]
    regrouping: int
    synchronizing: int


_FAILURE_BASE = len(Failure)


class ControlCodec:
    """Encodes and decodes control rows of one length.

    Args:
        period: steps in a period.
        columns: numeric options of one step.
        rank: this rank.
    """

    def __init__(self, period: int, columns: int, rank: int) -> None:
        self._period = period
        self._columns = columns
        self._rank = rank

    def encode(self, row: ControlRow) -> tuple[Tensor, Tensor]:
        """The vector to be summed and the one to be maximised."""
        counts = [0.0] * self._period
        # A step that this rank has not made must not take part in the maximum, either way.
        options = torch.full((2, self._period, self._columns), -math.inf, dtype=torch.float64)
        for position, (values, contributed) in enumerate(row.steps):
            counts[position] = float(contributed)
            own = torch.tensor(values, dtype=torch.float64)
            options[0, position] = own
            options[1, position] = -own
        failed = row.failure is not Failure.NONE
        flags = map(float, (row.flushing, failed, row.regrouping, row.synchronizing))
        sums = torch.tensor([*counts, *flags], dtype=torch.float64)
        code = self._rank * _FAILURE_BASE + int(row.failure) if failed else -1
        shared = torch.tensor([row.event, row.settings_digest], dtype=torch.float64)
        failure = torch.tensor([code], dtype=torch.float64)
        return sums, torch.cat([shared, -shared, failure, options.reshape(-1)])

    def decode(self, sums: Tensor, extremes: Tensor) -> ControlResult:
        """The reduced vectors, read."""
        totals = [round(value) for value in sums.tolist()]
        head = extremes[:5].tolist()
        code = int(head[4])
        options = extremes[5:].reshape(2, self._period, self._columns)
        largest: list[list[float]] = options[0].tolist()
        smallest: list[list[float]] = (-options[1]).tolist()
        return ControlResult(
            counts=totals[: self._period],
            options=[tuple(row) for row in largest],
            differing=_differences(smallest, largest),
            events=(-int(head[2]), int(head[0])),
            digests=(-int(head[3]), int(head[1])),
            flushing=totals[self._period],
            failures=totals[self._period + 1],
            failure=(Failure.NONE, -1)
            if code < 0
            else (Failure(code % _FAILURE_BASE), code // _FAILURE_BASE),
            regrouping=totals[self._period + 2],
            synchronizing=totals[self._period + 3],
        )


def _differences(
    smallest: list[list[float]], largest: list[list[float]]
) -> list[tuple[int, int, float, float]]:
    return [
        (position, column, low, high)
        for position, (lows, highs) in enumerate(zip(smallest, largest, strict=True))
        for column, (low, high) in enumerate(zip(lows, highs, strict=True))
        # Where no rank has made the step, the extremes are +inf and -inf.
        if low < high
    ]
