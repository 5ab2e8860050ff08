"""The files that Python opens for writing, by one audit hook for the whole process.

Python never takes an audit hook off again and calls each one at every ``sys._getframe``, of which a watched call of
torch makes several: a hook for each run would make every later run slower.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.mistakes import unnoticed

if TYPE_CHECKING:
    from collections.abc import Callable

    Listener = Callable[[str | bytes], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call this function with the path of every file that Python opens for writing, until ``stop``."""
    _install()
    _listeners.append(listener)


def stop(listener: Listener) -> None:
    """Call it no more; one that does not listen is let be."""
    if listener in _listeners:
        _listeners.remove(listener)


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _listeners and event == "open":  # called for every event there is: nothing may stand before this
        _opened(*args)


@unnoticed
def _opened(path: Any = None, mode: Any = None, flags: Any = None, *_: Any) -> None:
    writes = not isinstance(mode, str) or bool(set(mode) & set("wax+"))
    if isinstance(flags, int):
        writes = writes and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
    elif not isinstance(mode, str):
        writes = False
    if writes and isinstance(path, (str, bytes)):
        for listener in _listeners:
            listener(path)
