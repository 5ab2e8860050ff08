"""The places that a walk comes by: a slot, what it holds, and what a leaf there would be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.reach.slots import Entries, Hooks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.reach.leaves import Kind
    from pytest_trainloop.reach.slots import Slot


@dataclass(slots=True, eq=False)
class Place:
    """``slot`` is None for what was declared; ``kind`` is None where there is no leaf; ``within`` is the place whose
    value holds this one. ``as_kind`` is the kind of the leaves below (those of a scheduler), ``waits`` says that the
    place is entered after everything declared was, ``rest`` that this is a module's second turn."""

    path: str
    slot: Slot | None
    value: Any
    kind: Kind | None = None
    component: str = ""
    node: int = -1
    within: Place | None = None
    as_kind: Kind | None = None
    persistent: bool = True
    waits: bool = False
    rest: bool = False


def shown_value(place: Place, names: Mapping[int, str]) -> Any:
    """The value of a leaf: of a reference the path that it leads to, of a length or of hooks their number."""
    if place.kind == "reference":
        return names.get(id(place.value), "")
    if place.kind in ("length", "hooks") and isinstance(place.slot, (Entries, Hooks)):
        return len(place.slot.get())
    if isinstance(place.slot, Entries):
        return place.slot.get()
    return place.value
