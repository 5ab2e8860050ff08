"""Which line draws from python's or numpy's global generator: no mode of torch sees these draws."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.runs.evidence import Evidence


def outside_draw(evidence: Evidence) -> str:
    """The first such line of the project's, as ``numpy, train.py:12   noise = ...``; empty where none was seen. To be
    asked for by ``evidence.shared`` where a check is skipped for such draws: it takes one step, at a tenth of its
    speed."""
    watch = _Lines()
    evidence.rerun(contexts=lambda _watch: (watch.watching(),), enough=lambda r: r.rounds >= 1, may_raise=True)
    return watch.found


def told(evidence: Evidence) -> str:
    """The line in parentheses, to follow the words of a reason; empty where none was seen."""
    line = evidence.shared(outside_draw)
    return f" ({line})" if line else ""


class _Lines:
    """Looks after each line of the project's whether a generator has moved."""

    def __init__(self) -> None:
        self.found = ""
        self._last: tuple[str, int] | None = None
        self._states = _states()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Lines of functions that are called in the block; another tracer, as a debugger's, is put back after it."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    @unnoticed
    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Callable[..., Any] | None:
        if self.found or layer(frame.f_code.co_filename) < 2:
            return None
        return self._on_line

    @unnoticed
    def _on_line(self, frame: FrameType, event: str, _arg: Any) -> Callable[..., Any] | None:
        if self.found:
            return None
        now = _states()
        moved = [name for name, state in now.items() if state != self._states.get(name)]
        if moved and self._last is not None:
            self.found = f"{moved[0]}, {place_of(*self._last)}"
        self._states = now
        at: FrameType | None = frame
        if event == "return":
            at = frame.f_back
        if at is not None and layer(at.f_code.co_filename) == 2:
            self._last = (at.f_code.co_filename, at.f_lineno)
        return self._on_line


def _states() -> dict[str, tuple[int, ...]]:
    """How far each generator is: its place in its numbers, and the first of them."""
    python = random.getstate()[1]
    found: dict[str, tuple[int, ...]] = {"python": (python[-1], python[0])}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state: Any = numpy.random.get_state()
        found["numpy"] = (int(state[2]), int(state[1][0]), int(state[3]))
    return found
