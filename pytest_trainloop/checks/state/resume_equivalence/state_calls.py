"""The calls by which a project's own code saves and loads states, each with its line."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.optim import Optimizer

from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SAVES, LOADS = ("state_dict", "get_state", "save"), ("load_state_dict", "set_state", "load")


class Call(NamedTuple):
    """A call by which the project's own code saved or loaded something."""

    name: str
    on: int
    """The identity of the object whose state it is; 0 for a function."""
    of_optimizer: bool
    where: str


@contextlib.contextmanager
def calls_of_the_project(calls: list[Call]) -> Iterator[None]:
    """Note the calls by which states are saved and loaded, each with its line. A profiler that is at work is left
    alone: then nothing is seen."""
    if sys.getprofile() is not None:
        yield
        return

    @unnoticed
    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        own = code.co_name in ("save", "load") and layer(code.co_filename) == 2  # which calls others
        if event != "call" or own or code.co_name not in (*SAVES, *LOADS):
            return
        caller = frame.f_back
        while caller is not None and layer(caller.f_code.co_filename) == 0 and caller is not began:
            caller = caller.f_back
        if caller is not None and layer(caller.f_code.co_filename) == 2:
            on = frame.f_locals.get("self", frame.f_locals.get("module"))
            where = str(place_of(caller.f_code.co_filename, caller.f_lineno))
            calls.append(Call(code.co_name, id(on) if on is not None else 0, isinstance(on, Optimizer), where))

    began = sys._getframe(2)  # what is above it did not call save
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
