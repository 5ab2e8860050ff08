"""What the calls of one step show: an input that is read in the place of another, weights that are cut to 0."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.values import alike, count_up, plain, two_valued
from pytest_trainloop.checks.batch.every_row_teaches.cuts import cuts, with_fractions
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.source import place_of
from pytest_trainloop.recording.torch_names import (
    CASTS,
    CLASS_LOSSES,
    DROPOUTS,
    EMBEDDINGS,
    INDEXING,
    MULTIPLICATIONS,
    SIZES,
    TO_PYTHON,
    VIEWS,
)
from pytest_trainloop.runs.batch_stream import first_batch
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.tracing.call_log import Call, Calls, Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

_PICKS = INDEXING | EMBEDDINGS
_MOVES = VIEWS | CASTS | INDEXING
_IGNORED = SIZES | {"__len__", "is_floating_point", "is_nested", "__deepcopy__", "deepcopy"}


@dataclass(frozen=True, slots=True)
class ReadTwice:
    """The same calls are made with ``read`` twice, and ``unread``, which is like it, is never read."""

    read: str
    unread: str
    place: Place
    """The second of the calls."""
    calls: int
    noise: bool
    """Whether dropout may make two different results of one input."""


@dataclass(frozen=True, slots=True)
class CutWeights:
    """``rows`` of ``count`` weights that ``op`` made whole numbers are 0."""

    op: str
    place: Place
    source: Place
    rows: int
    count: int


def read_twice(evidence: Evidence) -> ReadTwice | None:
    """A tensor of the batch that is read in the place of another one of its kind."""
    batch = example(evidence)
    if not any(_like(one, other) for one, other in itertools.combinations(nested.tensors(batch), 2)):
        return None
    seen, record = step_seen(evidence, {})
    given = dict(zip((id(v) for v in seen.batch), seen.tensors, strict=True))
    found = [f for f in _twice(seen) if _like(given[id(f[0])], given[id(f[1])])]
    if record.raised is not None or not found:
        return None
    read, unread, calls = found[0]
    noise = any(call.name in DROPOUTS for call in seen.calls)
    return ReadTwice(read.of_batch, unread.of_batch, _line(*calls), len(found), noise)


def cut_weights(evidence: Evidence, suspected: Calls) -> CutWeights | None:
    """Weights of classes of which an integer division or a cast makes some 0. ``suspected`` are calls of a step."""
    if not any(_cut(suspected)):
        return None
    seen, record = step_seen(evidence, {})
    for cutting, weights, call in _cut(seen):
        _, other = step_seen(evidence, {cutting.number: with_fractions(cutting)})
        if other.raised is None and roots_of(other) != roots_of(record):
            op = "//" if "div" in cutting.name else cutting.name
            return CutWeights(op, call.place, cutting.place, weights.zeros, math.prod(weights.shape))
    return None


def example(evidence: Evidence) -> Any:
    """The example batch, or the first of the loop's own."""
    loop = evidence.fresh_loop()
    return first_batch(loop)


def step_seen(evidence: Evidence, others: dict[int, Any]) -> tuple[Calls, Record]:
    """A step on the loop's own batch, without dropout and with running statistics."""
    seen = Calls(others=others)

    def contexts(watch: Watch) -> Iterable[AbstractContextManager[Any]]:
        return (NoRandomness(), *seen.contexts(watch))

    plan = replace(
        evidence.plan(),
        contexts=contexts,
        before_item=seen.take,
        enough=lambda r: r.rounds >= 1,
        may_raise=True,
    )
    return seen, evidence.rerun(plan)


def roots_of(record: Record) -> list[float]:
    return [root.value for b in record.of(Backward) for root in b.roots]


def _like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may be two views, or two sides of a pair: of one shape and dtype, each of many values."""
    if one.shape != other.shape or one.dtype != other.dtype or one.dim() < 2 or not (plain(one) and plain(other)):
        return False
    return not torch.equal(one, other.to(one.device)) and not any(
        two_valued(t) or alike(t.flatten()) or count_up(t) for t in (one.detach(), other.detach())
    )


def _twice(seen: Calls) -> Iterator[tuple[Value, Value, list[Call]]]:
    """A tensor of the batch with which two equal calls are made, another one of its shape that none is made with, and
    these calls."""
    first = [v for v in seen.batch if v.number == 0]
    reads: dict[int, list[Call]] = {id(v): [] for v in first}
    for call in seen.calls:
        for value in call.inputs if read_by(call) else ():
            source = value.source(_MOVES)
            if id(source) in reads and call.name not in _MOVES:
                reads[id(source)].append(call)
    for read, unread in itertools.permutations(first, 2):
        if read.shape != unread.shape or reads[id(unread)]:
            continue
        equal: dict[object, list[Call]] = defaultdict(list)
        for call in reads[id(read)]:
            # a loss may take a difference twice (odd: returns_compared_twice_beside_old_values)
            if call.grad and any(v.history and not _of_batch(v) for v in call.inputs):
                equal[_key(call)].append(call)
        for calls in equal.values():
            # an actor and a critic each run the shared trunk (odd: advantage_weighted_regression)
            if len(calls) == 2 and _weighted_after(seen, calls[0]) == _weighted_after(seen, calls[1]):
                yield read, unread, calls


def _of_batch(value: Value) -> bool:
    return any(origin.of_batch for origin in value.origins())


def _key(call: Call) -> tuple[object, ...]:
    """Equal for calls of one function with equal arguments."""
    return call.name, call.plain, tuple(v.digest for v in call.inputs)


def _weighted_after(seen: Calls, start: Call) -> set[object]:
    """The calls with weights that the results of a call go into, at any distance."""
    reached, found = {id(v) for v in start.outputs}, set[object]()
    for call in seen.calls[start.number + 1 :]:
        if any(id(v) in reached for v in call.inputs):
            reached.update(id(v) for v in call.outputs)
            if any(v.parameter for v in call.inputs):
                found.add(_key(call))
    return found


def read_by(call: Call) -> bool:
    """Whether a call reads the entries of what it is given."""
    return call.name not in _IGNORED and bool(call.outputs or call.name in TO_PYTHON)


def _line(one: Call, other: Call) -> Place:
    """The line of the second call, nearest to it, at which the first was not made."""
    pairs = zip(one.site, other.site, strict=False)
    return next((place_of(*frame) for before, frame in pairs if before != frame), other.place)


def _cut(seen: Calls) -> Iterator[tuple[Call, Value, Call]]:
    """Calls that make whole numbers of fractions, some of them 0, what is picked of these by an index, and the call
    that it weighs a loss in."""
    for call in seen.calls:
        weighs = call.name in MULTIPLICATIONS and any(v.history for v in call.inputs)
        for value in call.inputs if weighs or call.name in CLASS_LOSSES else ():
            if value.history or not 0 < value.zeros < math.prod(value.shape):
                continue
            path = list(_moved_from(value))
            cutting = path[-1].made_by
            picked = call.name in CLASS_LOSSES or any(v.made_by and v.made_by.name in _PICKS for v in path)
            if picked and cutting is not None and cuts(cutting):
                yield cutting, value, call


def _moved_from(value: Value) -> Iterator[Value]:
    """A value, and what it was moved, cast or picked from, until something cuts it."""
    yield value
    while (call := value.made_by) is not None and call.name in _MOVES | _PICKS and not cuts(call) and call.inputs:
        value = call.inputs[0]
        yield value
