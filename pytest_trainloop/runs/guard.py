"""Run the user's ``fit`` so that it always returns: despite exits, forks, endless loops and swallowed stops.

No fault follows from how long a run took. When its time is over, ``fit`` is not interrupted: its batches end and its
next optimizer step stops it (both ask ``out_of_time``), and what it recorded is given up: ``TimeRanOut``. One that
neither steps nor asks for a batch any more is interrupted a while later. One error is made by the clock, since nothing
else can show it: ``fit`` got the end of its batches within its time, asked for no other, and had still not come back
when that time was over once more.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import TimeRanOut, UsageError
from pytest_trainloop.core.ours import is_our_file, is_ours
from pytest_trainloop.recording.torch_internals import FILES_OF_MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SWALLOWED = 3
"""Stops that a loop may swallow before it is pressed harder."""

LONGEST = 1e8
"""Seconds that a timer can be set to, three years: for a time that is given as infinite."""

PRESS = 0.01
"""Seconds between two stops of a loop that swallows them."""

GRACE = 5.0
"""Seconds in which a loop whose time is over may end by itself, at least."""

DELICATE = 50
"""Times that a stop waits because hooks or torch's modes are at work."""

LOST = 3000
"""The same where what is raised is lost: the finalizers of a DataLoader's workers wait 5 s for each."""

_DELICATE = ("contextlib.py", "_weakrefset.py", "weakref.py", *FILES_OF_MODES)
"""Where hooks, modes and callbacks of weak references run: Python prints what such a callback raises, and goes on."""


class StopFit(BaseException):
    """Ends ``fit`` once enough was seen; not an Exception, so that ``except Exception`` in a loop lets it pass."""


class Exited(BaseException):
    """``os._exit`` was called, with the status that is its argument."""


class Guard:
    """Calls ``fit``, which may take so many ``seconds``. Hooks call ``stop``, which raises; a timer interrupts a loop
    that swallows the exception.

    Where only ``left`` seconds are left for all runs, the loop is ended by then, and not blamed: it may have come back
    in its own time.
    """

    def __init__(self, seconds: float, left: float = math.inf) -> None:
        self._seconds = min(seconds, left, LONGEST)
        self._hurried = left < seconds
        self._stops = 0
        self._presses = 0
        self._waited = 0
        self._time_over = False
        self._asked = 0
        self._end: int | None = None
        self._ignored_end = False
        self._interrupted = False
        self._at_end: Callable[[], int | None] = lambda: None
        self.stopped = False

    def stop(self) -> None:
        """Raise ``StopFit`` in the user's stack."""
        self._stops += 1
        self.stopped = True
        if self._stops == SWALLOWED + 1:  # once: to set the timer again would put it off
            self._interrupt_within(PRESS)
        raise StopFit

    def out_of_time(self) -> bool:
        """Whether the time is over. Who asks ends the run if so, which then gives no record."""
        self._asked += self._time_over
        return self._time_over

    def call(
        self, fit: Callable[[], Any], steps: Callable[[], int], at_end: Callable[[], int | None] = lambda: None
    ) -> BaseException | None:
        """What ``fit`` raised, if anything.

        ``at_end`` gives a number that changes with every request for a batch, if the last one was answered by the end
        of the batches. Raises ``UsageError`` where ``fit`` left in a way that no loop may, and ``TimeRanOut``.
        """
        pid, tracer = os.getpid(), sys.gettrace()
        self._at_end = at_end
        with self._deadline(), no_hard_exit(pid):
            try:
                raised = next(_fenced(fit))
            except BaseException as error:
                raised = error
            finally:
                if self._presses > SWALLOWED:
                    sys.settrace(tracer)
            if os.getpid() != pid:
                os._exit(_status(raised))
        try:
            settled = self._settled(raised, steps)
            if settled is None:
                let_go(raised)
        finally:
            self._at_end = lambda: None
            del raised  # its traceback holds this frame: only the garbage collector would free the two
        if self._ignored_end and not self._hurried:
            raise UsageError(
                f"fit got the end of its batches {_after(steps)} and did not come back in more than {self._seconds:g} s"
                "; it must end when they do (--trainloop-timeout=SECONDS allows more)"
            )
        if self._asked or self._interrupted:
            raise TimeRanOut(steps(), self._seconds)
        return settled

    def _settled(self, error: BaseException | None, steps: Callable[[], int]) -> BaseException | None:
        """The exception, if it is one of the loop's own and does not come from being stopped."""
        if isinstance(error, StopFit):
            self.stopped = True
            return None
        if self.stopped and isinstance(error, (SystemExit, Exited)):
            return None
        if isinstance(error, SystemExit):
            raise UsageError(f"fit called sys.exit({_code(error)}) {_after(steps)}; return from fit instead") from None
        if isinstance(error, Exited):
            raise UsageError(f"fit called os._exit({error}) {_after(steps)}; return from fit instead") from None
        if error is not None and not isinstance(error, Exception) and type(error).__module__ == "builtins":
            raise error  # KeyboardInterrupt, and what pytest.skip raises, are for the session
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
            signal.setitimer(signal.ITIMER_REAL, seconds, PRESS)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        """End the time of ``fit``, or, after a while, raise ``StopFit`` in it; past a few, once more at a later
        line."""
        frames = _frames_of_fit(frame)
        if not frames:
            return  # it has come back
        if not self._stops and not self._time_over:
            self._time_over = True
            self._end = self._at_end()
            self._interrupt_within(GRACE if self._end is None else max(GRACE, self._seconds))
            return
        if self._waited < (LOST if _lost(frames) else DELICATE if _delicate(frames) else 0):
            self._waited += 1
            return
        if not self._stops and not self._interrupted:
            self._interrupted = True
            self._ignored_end = self._end is not None and self._at_end() == self._end
        self.stopped = True
        self._presses += 1
        if self._presses > SWALLOWED:
            _raise_again(frames, self._presses - SWALLOWED)
        raise StopFit


