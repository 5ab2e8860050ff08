"""With ``-v`` on a terminal, the progress of a long check in one line: step, number of steps, loss and time left."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

LONG = 1.0
"""Seconds after which a check is a long one."""

OFTEN = 0.2
"""Seconds between two updates."""


@contextlib.contextmanager
def shown(
    config: pytest.Config, seconds_left: Callable[[], float] = lambda: math.inf
) -> Iterator[Callable[[int, int, float], None]]:
    """A function to call with step, number of steps and loss, the last two 0 where they are not known; at the end
    pytest's own line is restored.

    ``seconds_left`` estimates what the loop's checks will take yet, infinite where nothing is known. Nothing is written
    under xdist, where the output is no terminal, and without ``-v``.
    """
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or config.get_verbosity() < 1 or not terminal.isatty or hasattr(config, "workerinput"):
        yield lambda step, most, loss: None
        return
    line = _Line(terminal, config.pluginmanager.getplugin("capturemanager"), seconds_left)
    try:
        yield line.update
    finally:
        line.put_back()


class _Line:
    """The terminal's last line: pytest's own text, followed by the progress."""

    def __init__(self, terminal: Any, capture: Any, seconds_left: Callable[[], float]) -> None:
        self._terminal, self._capture, self._seconds_left = terminal, capture, seconds_left
        self._start = terminal.currentfspath if isinstance(terminal.currentfspath, str) else ""
        self._next = time.monotonic() + LONG
        self._written = False
        self._knows_most = -math.inf

    def update(self, step: int, most: int, loss: float) -> None:
        now = time.monotonic()
        if most:
            self._knows_most = now
        elif now < self._knows_most + LONG:
            return  # the check itself tells more of this run
        if now >= self._next:
            self._next = now + OFTEN
            self._write(self._start + ", ".join(filter(None, (_steps(step, most, loss), self._left()))))

    def put_back(self) -> None:
        if self._written:
            self._write(self._start)

    def _left(self) -> str:
        seconds = self._seconds_left()
        return f"about {duration(seconds)} left for this loop" if seconds < math.inf else ""

    def _write(self, text: str) -> None:
        self._written = True
        free = contextlib.nullcontext() if self._capture is None else self._capture.global_and_fixture_disabled()
        with free:
            self._terminal.rewrite(text, erase=True)
            self._terminal.flush()


def _steps(step: int, most: int, loss: float) -> str:
    of = f" of {most}" if most else ""
    return f"step {step}{of}" + (f", loss {loss:.4g}" if most else "")


def duration(seconds: float) -> str:
    """In words, to a tenth: 40 s, 5 min, 2 h.

    >>> duration(42.3), duration(312.0), duration(7000.0)
    ('42 s', '5 min', '1.9 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
