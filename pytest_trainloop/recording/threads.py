"""What belongs to one thread: a project may train, evaluate or load in several at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from torch import nn

    from pytest_trainloop.recording.events import Forward, Step


class Thread(threading.local):
    """``quiet`` counts how deep the thread is in code of ours, ``stepping`` in optimizer steps outside their closures;
    ``open`` and ``frames`` hold its steps under way, ``modules`` the modules being called, innermost last;
    ``forward`` is the last call from outside any module."""

    def __init__(self) -> None:
        self.quiet = 0
        self.stepping = 0
        self.open: list[Step] = []
        self.frames: list[FrameType] = []
        self.modules: list[nn.Module] = []
        self.forward: Forward | None = None
