"""A thread that moves along what makes no progress by itself, and ends when nothing is left to move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ssd_allreduce.errors import CommunicationError, SSDError


class ProgressThread:
    """Calls a function every so often, as long as it says that something is left to do.

    Args:
        advance: does what can be done now, without waiting; returns whether to call it again. Called
            with the lock held. What it raises ends the thread and is kept for the user's.
        lock: guards what ``advance`` works on.
    """

    def __init__(self, advance: Callable[[], bool], lock: threading.RLock) -> None:
        self._advance = advance
        self._lock = lock
        self._running = False
        self._stopped = False
        self._error: BaseException | None = None

    def wake(self, interval: float) -> None:
        """Start the thread unless it runs or has been stopped. The lock must be held.

        Args:
            interval: seconds between two calls.
        """
        if self._running or self._stopped:
            return
        self._running = True
        thread = threading.Thread(target=self._run, args=(interval,), name="ssd_allreduce-progress")
        thread.daemon = True
        thread.start()

    def stop(self) -> None:
        """Call the function no more. Waits for nobody."""
        self._stopped = True

    def fail(self, error: BaseException) -> None:
        """Call the function no more, for an error that the user's thread has met."""
        self._error = error

    def raise_failure(self) -> None:
        """Raise what has ended the thread, if anything has."""
        if self._error is not None:
            if isinstance(self._error, SSDError):
                raise self._error
            raise CommunicationError(f"The engine failed: {self._error}") from self._error

    def _run(self, interval: float) -> None:
        with torch.no_grad():
            while self._advance_once():
                time.sleep(interval)

    def _advance_once(self) -> bool:
        # Under the lock, so that whoever holds it either sees a thread that will look again, or none.
        with self._lock:
            self._running = False
            if not self._stopped and self._error is None:
                try:
                    self._running = self._advance()
                except BaseException as error:  # noqa: BLE001 - the user's thread must hear of it
                    self._error = error
            return self._running
