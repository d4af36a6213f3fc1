"""How a process leaves when other ranks may still wait for it, or when it would wait for them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable


def end_process() -> None:
    """End this process at once, with a status that launchers take for a failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Leaving:
    """Keeps a process that fails from waiting at its exit for ranks that do not come.

    Engines wait in their own exit handlers for what is in flight, or for all ranks. After a failure of
    the engine, or an exception that nobody caught, ``end`` is called before these run.

    Args:
        end: ends the process, or the whole job.
        finish: called at any other exit.
    """

    def __init__(self, end: Callable[[], None], finish: Callable[[], None] = lambda: None) -> None:
        self._end = end
        self._finish = finish
        self._failed = False
        atexit.register(self._at_exit)

    def failed(self) -> None:
        """Remember that the engine has failed."""
        if not self._failed:
            self._failed = True
            # Handlers run in reverse order of registration: before those registered since.
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        # Python sets last_value when it has reported an exception that ended the main thread.
        if self._failed or getattr(sys, "last_value", None) is not None:
            self._end()
        else:
            self._finish()
