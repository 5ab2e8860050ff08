"""Targets of which a cast or an argmax leaves one value, whatever the batch holds.

An argmax over an axis of one entry is 0 for all inputs. A cast that makes whole numbers of fractions between two
neighbours, or booleans of numbers that are not 0, gives one value for what differs between rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.learnable_targets.comparisons import FirstSteps
from pytest_trainloop.recording.torch_names import CASTS, EXTREME_PLACES, INDEXING, LOSSES, SUBTRACTIONS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Call, Value

_TO_WHOLE = frozenset("long int short byte char bool to type type_as".split())
_MOVES = VIEWS | CASTS | frozenset({"stack", "cat"}) | INDEXING


@dataclass(frozen=True, slots=True)
class CutTarget:
    """``op`` makes ``value`` of every entry of ``name`` (empty for a tensor that is none of the batch), which lie
    between ``low`` and ``high``."""

    name: str
    op: str
    value: float
    low: float
    high: float
    shape: tuple[int, ...]
    dim: int | None
    """The axis of one entry that an argmax is taken over; None for a cast."""
    place: Place
    met_at: Place


def cut_targets(evidence: Evidence) -> Iterator[CutTarget]:
    """Targets that are constant by a cast or an argmax, where the batch's own entries differ."""
    first = evidence.shared(FirstSteps.on)
    found: dict[tuple[str, int], list[CutTarget | None]] = {}
    for call in first.calls:
        results = [v for v in call.inputs if v.history and not v.parameter]
        if call.name not in LOSSES | SUBTRACTIONS | INDEXING or not results or not first.reaches_a_root(call):
            continue
        for value in call.inputs[:2]:  # what follows in a loss are weights
            if not value.history and _constant(value) and (cut := _cut(value, call)):
                found.setdefault((cut.place.file, cut.place.line), []).append(cut)
            elif not value.history and (made := _cutting(value)) is not None:
                found.setdefault((made.place.file, made.place.line), []).append(None)  # it differs this time
    for cuts in found.values():
        seen = [c for c in cuts if c is not None]
        if len(seen) == len(cuts) and len({c.value for c in seen}) == 1:
            yield seen[0]


def _constant(value: Value) -> bool:
    count = 1
    for size in value.shape:
        count *= size
    return count > 1 and value.smallest == value.largest


def _cutting(value: Value) -> Call | None:
    """The cast or argmax nearest to a value, through moves that keep the entries."""
    while (call := value.made_by) is not None and call.inputs:
        if _cuts(call):
            return call
        if call.name not in _MOVES:
            return None
        value = call.inputs[0]
    return None


def _cuts(call: Call) -> bool:
    if not call.inputs or not call.outputs:
        return False
    given, made = call.inputs[0], call.outputs[0]
    if call.name in EXTREME_PLACES:
        return True
    return call.name in _TO_WHOLE and given.dtype != made.dtype and not made.floating


def _cut(value: Value, met: Call) -> CutTarget | None:
    call = _cutting(value)
    if call is None:
        return None
    given, made = call.inputs[0], call.outputs[0]
    leaf = next((v for v in given.origins() if v.of_batch), None)
    if given.history or not given.smallest < given.largest or made.smallest != made.largest:
        return None
    dim: int | None = None
    if call.name in EXTREME_PLACES:
        dim = _axis_of_one(given, made)
        if dim is None:
            return None
    elif str(made.dtype) == "torch.bool":
        if made.smallest != 1:
            return None  # all are 0, and then equal
    elif given.whole or not given.floating:
        return None
    return CutTarget(
        leaf.of_batch if leaf else "",
        call.name,
        made.smallest,
        given.smallest,
        given.largest,
        given.shape,
        dim,
        call.place,
        met.place,
    )


def _axis_of_one(given: Value, made: Value) -> int | None:
    """The axis that an argmax was taken over, where it has one entry."""
    for axis, size in enumerate(given.shape):
        rest = given.shape[:axis] + given.shape[axis + 1 :]
        kept = (*given.shape[:axis], 1, *given.shape[axis + 1 :])
        if size == 1 and made.shape in (rest, kept) and made.shape:
            return axis
    return None
