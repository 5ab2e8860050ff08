"""The user's line after which something is first another than it was."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.as_caller import is_stand_in
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

MOST_LINES = 20_000
"""Lines after which it is given up: an evaluation over a whole data set."""


class ChangedAt:
    """Asks ``changed`` after each line of the user's; ``where`` is the line after which it was True first."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self._changed = changed
        self._left = MOST_LINES
        self._last: dict[FrameType, int] = {}
        self._before: tuple[FrameType, int] | None = None
        self.where = ""
        self.code: CodeType | None = None
        """The function of that line."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Lines of functions that are called in the block. A debugger, or a measurement of coverage, misses them."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self, frame: FrameType | None = None) -> None:
        """Watch from now on, in a frame that is under way as well, up to ``end()``."""
        self._tracer = sys.gettrace()
        sys.settrace(self._on_call)
        if frame is not None:
            frame.f_trace = self._on_line

    def end(self) -> None:
        sys.settrace(self._tracer)
        self._ask()
        self._last.clear()
        self._before = None

    @unnoticed
    def _on_call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if self._left <= 0 or self.where or layer(frame.f_code.co_filename) != 2 or is_stand_in(frame.f_code):
            return None
        return self._on_line

    @unnoticed
    def _on_line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        self._left -= 1
        if self._left <= 0 or self.where:
            return None
        self._ask()
        if event == "return":
            self._last.pop(frame, None)
            back = frame.f_back
            while back is not None and back not in self._last:
                back = back.f_back
            self._before = None if back is None else (back, self._last[back])
        else:
            self._last[frame] = frame.f_lineno
            self._before = (frame, frame.f_lineno)
        return self._on_line

    def _ask(self) -> None:
        """Whether the line before this event changed it; what no line came before is changed by no line."""
        if not self.where and self._changed() and self._before is not None:
            frame, line = self._before
            self.where, self.code = str(place_of(frame.f_code.co_filename, line)), frame.f_code
