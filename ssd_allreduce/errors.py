"""Exceptions of the package. Every one says what was found, what is allowed and what to do."""

from __future__ import annotations


class SSDError(RuntimeError):
    """Base class of the errors that training with this package can raise."""


class RankMismatchError(SSDError):
    """Ranks that must agree (settings, names, shapes, weights, progress) do not."""


class SequenceMismatchError(RankMismatchError):
    """Ranks were about to reduce different tensors through an engine that matches them by order.

    Nothing was sent, and nothing more can be: restart from the last checkpoint.
    """


class GradientChangedError(SSDError):
    """A gradient was changed after its allreduce had been issued."""


class WeightsChangedError(SSDError):
    """The model's weights were changed by something other than this optimizer."""


class BackwardPassesError(SSDError):
    """More backward passes reached a parameter in one step than were announced."""


class UsageError(SSDError):
    """A call was made at a moment at which it cannot be honoured."""


class CommunicationError(SSDError):
    """The communication engine reported a failure."""


class CommunicationTimeoutError(CommunicationError):
    """An allreduce did not complete within ``timeout`` seconds."""


class PeerFailedError(SSDError):
    """Another rank refused to go on; its own message says why."""
