"""Sends the control row with each sync event, and refuses what the ranks' rows say is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from ssd_allreduce.agreement import text_digest
from ssd_allreduce.buffers import BufferAverager
from ssd_allreduce.control import FAILURE_TEXT, ControlCodec, ControlResult, ControlRow, Failure
from ssd_allreduce.errors import PeerFailedError, RankMismatchError, UsageError
from ssd_allreduce.group_options import GroupOptions, Row
from ssd_allreduce.reducer import Reducer


class ControlChannel:
    """The control rows of one optimizer.

    Args:
        reducer: sends and receives the vectors beside the tensors.
        options: names the numeric options of a step.
        rank: this rank.
        buffers: travel with the rows.
    """

    def __init__(self, reducer: Reducer, options: GroupOptions, rank: int, buffers: BufferAverager) -> None:
        self._reducer = reducer
        self._options = options
        self._rank = rank
        self._buffers = buffers
        self._warned = False
        self.settings_digest = 0
        """Digest of what the ranks agreed on; differs where one has agreed on something else since."""
        self.loads = 0
        """Loads of optimizer state since; ranks that have not all loaded differ in it."""
        self.regrouping = False
        """Whether other parameters are trainable on this rank than when ranks agreed on them."""
        self.arrived: tuple[Tensor, Tensor] | None = None
        """The row in flight, once it has been waited for early."""

    def _codec(self, period: int) -> ControlCodec:
        return ControlCodec(period, len(self._options), self._rank)

    def send(
        self,
        event: int,
        period: int,
        steps: Sequence[tuple[Row, bool]],
        flushing: bool = False,
        failure: Failure = Failure.NONE,
        synchronizing: bool = False,
    ) -> None:
        """Start this rank's part of the row of a sync event whose period has at most so many steps."""
        digest = text_digest(f"{self.settings_digest} {self.loads}")
        row = ControlRow(event, digest, steps, flushing, failure, self.regrouping, synchronizing)
        self._reducer.send_control(*self._codec(period).encode(row))
        self._buffers.start()

    def wait(self) -> None:
        """Wait for the row in flight without reading it."""
        if self.arrived is None:
            self.arrived = self._reducer.finish_control()
            self._buffers.wait()

    def discard(self) -> None:
        """Forget a row that has arrived, and what came with it."""
        self.arrived = None
        self._buffers.discard()

    def receive(self, event: int, period: int) -> ControlResult:
        """Wait for the row in flight and read it.

        Raises:
            PeerFailedError: a rank refuses to go on.
            RankMismatchError: ranks are at different events, or have agreed on different settings.
            UsageError: a rank may edit the reduced gradient, which another uses as it is.
        """
        self.wait()
        assert self.arrived is not None
        result = self._codec(period).decode(*self.arrived)
        _refuse_failures(result, event)
        _refuse_mismatch(result, event)
        _refuse_edits_beside_flush(result)
        self._buffers.apply()
        self.discard()
        self._warn_of_differing_options(result)
        return result

    def _warn_of_differing_options(self, result: ControlResult) -> None:
        if not result.differing or self._warned:
            return
        self._warned = True
        _, column, low, high = result.differing[0]
        warnings.warn(
            f"{self._options.name(column)} differs between ranks: {low!r} on one and {high!r} on another. "
            "All ranks use the larger. Drive schedulers by values that are equal on all ranks (reduce "
            "a validation loss over the ranks first).",
            stacklevel=2,
        )


def _refuse_failures(result: ControlResult, event: int) -> None:
    if result.failures:
        failure, rank = result.failure
        raise PeerFailedError(
            f"Rank {rank} refused to go on at sync event {event} because {FAILURE_TEXT[failure]}; its own "
            "error says more. Training has ended on all ranks; mend the cause, or load a checkpoint."
        )


def _refuse_mismatch(result: ControlResult, event: int) -> None:
    low, high = result.events
    if low != high:
        raise RankMismatchError(
            f"Ranks are at different sync events, from {low} to {high}; this rank is at {event}. They "
            "loaded different checkpoints, or one of them skipped step(), or called hvd.join(), which "
            "would leave its weights behind: call flush() on all ranks where data is uneven, and load "
            "the same checkpoint on all ranks."
        )
    if result.digests[0] != result.digests[1]:
        raise RankMismatchError(
            f"At sync event {event} ranks work with different settings: one of them was constructed or "
            "loaded anew. Construct and load on all ranks alike."
        )


def _refuse_edits_beside_flush(result: ControlResult) -> None:
    # A rank in flush() steps with the mean at once, and cannot know what others make of it.
    if result.flushing and result.synchronizing:
        raise UsageError(
            f"{result.synchronizing} rank(s) called synchronize() in a step of the warm-up stage in which "
            f"{result.flushing} other(s), whose data has ended, are inside flush(): gradients edited after "
            "synchronize() would leave the ranks with different weights. Pass max_grad_norm= to clip, or "
            "issue='step' and edit the local gradients, or make equally many steps on all ranks until "
            "warm-up is over."
        )
