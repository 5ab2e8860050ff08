"""The statements of the project's ``save`` and ``load``: where a part that a checkpoint lacks is to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pytest_trainloop.checks.state.resume_equivalence.state_calls import LOADS, SAVES, Call
from pytest_trainloop.instruments.tracing.made_at import assigned_at, own_method

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.state.resume_equivalence.runs import Resumed, Uninterrupted
    from pytest_trainloop.runs.reachable_state.leaves import Leaf


_NO_PART = ("gradient", "mode", "requires_grad", "switch", "hooks")
"""Kinds of leaves that no entry of a checkpoint would bring back."""


def line_to_change(a: Uninterrupted, b: Resumed, leaf: Leaf, *, held: bool) -> str:
    """The statement to mend for a part that is lost: the one that assigns it, where its module is saved and it is left
    out of the module's state; the last one of ``load``, where the checkpoint has it; else the one of ``save`` that it
    goes behind. Empty where a library saves and loads."""
    if leaf.kind in _NO_PART:
        return ""
    holders = holders_of(a, leaf)
    owner = owner_of(a, leaf)
    saved = {call.on for call in a.statements if call.name in SAVES and call.name != "save"}
    if isinstance(owner, nn.Module) and not _in_its_state(leaf) and id(owner) in saved:
        return str(assigned_at(owner, leaf.path.rpartition(".")[2]) or "")
    own = (method for value in holders if (method := own_method(value, "load_state_dict")))
    if held and (first := next(own, None)):
        return str(first)
    kinds = {"optimizer_state": True, "group_value": True, "weight": False, "buffer": False}
    optimizer = kinds.get(leaf.kind)
    # the state of an optimizer holds no weights
    if held or (saved.intersection(map(id, holders)) and leaf.kind != "weight" and "['params']" not in leaf.path):
        return last_call(b.statements, LOADS, optimizer=optimizer)
    return last_call(a.statements, SAVES, optimizer=optimizer)


def behind(b: Resumed, cause: str, change: str) -> dict[str, str]:
    """The repair where the statement to change is the one of ``load`` that the missing one goes behind; empty where
    that of the cause says more."""
    name = {"optimizer_state_lost": "optimizer", "scheduler_restarts": "scheduler", "scaler_lost": "scaler"}.get(cause)
    if name is None or change not in [call.where for call in b.statements]:
        return {}
    return {"repair": f'{name}.load_state_dict(state["{name}"]) behind this line of load, once the {name} is built'}


def holders_of(a: Uninterrupted, leaf: Leaf) -> list[Any]:
    """The object of a leaf and what it lies in, from the inside out."""
    place, found = a.saved.places.get(leaf.path), []
    while place is not None:
        found.append(place.value)
        place = place.within
    return found


def owner_of(a: Uninterrupted, leaf: Leaf) -> Any:
    """The object that a leaf is an attribute of."""
    return next(iter(holders_of(a, leaf)[1:]), None)


def _in_its_state(leaf: Leaf) -> bool:
    return leaf.kind == "weight" or (leaf.kind == "buffer" and leaf.persistent)


def last_call(calls: Sequence[Call], names: Sequence[str] = LOADS, *, optimizer: bool | None = None) -> str:
    """The last statement that saves or loads a state: of an optimizer, or of anything else, if it was asked for; else
    any, else the one that writes or reads the file."""
    mine = [call for call in calls if call.name in names]
    states = [call for call in mine if call.name not in ("save", "load")]
    lines = {call.where for call in states if call.of_optimizer}  # an optimizer's has a second frame around it
    of_kind = [call for call in states if optimizer is not None and (call.where in lines) is optimizer]
    return next((call.where for chosen in (of_kind, states, mine) for call in reversed(chosen)), "")


def kept_at(a: Uninterrupted, leaf: Leaf, attribute: str) -> str:
    """The statement that keeps a state under an attribute."""
    lines = (assigned_at(holder, attribute, "state_dict(") for holder in holders_of(a, leaf))
    return str(next(filter(None, lines), ""))
