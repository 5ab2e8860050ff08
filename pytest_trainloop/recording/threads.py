"""The state of one thread: a project may train, evaluate or load data in several at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

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
