"""How a script that trains on for days is ended once enough was seen."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from pytest_trainloop.runs.guard import no_hard_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.recording.watch import Watch

SWALLOWED = 3
"""Stops that a script may swallow before it is ended where it is."""

STEPLESS = 256
"""Backward passes without any optimizer step after which a run is ended, for each step that was asked for: weights
that are changed by hand need no optimizer."""

CLEANING = 60.0
"""Seconds that a stopped script has for its ``finally`` blocks; no verdict depends on them."""

LEAVING = 10.0
"""Seconds that its threads have to end."""


_EXIT = os._exit
"""The function itself: during the run it only raises."""


class Stopped(BaseException):
    """Ends a script; not an Exception, so that ``except Exception`` in it lets it pass."""


class Ending:
    """Ends the script at the beginning of a step, once ``steps`` were made; with 0 it runs to its own end.

    ``give_up`` is called in place of raising where the script swallowed the exception several times; it must not
    return. A forked child runs on as it would alone.
    """

    def __init__(self, steps: int, give_up: Callable[[], None]) -> None:
        self._steps = steps
        self._give_up = give_up
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._stops = 0
        self._back = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked child of the process that watches."""
        return os.getpid() != self._process

    def before_step(self, watch: Watch) -> None:
        """Called before each optimizer step: raises ``Stopped`` once enough were made."""
        if self._steps and watch.record.rounds >= self._steps and not self.elsewhere:
            self._stop(watch)

    def before_backward(self, watch: Watch) -> None:
        """Called before each backward pass: the same for a script without an optimizer."""
        if self._steps and not watch.record.steps and watch.backward_passes > STEPLESS and not self.elsewhere:
            self._stop(watch)

    def _stop(self, watch: Watch) -> None:
        watch.over = True
        self._stops += 1
        if self._stops == 1:
            threading.Thread(target=self._press, daemon=True).start()
        if self._stops > SWALLOWED:
            self._give_up()
        raise Stopped

    def _press(self) -> None:
        """Raise once more, at whatever line it has come to, in a script that does not come back."""
        for wait in (CLEANING, 1.0, 1.0, 1.0):
            if self._back.wait(wait):
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Stopped))
        if not self._back.wait(LEAVING):
            self._give_up()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the run of the script."""
        try:
            with no_hard_exit(self._process):
                yield
        finally:
            self._back.set()


def leave(status: int) -> int:
    """The status, for ``sys.exit``; where threads of the stopped script would keep the process alive, it ends here."""
    sys.stdout.flush()
    sys.stderr.flush()
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    until = time.monotonic() + LEAVING
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        end(status)
    return status


def end(status: int) -> None:
    """End the process at once, with what was registered to be called at its end."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    _EXIT(status)
