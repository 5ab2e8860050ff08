"""Where rows end, that nothing uses: the calls of two runs that differ in these rows alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.recording.torch_names import (
    CASTS,
    EQUALITIES,
    EXTREME_PLACES,
    INDEXING,
    JOINS,
    ORDER_COMPARISONS,
    TO_PYTHON,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.tracing.call_log import Call, Calls, Value

_MOVES = VIEWS | CASTS | JOINS | INDEXING | {"__iter__"}
_TAKES_PARTS = {
    "__getitem__",
    "narrow",
    "select",
    "split",
    "chunk",
    "unbind",
    "tensor_split",
    "__iter__",
    "index_select",
}
_ASKS = EQUALITIES | EXTREME_PLACES | ORDER_COMPARISONS


@dataclass(frozen=True, slots=True)
class Ends:
    """``place`` is where the rows are taken out, ``behind_model`` whether that is after a model was called with them,
    ``skips`` whether every other row or so is taken."""

    place: Place | None
    behind_model: bool
    skips: bool = False


def ends_of(one: Calls, other: Calls) -> Ends | None:
    """Where what differs between the runs ends; None where that depends on values, or is not seen."""
    if [c.name for c in one.calls] != [c.name for c in other.calls]:
        return None  # how the loop goes on depends on what stands in the rows
    pairs = list(zip(one.calls, other.calls, strict=True))
    changed = {id(v) for a, b in pairs for v, w in zip(a.outputs, b.outputs, strict=False) if v.digest != w.digest}
    changed |= {id(v) for v, w in zip(one.batch, other.batch, strict=False) if v.digest != w.digest}
    reads = [(a, [v for v in a.inputs if id(v) in changed]) for a, _ in pairs]
    reads = [(call, given) for call, given in reads if given and (call.outputs or call.name in TO_PYTHON)]
    computed = any(_computes(call) and call.grad for call, _ in reads)
    if not computed and any(_computes(call) for call, _ in reads):
        return None  # rows held out: only looked at without gradients
    if not one.batch or any(c.name in TO_PYTHON and not computed for c, _ in reads):
        return None  # they leave torch
    numbers = [v for a, _ in pairs for v in a.outputs if id(v) in changed and v.history and not v.shape]
    if numbers:
        return _numbers(one, numbers)
    ending = [(c, given) for c, given in reads if c.outputs and not any(id(v) in changed for v in c.outputs)]
    parting = [c for c, _ in reads if c.name in _TAKES_PARTS]
    if any(_by_values(call, given, computed) for call, given in ending):
        return None
    places = [c for c, given in ending if _structural(c) and (not computed or any(v.history for v in given))]
    places = places or [c for c in parting if not computed or any(v.history for v in c.inputs)]
    last = places[-1] if places else None
    if computed and last is None:
        return None  # what is made of them is looked at apart
    behind = computed and last is not None and any(v.history for v in last.inputs)
    return Ends(last.place if last else None, behind, skips=any(map(_skips, places)))


def _numbers(one: Calls, numbers: list[Value]) -> Ends | None:
    """Where numbers are made of the rows alone that are not backpropagated: by the calls that make those that are, as
    when a loop over parts keeps the last. A loss of rows held out is made elsewhere."""
    used = {v.made_by.site for root in one.roots for v in root.origins() if v.made_by is not None}
    if not all(v.made_by is not None and v.made_by.site in used for v in numbers):
        return None
    first = numbers[0].made_by
    return Ends(first.place if first else None, behind_model=True)


def _computes(call: Call) -> bool:
    return call.name not in _MOVES and call.name not in TO_PYTHON


def _by_values(call: Call, given: list[Value], computed: bool) -> bool:
    """Whether what comes out of a call depends on what the rows hold, for other values than these."""
    if _structural(call) or call.name in _ASKS or (computed and not any(v.history for v in given)):
        return False
    return call.grad


def _structural(call: Call) -> bool:
    """Whether it takes some entries by their places alone."""
    if call.name not in _TAKES_PARTS:
        return False
    return call.name != "index_select" and not any(v.made_by or v.shape for v in call.inputs[1:])


def _skips(call: Call) -> bool:
    return any(isinstance(part, slice) and part.step not in (None, 1) for part in _parts(call))


def _parts(call: Call) -> Iterator[object]:
    for given in call.plain:
        yield from given if isinstance(given, tuple) else (given,)
