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

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call this function with the path of every file that Python opens for writing, until ``stop``."""
    _install()
    _listeners.append(listener)


def stop(listener: Listener) -> None:
    """Stop calling this function. A function that does not listen is ignored."""
    if listener in _listeners:
        _listeners.remove(listener)


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _listeners and event == "open":  # called for every audit event: this test comes first
        _opened(*args)


@unnoticed
def _opened(path: Any = None, mode: Any = None, flags: Any = None, *_: Any) -> None:
    writes = flags & _WRITES if isinstance(flags, int) else isinstance(mode, str) and set(mode) & set("wax+")
    if writes and isinstance(path, (str, bytes)):
        for listener in _listeners:
            listener(path)
