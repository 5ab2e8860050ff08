"""Flags of the rows (0 or 1 each) that are read as positions: ``x[flags]`` takes rows 0 and 1 over and over.

What is indexed has the batch's rows, and so have the flags: one whole number each, never another than 0 and 1. Where
rows have a partner by its position (the anchor of a view, the parent of a node), a row that is pointed at points at
itself; flags of rows do not heed that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.torch_names import CASTS, INDEXING, SCATTERS, VIEWS
from pytest_trainloop.tracing.call_log import Call, Calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Value

STEPS = 6
"""Steps of the loop whose flags are read."""

LEAST_ROWS = 4

_MOVES = VIEWS | CASTS | INDEXING | frozenset("long int short byte to".split())


@dataclass(frozen=True, slots=True)
class FlagIndex:
    """``name`` holds 0 or 1 for each of ``rows``, and indexes what has these rows."""

    name: str
    rows: int
    steps: int
    ones: int
    """Rows with 1, in the first step."""
    place: Place


def flag_index(evidence: Evidence, suspected: Calls) -> FlagIndex | None:
    """``suspected`` are calls of a step, of which one indexes rows with 0 and 1."""
    if not any(_indexed(suspected)):
        return None
    seen = _Indices()
    record = evidence.rerun(
        contexts=seen.contexts, before_item=seen.take, enough=lambda r: r.rounds >= STEPS, may_raise=True
    )
    if record.raised is not None:
        return None
    leads = {id(root) for root in seen.roots}
    for call in reversed(seen.calls):
        if any(id(out) in leads for out in call.outputs):
            leads.update(id(value) for value in call.inputs)
    for call in _indexed(seen):
        source = call.inputs[1].source(_MOVES)
        used = any(id(out) in leads for out in call.outputs)
        kept = seen.kept.get((call.place.file, call.place.line), [])
        if used and source.of_batch and _of_rows(call, source) and _flags(kept):
            ones = int(kept[0].sum())
            return FlagIndex(source.of_batch, len(kept[0]), len(kept), ones, call.place)
    return None


@dataclass(eq=False)
class _Indices(Calls):
    """The calls of the first steps, with copies of what tensors are indexed with, by line."""

    steps: int = STEPS
    kept: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if made.name == "__getitem__" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self.kept.setdefault((made.place.file, made.place.line), []).append(args[1].detach().clone())


def _indexed(seen: Calls) -> Iterator[Call]:
    """Calls that index rows the model made something of with as many whole numbers, 0 and 1 among them."""
    for call in seen.calls:
        if call.name != "__getitem__" or len(call.inputs) != 2 or len(call.plain) != 2 or call.plain[1] is not None:
            continue
        rows, index = call.inputs
        if not rows.history or rows.parameter or index.floating or index.dtype is torch.bool or len(index.shape) != 1:
            continue
        if rows.shape[:1] != index.shape or index.shape[0] < LEAST_ROWS or (index.smallest, index.largest) != (0, 1):
            continue
        makers = {v.made_by.name for v in rows.origins() if v.made_by is not None}
        if not makers & SCATTERS:
            yield call


def _of_rows(call: Call, flags: Value) -> bool:
    """Whether a tensor of the batch has one entry for each row of what is indexed, which was made of other tensors of
    these rows."""
    rows, (count,) = call.inputs[0], call.inputs[1].shape
    return flags.shape in ((count,), (count, 1)) and any(
        v.of_batch and v is not flags and v.shape[:1] == (count,) for v in rows.origins()
    )


def _flags(kept: list[torch.Tensor]) -> bool:
    """Whether all are 0 and 1, and a row that is read by position would itself read another one."""
    if not kept or any(not bool(((t == 0) | (t == 1)).all()) for t in kept):
        return False
    return any(not torch.equal(t[t], t) for t in (index.long() for index in kept))