def let_go(error: BaseException | None) -> None:
    """Clear the frames that an exception passed through: they would keep what ``fit`` held, its iterators too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _after(steps: Callable[[], int]) -> str:
    return f"after {steps()} steps"


def _fenced(fit: Callable[[], Any]) -> Iterator[BaseException | None]:
    """The outermost frame that an alarm may raise in: nothing is half done when it is left.

    A generator has its own state of the exception being handled: a stop at the end of an ``except`` clause would leave
    that set for good. No StopIteration may leave a generator, so it is yielded.
    """
    try:
        fit()
    except StopIteration as error:
        yield error
    yield None


def _frames_of_fit(frame: FrameType | None) -> list[FrameType]:
    """The frames inside ``_fenced``, innermost first; none where ``fit`` is not running."""
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _fenced.__code__:
            return frames or [frame]
        frames.append(frame)
        frame = frame.f_back
    return []


def _delicate(frames: list[FrameType]) -> bool:
    """Whether a stop would strike half-done work of ours or torch's."""
    name = frames[0].f_code.co_filename
    return is_our_file(name) or name.endswith(_DELICATE)


def _lost(frames: list[FrameType]) -> bool:
    """Whether Python itself called what runs, prints what that raises, and goes on."""
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    return any(frame.f_code.co_name == "__del__" or frame.f_code in collecting for frame in frames)


def _raise_again(frames: list[FrameType], after: int) -> None:
    """Raise at the nth line that the frames under way come to, n = ``after``.

    A loop that swallows every exception does so between its ``try`` and its ``except``; a count that grows with each
    attempt comes to a line outside of them, where nothing holds the exception.
    """
    left = after

    def at_line(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left <= 0:
            raise StopFit
        return at_line

    sys.settrace(lambda *_called: None)
    for frame in frames:
        if not is_ours(frame):  # a lock of ours would stay held
            frame.f_trace = at_line


@contextlib.contextmanager
def no_hard_exit(pid: int) -> Iterator[None]:
    """``os._exit`` raises in this process for the time of a run; in forked children it works as ever."""
    original = os._exit

    def refused(status: int) -> Any:
        if os.getpid() != pid:
            original(status)
        raise Exited(status)

    os._exit = refused
    try:
        yield
    finally:
        os._exit = original


def _status(error: BaseException | None) -> int:
    """How a forked child leaves, as Python would: it never goes on with the test session."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _code(error: SystemExit) -> str:
    return "" if error.code is None else repr(error.code)
