"""Calls of functions in the table of losses, found by the frames in which their calls of torch are made.

Nothing is patched: while a function of the table runs, its frame stands on the stack of every call of torch that it
makes. At the first its arguments are as they were given; the last result with a history before the frame is gone is
what it returned.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.losses.table.lookup import may_be_known, of_frame
from pytest_trainloop.paths import FIT_CALLER
from pytest_trainloop.recording.function_mode import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    import torch

    from pytest_trainloop.checks.loss.loss_contract.call import Call
    from pytest_trainloop.losses.table.lookup import Known

DEEPEST = 80
"""Frames that are looked at."""


@dataclass(slots=True)
class _Running:
    frame: FrameType
    call: Call | None
    """None where the frame is no call that is judged."""
    result: torch.Tensor | None = None


class RunningCalls:
    """The calls under way. ``began`` makes a call of what the table knows, ``ended`` gets it with its result."""

    def __init__(self, began: Callable[[Known, FrameType], Call], ended: Callable[[Call], None]) -> None:
        self._began = began
        self._ended = ended
        self._may: dict[CodeType, bool] = {}
        self._running: list[_Running] = []

    @property
    def current(self) -> Call | None:
        """The call of the table that is under way."""
        return next((running.call for running in self._running if running.call is not None), None)

    def forget(self) -> None:
        self._running.clear()

    def before(self) -> None:
        """Before a call of torch: which frames ended, and which began."""
        stack = list(self._stack())
        if not stack and not self._running:
            return
        alive = {id(frame) for frame in stack}
        self.end(alive)
        known = {id(running.frame) for running in self._running}
        for frame in reversed(stack):
            if id(frame) not in known:
                self._running.append(_Running(frame, self._call_of(frame)))

    def _call_of(self, frame: FrameType) -> Call | None:
        """The call of a frame; none inside another one of the table, which is judged in its place."""
        if any(running.call is not None for running in self._running):
            return None
        known = of_frame(frame)
        return None if known is None else self._began(known, frame)

    def after(self, out: Any) -> None:
        """After a call of torch that was made while functions of the table ran."""
        if not self._running:
            return
        result = next((tensor for tensor in tensors_in(out) if tensor.requires_grad), None)
        if result is not None:
            for running in self._running:
                running.result = result

    def end(self, alive: set[int] | None = None) -> None:
        """Let the calls end whose frames are gone: all, where none is alive."""
        ended = [r for r in self._running if alive is None or id(r.frame) not in alive]
        if ended:
            self._running = [r for r in self._running if r not in ended]
        for running in ended:
            if running.call is not None and running.result is not None:
                running.call.out = running.result
                self._ended(running.call)

    def _stack(self) -> Iterator[FrameType]:
        """The frames on the stack that may be of the table, innermost first."""
        frame: FrameType | None = sys._getframe(1)
        may = self._may
        for _ in range(DEEPEST):
            if frame is None:
                return
            code = frame.f_code
            found = may.get(code)
            if found is None:
                found = may[code] = may_be_known(frame)
            if found:
                yield frame
            elif code.co_filename == FIT_CALLER:
                return
            frame = frame.f_back
