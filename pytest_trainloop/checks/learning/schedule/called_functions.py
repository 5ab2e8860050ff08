"""Which functions of the project's, and of libraries but torch, ran while ``fit`` did."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from pytest_trainloop.recording.watch import Watch


class CalledFunctions:
    """``own`` has the file and first line of each function of the project's, ``libraries`` the names of others."""

    def __init__(self) -> None:
        self.own: set[tuple[str, int]] = set()
        self.libraries: set[str] = set()

    def contexts(self, _watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(),)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A profiler that is at work (the user's) is left alone: then nothing is seen."""
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    @unnoticed
    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        rank = layer(code.co_filename)
        if rank == 2:
            self.own.add((code.co_filename, code.co_firstlineno))
        elif rank == 1:
            self.libraries.add(code.co_name)
