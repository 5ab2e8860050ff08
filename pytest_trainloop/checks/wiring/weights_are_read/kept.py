"""What is made of the first batch, kept under no key, and used for later ones: a mask, an adjacency, features.

In the record of calls it is a value made of the first batch alone. Two later batches are computed with it, row by row,
and the line that makes it does not run again. It matters if another first batch gives another value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.weights_are_read.causes import found
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.call_log import Calls
from pytest_trainloop.recording import torch_names as functions
from pytest_trainloop.runs.batch_stream import first_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.instruments.tracing.call_log import Call, Value
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.runs.evidence import Evidence

BATCHES = 3
"""Batches that are looked at."""

ORDER, SWAPPED = (0, 1, 2), (1, 0, 2)

ROUNDING = 1e-6
"""Relative difference that another order of summation may make."""

_PRODUCTS = frozenset("matmul mm bmm __matmul__ spmm sparse_mm".split())
_BY_ROW = functions.MULTIPLICATIONS | functions.ADDITIONS | functions.SUBTRACTIONS | functions.MASKING
_BY_ROW |= functions.ATTENTION | functions.SCATTERS | functions.INDEXING | _PRODUCTS


@dataclass(eq=False)
class ThreeBatches(Calls):
    """The calls of the steps on three batches."""

    now: int = -1
    """The number of the batch that was yielded last."""
    at: list[int] = field(default_factory=list)
    """By the number of a call, the batch that was yielded before it."""
    caught: torch.Tensor | None = None
    """What one call gave."""

    def take(self, number: int, item: Any) -> None:
        self.now = number
        super().take(number, item)

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.at.append(self.now)


def kept_from_first_batch(evidence: Evidence) -> Iterator[Finding]:
    """Values of the first batch that later ones are computed with, each by the line that makes it."""
    if not (seen := _run(evidence, ORDER)):
        return
    suspects: dict[tuple[str, int], tuple[Value, Call, Place]] = {}
    for value, meeting in _suspects(seen):
        place = value.made_by.place if value.made_by else meeting.place
        suspects.setdefault((place.file, place.line), (value, meeting, place))
    for value, meeting, place in suspects.values():
        distance = _change(evidence, seen, value)
        # one graph in every batch may be kept (odd: adjacency_of_the_only_graph)
        if distance > ROUNDING and (leaf := next((v for v in value.origins() if v.of_batch), None)):
            facts = {"shape": str(value.shape), "difference": distance, "function": meeting.name}
            yield found("kept_from_first_batch", meeting.place, (leaf.of_batch,), change=str(place), **facts)


def _change(evidence: Evidence, seen: ThreeBatches, value: Value) -> float:
    """How far a value is from that of another first batch, relative to the larger entry."""
    if made := value.made_by:
        runs = [_run(evidence, order, made.number) for order in (ORDER, SWAPPED)]
        both = [r.caught for r in runs if r and r.caught is not None and r.calls[made.number].name == made.name]
    else:
        pairs = zip(seen.batch, seen.tensors, strict=True)
        mine = {v.number: tensor.double() for v, tensor in pairs if v.of_batch == value.of_batch}
        both = [mine[number] for number in (0, 1) if number in mine]
    if len(both) < 2:
        return 0.0
    one, other = both
    if one.shape != other.shape:
        return 1.0
    off = float((one - other).abs().max()) if one.numel() else 0.0
    return off / max(float(one.abs().max()), float(other.abs().max()), 1e-30) if off else 0.0


def _run(evidence: Evidence, order: tuple[int, ...], caught: int = -1) -> ThreeBatches | None:
    """The steps on the loop's first batches in this order, with what one call gives; None where they are not made."""
    seen = ThreeBatches(steps=BATCHES)

    def catch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            seen.caught = out.detach().clone().to_dense().double()
        return out

    def batches(loop: TrainLoop) -> list[Any]:
        """The loop's first batches; of a loop with one, this and two of its rows in other orders."""
        axis = loop.batch_dim if isinstance(loop.batch_dim, int) else 0
        if loop.batches is not None:
            drawn = first_batches(loop, BATCHES)
        elif (rows := nested.rows(loop.batch, axis)) > 1:
            orders = [[(i + turn) % rows for i in range(rows)] for turn in range(BATCHES)]
            drawn = [nested.take(loop.batch, chosen, axis) for chosen in orders]
        else:
            drawn = [loop.batch] * BATCHES
        return [nested.copy(drawn[i]) for i in order]

    seen.others = {caught: catch}
    plan = replace(
        evidence.plan(),
        contexts=seen.contexts,
        items=batches,
        before_item=seen.take,
        read_ahead=None,
        varied="with its batches in another order",
        may_raise=True,
    )
    record = evidence.rerun(plan)
    return seen if record.raised is None and seen.now == BATCHES - 1 else None


def _suspects(seen: ThreeBatches) -> Iterator[tuple[Value, Call]]:
    """Values made with the first batch, and a call in which each later batch meets them on the way to the loss."""
    of: dict[int, set[int]] = {id(v): {v.number} for v in seen.batch}
    """By the identity of a value, the numbers of the batches whose entries it was made of."""
    for call in seen.calls:
        made_of = (of.get(id(v), set()) for v in call.inputs if call.name not in functions.SHAPE_ONLY)
        of |= dict.fromkeys(map(id, call.outputs), set[int]().union(*made_of))
    leads = {id(root) for root in seen.roots}
    for call in reversed(seen.calls):
        if any(id(out) in leads for out in call.outputs):
            leads.update(id(value) for value in call.inputs)
    again = {call.site for call, at in zip(seen.calls, seen.at, strict=True) if at > 0}
    read = {id(value) for call in seen.calls for value in call.inputs}
    unread = {(v.of_batch, v.number) for v in seen.batch if id(v) not in read}
    kept: dict[int, tuple[Value, Call, set[int]]] = {}
    for call, at in zip(seen.calls, seen.at, strict=True):
        met = at > 0 and any(id(out) in leads for out in call.outputs) and _aligned(call)
        if not met or not any(of.get(id(v)) == {at} for v in call.inputs):
            continue
        for value in call.inputs:
            for first in _from_before(seen, value) if of.get(id(value)) == {0} else ():
                made = first.made_by
                # a memory of batches makes its values again, and reads each batch; no loop of the corpus needs this
                replaced = made.site in again if made else (first.of_batch, at) not in unread
                if not replaced and not first.history and of.get(id(first)) == {0}:
                    kept.setdefault(id(first), (first, call, set()))[2].add(at)
    yield from ((value, call) for value, call, met in kept.values() if len(met) >= BATCHES - 1)


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
    """Whether a call takes its two inputs row by row, or sums over the rows of one with weights of the other.

    Statistics of the first batch, and anchors that each row is compared with, are met otherwise (odd:
    scaled_by_the_first_batch, anchors_from_the_first_batch).
    """
    inputs = [v for v in call.inputs if v.shape and v.shape[0] > 1]
    if len(inputs) < 2:
        return False
    left, right = inputs[:2]
    rows = left.shape[0] == right.shape[0]
    if call.name in _PRODUCTS and len(left.shape) == len(right.shape) == 2:
        return rows and left.shape[1] == right.shape[0]
    if call.name in functions.LOSSES or call.name not in _BY_ROW:
        return rows and call.name in functions.LOSSES
    picked = call.name == "__getitem__" and not right.floating
    return picked or (rows and len(left.shape) == len(right.shape))
