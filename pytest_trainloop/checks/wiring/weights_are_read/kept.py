"""What is made of the first batch, kept, and used for later ones in the place of their own.

A mask, an adjacency or features are computed if there are none yet, and then kept under no key. In the record of calls
that shows as a value made of the first batch alone that two later batches are computed with, row by row, while the line
that makes it does not run again. It matters if another first batch gives another value: a graph that is the same in
every batch may be kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    ATTENTION,
    IN_PLACE_OPERATORS,
    INDEXING,
    LOSSES,
    MASKING,
    MULTIPLICATIONS,
    SCATTERS,
    SHAPE_ONLY,
    SUBTRACTIONS,
)
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.tracing.call_log import Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.call_log import Call, Value

BATCHES = 3
"""Batches that are looked at."""

ROUNDING = 1e-6
"""Relative difference that another order of summation may make."""

_BY_ROW = MULTIPLICATIONS | ADDITIONS | SUBTRACTIONS | MASKING | ATTENTION | SCATTERS
_PRODUCTS = frozenset("matmul mm bmm __matmul__ spmm sparse_mm".split())


@dataclass(frozen=True, slots=True)
class KeptValue:
    """``name`` of the first batch is in a value of this shape, made at ``made``, which later batches meet at
    ``used``."""

    name: str
    shape: tuple[int, ...]
    made: Place
    used: Place
    function: str
    change: float
    """The largest difference to what another first batch gives, relative to its size."""


@dataclass(eq=False)
class ThreeBatches(Calls):
    """The calls of the steps on three batches. Values of one call are kept in ``caught``."""

    catches: int = -1
    caught: torch.Tensor | None = None
    now: int = -1
    """The number of the batch that was handed over last."""
    at: list[int] = field(default_factory=list)
    """By the number of a call, the batch that was handed over before it."""

    def take(self, number: int, item: Any) -> None:
        self.now = number
        super().take(number, item)

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.at.append(self.now)


def kept_values(evidence: Evidence) -> Iterator[KeptValue]:
    """Values of the first batch that later ones are computed with, each by the line that makes it."""
    order = (0, 1, 2)
    seen = _run(evidence, order)
    if seen is None:
        return
    lines: set[tuple[str, int]] = set()
    for value, meeting in _suspects(seen):
        place = value.made_by.place if value.made_by else meeting.place
        if (place.file, place.line) in lines:
            continue
        lines.add((place.file, place.line))
        change = _change(evidence, seen, order, value)
        leaf = next((v for v in value.origins() if v.of_batch), None)
        if change and leaf is not None:
            yield KeptValue(leaf.of_batch, value.shape, place, meeting.place, meeting.name, change)


def _change(evidence: Evidence, seen: ThreeBatches, order: Sequence[int], value: Value) -> float:
    """How far a value is from that of another first batch; 0 where they are equal, or equal to rounding."""
    made = value.made_by
    if made is None:
        pairs = zip(seen.batch, seen.tensors, strict=True)
        found = {v.number: tensor.double() for v, tensor in pairs if v.of_batch == value.of_batch}
        one, other = found.get(0), found.get(1)
    else:
        one, other = (_value_of(evidence, o, made) for o in (order, (1, 0, 2)))
    if one is None or other is None:
        return 0.0
    if one.shape != other.shape:
        return 1.0
    change = _difference(one, other)
    return change if change > ROUNDING else 0.0


def _run(evidence: Evidence, order: Sequence[int], catches: int = -1) -> ThreeBatches | None:
    """The steps on the loop's first batches in this order; None where it has one batch of one row only."""
    seen = ThreeBatches(steps=BATCHES, catches=catches)
    if catches >= 0:
        seen.others = {catches: _catching(seen)}
    plan = replace(
        evidence.plan(),
        contexts=seen.contexts,
        items=lambda loop: _batches(loop, order),
        before_item=seen.take,
        read_ahead=None,
        varied="with its batches in another order",
        may_raise=True,
    )
    record = evidence.rerun(plan)
    return seen if record.raised is None and seen.now == BATCHES - 1 else None


