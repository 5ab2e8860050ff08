"""Where the loop casts the state of an optimizer to a low precision, by hand."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CASTS
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.events import Place

LOW = (torch.float16, torch.bfloat16)


class StateCasts(WatchingMode):
    """The casts of a run whose result is in low precision, by that result."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Place]] = {}

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        if name in CASTS and isinstance(out, torch.Tensor) and out.dtype in LOW:
            wider = any(t.is_floating_point() and t.dtype not in LOW for t in tensors_in(args))
            if wider:
                self._made[id(out)] = weakref.ref(out), here()[0]
        return out

    def place_of(self, state: torch.Tensor) -> Place | None:
        """The line that made this tensor by a cast to low precision."""
        known = self._made.get(id(state))
        return known[1] if known is not None and known[0]() is state else None
