"""The statements of the project's ``save`` and ``load``: where a part that a checkpoint lacks is to be written."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from pytest_trainloop.instruments.tracing.made_at import assigned_at
from pytest_trainloop.recording.mistakes import unnoticed
from pytest_trainloop.recording.source import layer, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.runs.reach.leaves import Leaf

SAVES, LOADS = ("state_dict", "get_state", "save"), ("load_state_dict", "set_state", "load")

_NO_PART = ("gradient", "mode", "requires_grad", "switch", "hooks")
"""Kinds of leaves that no entry of a checkpoint would bring back."""


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
        if event != "call" or code.co_name not in (*SAVES, *LOADS):
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


def line_to_change(a: Uninterrupted, b: Resumed, leaf: Leaf, *, held: bool) -> str:
    """The statement to mend for a part that is lost: the one that assigns it, where its module is saved and it is left
    out of the module's state; the last one of ``load``, where the checkpoint has it; else the one of ``save`` that it
    goes behind. Empty where a library saves and loads."""
    if leaf.kind in _NO_PART:
        return ""
    owner = owner_of(a, leaf)
    saved = {call.on for call in a.statements if call.name in SAVES}
    if isinstance(owner, nn.Module) and not _in_its_state(leaf) and id(owner) in saved:
        return str(assigned_at(owner, leaf.path.rpartition(".")[2]) or "")
    holders = set()
    place = a.saved.places.get(leaf.path)
    while place is not None:
        holders.add(id(place.value))
        place = place.within
    kinds = {"optimizer_state": True, "group_value": True, "weight": False, "buffer": False}
    optimizer = kinds.get(leaf.kind)
    if held or (holders & saved and leaf.kind != "weight"):
        return last_call(b.statements, LOADS, optimizer=optimizer)
    return last_call(a.statements, SAVES, optimizer=optimizer)


def owner_of(a: Uninterrupted, leaf: Leaf) -> Any:
    """The object that a leaf is an attribute of."""
    place = a.saved.places.get(leaf.path)
    return None if place is None or place.within is None else place.within.value


def _in_its_state(leaf: Leaf) -> bool:
    return leaf.kind == "weight" or (leaf.kind == "buffer" and leaf.persistent)


def last_call(calls: Sequence[Call], names: Sequence[str] = LOADS, *, optimizer: bool | None = None) -> str:
    """The last statement that saves or loads a state: of an optimizer, or of anything else, if it was asked for; else
    any, else the one that writes or reads the file."""
    mine = [call for call in calls if call.name in names]
    states = [call for call in mine if call.name not in ("save", "load")]
    of_kind = [call for call in states if call.of_optimizer is optimizer]
    return next((call.where for chosen in (of_kind, states, mine) for call in reversed(chosen)), "")


def kept_at(a: Uninterrupted, leaf: Leaf, attribute: str) -> str:
    """The statement that keeps a state under an attribute."""
    place = a.saved.places.get(leaf.path)
    while place is not None:
        if line := assigned_at(place.value, attribute, "state_dict("):
            return str(line)
        place = place.within
    return ""
