"""Run the user's ``fit`` so that it always comes back: exits, forks, endless loops and swallowed stops included."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from pytest_trainloop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SWALLOWED = 3
"""Stops that a loop may swallow before it is interrupted wherever it stands."""


class StopFit(BaseException):
    """Ends ``fit`` once enough was seen; not an Exception, so that ``except Exception`` in a loop lets it pass."""


class _Exited(BaseException):
    """``os._exit`` was called."""


class Guard:
    """Calls ``fit``. ``stop`` is for hooks: it raises, and presses harder when the loop swallows what it raises."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stops = 0
        self._timed_out = False
        self.stopped = False

    def stop(self) -> None:
        """Raise ``StopFit`` in the user's stack."""
        self._stops += 1
        self.stopped = True
        if self._stops > SWALLOWED:
            self._interrupt_within(0.01)
        raise StopFit

    def call(self, fit: Callable[[], Any], progress: Callable[[], str]) -> BaseException | None:
        """What ``fit`` raised, if anything; ``UsageError`` where it left in a way that no loop may."""
        pid = os.getpid()
        with self._deadline(), _no_hard_exit(pid):
            try:
                fit()
            except StopFit:
                self.stopped = True
            except SystemExit as error:
                raise UsageError(f"fit called sys.exit({_code(error)}) {progress()}; return from fit instead") from None
            except _Exited as error:
                raise UsageError(f"fit called os._exit({error}) {progress()}; return from fit instead") from None
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return self._unless_forked(pid, error)
            finally:
                if os.getpid() != pid:
                    os._exit(0)
        if self._timed_out:
            raise UsageError(
                f"fit did not come back within {self._seconds:g} s {progress()}; it must end when the batches it is "
                "given end"
                " (--trainloop-budget SECONDS allows more)"
            )
        return None

    @staticmethod
    def _unless_forked(pid: int, error: BaseException) -> BaseException:
        if os.getpid() != pid:
            os._exit(1)
        return error

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[None]:
        """Interrupt the main thread when the time is over; nothing where there is no such timer or another one runs."""
        possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        if not possible or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._alarm)
        self._interrupt_within(self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _interrupt_within(self, seconds: float) -> None:
        if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) == self._alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.01)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        self._timed_out = self._stops == 0
        self.stopped = True
        raise StopFit


@contextlib.contextmanager
def _no_hard_exit(pid: int) -> Iterator[None]:
    """``os._exit`` raises in this process for the time of a run; in forked children it works as ever."""
    original = os._exit

    def refused(status: int) -> Any:
        if os.getpid() != pid:
            original(status)
        raise _Exited(status)

    os._exit = refused
    try:
        yield
    finally:
        os._exit = original


def _code(error: SystemExit) -> str:
    return "" if error.code is None else repr(error.code)
