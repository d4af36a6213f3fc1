"""A thread that moves along what makes no progress by itself, and ends when nothing is left to move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class ProgressThread:
    """Calls a function every so often, as long as it says that something is left to do.

    Args:
        advance: does what can be done now, without waiting; returns whether to call it again. Called
            with the lock held. Must not raise.
        lock: guards what ``advance`` works on.
    """

    def __init__(self, advance: Callable[[], bool], lock: threading.RLock) -> None:
        self._advance = advance
        self._lock = lock
        self._running = False

    def wake(self, interval: float) -> None:
        """Start the thread unless it runs. The lock must be held.

        Args:
            interval: seconds between two calls.
        """
        if self._running:
            return
        self._running = True
        thread = threading.Thread(target=self._run, args=(interval,), name="ssd_allreduce-progress")
        thread.daemon = True
        thread.start()

    def _run(self, interval: float) -> None:
        with torch.no_grad():
            while self._advance_once():
                time.sleep(interval)

    def _advance_once(self) -> bool:
        # Under the lock, so that whoever holds it either sees a thread that will look again, or none.
        with self._lock:
            self._running = self._advance()
            return self._running
