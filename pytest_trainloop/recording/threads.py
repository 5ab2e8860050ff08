"""The state of one thread: a project may train, evaluate or load data in several at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytest_trainloop.recording.torch_internals import no_torch_function

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from torch import nn

    from pytest_trainloop.recording.events import Forward, Step


class Thread(threading.local):
    """What the current thread is inside of; lists have the innermost last."""

    def __init__(self) -> None:
        self.suspended = 0
        """The number of ``suspended()`` blocks that it is in."""
        self.stepping = 0
        """The number of optimizer steps that it is in, closures left out."""
        self.open: list[Step] = []
        """The steps under way."""
        self.frames: list[FrameType] = []
        """The frames of these steps."""
        self.modules: list[nn.Module] = []
        """The modules being called."""
        self.forward: Forward | None = None
        """The last call from outside any module."""


class Suspended:
    """Suspends the recording of a thread for a ``with`` block, in which torch calls no function mode.

    A class of its own: a generator takes three times as long, and a step is suspended a hundred times.
    """

    __slots__ = ("_past", "_thread")

    def __init__(self, thread: Thread) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        self._thread.suspended += 1
        self._past = no_torch_function()
        self._past.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._past.__exit__(kind, error, trace)
        self._thread.suspended -= 1
