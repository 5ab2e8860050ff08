"""With ``-v`` on a terminal, the progress of a long check: step, number of steps and loss, in one line."""

from __future__ import annotations

import contextlib
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
def shown(config: pytest.Config) -> Iterator[Callable[[int, int, float], None]]:
    """A function to call with step, number of steps and loss; at the end pytest's own line is restored.

    Nothing is written under xdist, where the output is no terminal, and without ``-v``.
    """
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    if terminal is None or config.get_verbosity() < 1 or not terminal.isatty or hasattr(config, "workerinput"):
        yield lambda step, most, loss: None
        return
    line = _Line(terminal, config.pluginmanager.getplugin("capturemanager"))
    try:
        yield line.update
    finally:
        line.put_back()


class _Line:
    """The terminal's last line: pytest's own text, followed by the progress."""

    def __init__(self, terminal: Any, capture: Any) -> None:
        self._terminal, self._capture = terminal, capture
        self._start = terminal.currentfspath if isinstance(terminal.currentfspath, str) else ""
        self._next = time.monotonic() + LONG
        self._written = False

    def update(self, step: int, most: int, loss: float) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + OFTEN
            self._write(f"{self._start}step {step} of {most}, loss {loss:.4g}")

    def put_back(self) -> None:
        if self._written:
            self._write(self._start)

    def _write(self, text: str) -> None:
        self._written = True
        free = contextlib.nullcontext() if self._capture is None else self._capture.global_and_fixture_disabled()
        with free:
            self._terminal.rewrite(text, erase=True)
            self._terminal.flush()
