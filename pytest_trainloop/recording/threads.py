"""The state of one thread: a project may train, evaluate or load data in several at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.torch_internals import in_backward, no_torch_function

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType, TracebackType

    from torch import nn

    from pytest_trainloop.recording.events import Backward, ClipCall, Forward, Step


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
        self.clipping = False
        """Whether a clip of gradients is under way."""
        self.clip: ClipCall | None = None
        """The last clip."""
        self.scheduling = 0
        """The number of scheduler steps that it is in."""
        self.scaling: list[tuple[int, str]] = []
        """The scaler calls that it is in: the scaler's identity, and what is called."""
        self.unseen: Any = None
        """The context in which torch calls no function mode, during a step that none of them looks into."""
        self.ended: Any = None
        """That context, where such a step was found to have ended while the recording was suspended."""


class Trained:
    """Which thread trains which tensors, and the backward passes that are under way.

    Torch is not safe where one thread reads ``.grad`` while another one's backward pass or ``zero_grad`` replaces it:
    the process may end. So gradients are read of those tensors alone that the reading thread trains, and values of
    those that no other thread trains. A thread trains a tensor once a backward pass of its own has brought a gradient
    to it, or its optimizer has stepped it; the last one that does counts.
    """

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}
        self._passes: dict[int, Backward] = {}

    def claim(self, indices: Iterable[int], event: Backward | None = None) -> None:
        """Note that this thread trains these tensors, or the thread that began a pass: the engine of an accelerator has
        threads of its own."""
        ident = threading.get_ident()
        if event is not None and self._passes.get(ident) is not event:
            ident = next((known for known, one in list(self._passes.items()) if one is event), ident)
        for index in indices:
            self._threads[index] = ident

    def elsewhere(self) -> frozenset[int]:
        """The tensors that another thread trains, one that is still alive."""
        own = threading.get_ident()
        others = set(self._threads.values()) - {own}
        if not others:
            return frozenset()
        alive = others & {thread.ident for thread in threading.enumerate()}
        return frozenset(index for index, ident in list(self._threads.items()) if ident in alive)

    def here(self) -> frozenset[int]:
        """The tensors that this thread trains, or one that has ended."""
        return frozenset(self._threads) - self.elsewhere()

    @property
    def by_several(self) -> bool:
        return len(set(self._threads.values())) > 1

    @property
    def backward(self) -> Backward | None:
        """The pass that this thread is in."""
        if not self._passes:
            return None
        ident = threading.get_ident()
        known = self._passes.get(ident)
        if known is not None or not in_backward() or len(self._passes) != 1:
            return known
        if any(thread.ident == ident for thread in threading.enumerate()):
            return None
        return next(iter(self._passes.values()), None)  # a thread of an accelerator's engine

    @backward.setter
    def backward(self, event: Backward | None) -> None:
        if event is None:
            self._passes.pop(threading.get_ident(), None)
        else:
            self._passes[threading.get_ident()] = event


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
        thread = self._thread
        self._past.__exit__(kind, error, trace)
        thread.suspended -= 1
        if thread.ended is not None and not thread.suspended:
            thread.ended.__exit__(None, None, None)
            thread.ended = None