def _batches(loop: TrainLoop, order: Sequence[int]) -> list[Any]:
    """The loop's first batches; of a loop with one, this and two of its rows in other orders."""
    axis = loop.batch_dim if isinstance(loop.batch_dim, int) else 0
    if loop.batches is not None:
        drawn = first_batches(loop, BATCHES)
    else:
        rows = nested.rows(loop.batch, axis)
        orders = [[(i + turn) % max(rows, 1) for i in range(rows)] for turn in range(BATCHES)]
        drawn = [nested.take(loop.batch, chosen, axis) for chosen in orders] if rows > 1 else [loop.batch] * BATCHES
    return [nested.copy(drawn[i]) for i in order]


def _suspects(seen: ThreeBatches) -> Iterator[tuple[Value, Call]]:
    """Values made with the first batch, and a call in which a later batch meets them."""
    of, leads = _batches_of(seen), _leads(seen)
    again = {call.site for call, at in zip(seen.calls, seen.at, strict=True) if at > 0}
    read = {id(value) for call in seen.calls for value in call.inputs}
    unread = {(v.of_batch, v.number) for v in seen.batch if id(v) not in read}
    kept: dict[int, tuple[Value, Call, set[int]]] = {}
    for call, at in zip(seen.calls, seen.at, strict=True):
        if at < 1 or not any(id(out) in leads for out in call.outputs) or not _aligned(call):
            continue
        if not any(of.get(id(v)) == {at} for v in call.inputs):
            continue
        for value in call.inputs:
            for first in _from_before(seen, value) if of.get(id(value)) == {0} else ():
                made = first.made_by
                replaced = made.site in again if made else (first.of_batch, at) not in unread
                if not (replaced or first.history) and of.get(id(first)) == {0}:
                    kept.setdefault(id(first), (first, call, set()))[2].add(at)
    for value, call, met in kept.values():
        if len(met) >= BATCHES - 1:
            yield value, call


def _from_before(seen: ThreeBatches, value: Value) -> Iterator[Value]:
    """What a value was made of that is older than the second batch, the nearest first."""
    todo, known = [value], {id(value)}
    while todo:
        at = todo.pop(0)
        if at.made_by is None or seen.at[at.made_by.number] == 0:
            yield at
            continue
        for parent in at.made_by.inputs:
            if id(parent) not in known:
                known.add(id(parent))
                todo.append(parent)


def _aligned(call: Call) -> bool:
    """Whether a call takes its two inputs row by row, or sums over the rows of one with weights of the other."""
    inputs = [v for v in call.inputs if v.shape and v.shape[0] > 1]
    if len(inputs) < 2:
        return False
    left, right = inputs[:2]
    if call.name in _PRODUCTS and len(left.shape) == len(right.shape) == 2:
        return left.shape[1] == right.shape[0] == left.shape[0]
    if call.name in LOSSES:
        return left.shape[0] == right.shape[0]
    by_row = call.name in _BY_ROW | _PRODUCTS | INDEXING or call.name in IN_PLACE_OPERATORS
    picked = call.name == "__getitem__" and not right.floating
    return by_row and (picked or (len(left.shape) == len(right.shape) and left.shape[0] == right.shape[0]))


def _batches_of(seen: ThreeBatches) -> dict[int, set[int]]:
    """By the identity of a value, the numbers of the batches whose entries it was made of."""
    known: dict[int, set[int]] = {id(v): {v.number} for v in seen.batch}
    for call in seen.calls:
        made = (
            set[int]().union(*(known.get(id(v), set()) for v in call.inputs)) if call.name not in SHAPE_ONLY else set()
        )
        for out in call.outputs:
            known[id(out)] = made
    return known


def _leads(seen: ThreeBatches) -> set[int]:
    found = {id(root) for root in seen.roots}
    for call in reversed(seen.calls):
        if any(id(out) in found for out in call.outputs):
            found.update(id(value) for value in call.inputs)
    return found


def _value_of(evidence: Evidence, order: Sequence[int], made: Call) -> torch.Tensor | None:
    seen = _run(evidence, order, made.number)
    return None if seen is None or seen.calls[made.number].name != made.name else seen.caught


def _catching(seen: ThreeBatches) -> Callable[..., Any]:
    def catch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            seen.caught = out.detach().clone().to_dense().double()
        return out

    return catch


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two values, relative to the larger one."""
    off = float((one - other).abs().max()) if one.numel() else 0.0
    return off / max(float(one.abs().max()), float(other.abs().max()), 1e-30) if off else 0.0
