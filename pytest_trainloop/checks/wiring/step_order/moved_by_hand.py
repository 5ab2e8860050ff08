"""Weights that user code moves between the backward passes of one step, or back after each step. No torch."""

from __future__ import annotations

import array
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.records.gradient_ledger import consuming_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.recording.events import Backward, Move, Step
    from pytest_trainloop.recording.record import Record

ASCENT = 1e-4
"""How far the cosine of a move with a gradient may be from 1: sampled entries are rounded to the weights' dtype."""

LEAST_MOVES = 4
"""Pulls that must agree in one rate and one point, in each entry."""

REACH = 4.0
"""Steps from the point within which nothing can be learned: a loop whose weights never get further is a fault."""

TAKEN_BACK = 0.2
"""Share of a step that is taken back, from which it is said (docs/how-it-decides.md#weights-that-are-moved-back)."""

ULPS = 8
"""Units in the last place of a weight within which its change is known: two products, a sum and a difference."""

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_CODES = {"float64": "d", "float32": "f"}


@dataclass(frozen=True, slots=True)
class KeptGradient:
    """Steps that use the gradients of two states of the weights, one reached from the other along the first."""

    second: Backward
    step: Step
    steps: int
    of_steps: int
    cosine: float
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Weights that are pulled towards one point that never moves, after each step."""

    rate: float
    """The share of the distance that each pull goes."""
    taken_back: float
    """The share of a step that a pull takes back, the median."""
    moves: int
    parameters: tuple[str, ...]
    towards: tuple[str, ...]
    """Parameters that hold the values of that point and never change; empty where none is known."""
    to_start: bool
    """Whether the point is where the weights began."""
    step: Step
    every: float
    """Steps from one pull to the next."""

    @property
    def reach(self) -> float:
        """How many steps, the largest ones laid end to end, the weights can be away from that point after a pull."""
        return self.every * (1.0 - self.rate) / self.rate

    @property
    def puts_back(self) -> bool:
        """Whether it goes all the way: weights that are put back where they were."""
        return self.rate > 1.0 - 1e-6


def kept_gradient(record: Record) -> KeptGradient | None:
    """Two steps or more before which the weights moved along the gradient that still stands in ``.grad``."""
    found: list[tuple[Backward, Step, float, set[int]]] = []
    steps = consuming_steps(record)
    last: dict[int, int] = {}
    for step in steps:
        since, until = last.get(step.optimizer, 0), step.reads[-1].at
        last[step.optimizer] = until
        mine = set(record.optimizers[step.optimizer].parameters)
        passes = [b for b in record.backwards() if since < b.at < until and mine & set(b.arrivals)]
        for first, second in itertools.pairwise(passes):
            between = [m for m in record.moves if first.at < m.at <= second.at and m.change]
            cosine, moved = _cosine(record, between, second, mine) if len(between) == 1 else (0.0, set())
            if cosine >= 1.0 - ASCENT:
                found.append((second, step, cosine, moved))
    if len(found) < 2:
        return None
    second, step, cosine, moved = found[0]
    return KeptGradient(second, step, len(found), len(steps), cosine, record.names(moved))


def _cosine(record: Record, moves: list[Move], second: Backward, mine: set[int]) -> tuple[float, set[int]]:
    """That of a move with what stands in ``.grad`` before the second pass, over all weights; and these weights."""
    dot = moved = standing = 0.0
    used: set[int] = set()
    for index in mine & set(moves[0].change) & set(second.arrivals):
        residual = second.arrivals[index][0].residual
        code = _CODES.get(record.parameters[index].dtype)
        if residual is None or residual.zero or residual.sparse or code is None:
            continue
        gradient, change = array.array(code, residual.raw), moves[0].change[index]
        if len(gradient) != len(change):
            continue
        used.add(index)
        dot += _dot(gradient, change)
        moved += _dot(change, change)
        standing += _dot(gradient, gradient)
    lengths = math.sqrt(moved * standing)
    return (dot / lengths if lengths > 0.0 else 0.0), used


def pull(record: Record) -> Pull | None:
    """What takes back much of each step by pulling the weights towards a fixed point."""
    steps = consuming_steps(record)
    indices = {i for m in record.moves if m.by is None for i in m.change}
    if not steps or not indices or any(record.parameters[i].dtype not in _EPSILON for i in indices):
        return None
    pulls = _after_steps(record, indices)
    if len(pulls) < LEAST_MOVES:
        return None
    shares = [share for update, move in pulls if (share := _taken_back(update, move)) is not None]
    rate = _rate(record, [move for _, move in pulls])
    if rate is None or len(shares) < LEAST_MOVES or statistics.median(shares) < TAKEN_BACK:
        return None
    move = pulls[0][1]
    point = {i: [w + d / rate for w, d in zip(move.before[i], move.change[i], strict=True)] for i in move.change}
    if not any(abs(value) > 1e-6 for values in point.values() for value in values):
        return None  # towards zero: weight decay written by hand
    return Pull(
        rate=rate,
        taken_back=statistics.median(shares),
        moves=len(pulls),
        parameters=record.names(indices),
        towards=record.names(_holding(record, point, indices)),
        to_start=all(_same(record, i, values, i) for i, values in point.items()),
        step=steps[0],
        every=len([s for s in steps if indices & set(s.reads[-1].grads)]) / len(pulls),
    )


def _after_steps(record: Record, indices: set[int]) -> list[tuple[dict[int, list[float]], Move]]:
    """Each move by hand with what the steps since the one before had added."""
    found: list[tuple[dict[int, list[float]], Move]] = []
    update: dict[int, list[float]] = {}
    for move in record.moves:
        mine = indices & set(move.change)
        if not mine:
            continue
        if move.by is not None:
            for i in mine:
                added = update.get(i) or [0.0] * len(move.change[i])
                update[i] = [a + b for a, b in zip(added, move.change[i], strict=True)]
        else:
            if update:
                found.append((update, move))
            update = {}
    return found


def _taken_back(update: dict[int, list[float]], move: Move) -> float | None:
    mine = set(update) & set(move.change)
    size = sum(_dot(update[i], update[i]) for i in mine)
    return -sum(_dot(update[i], move.change[i]) for i in mine) / size if size > 0.0 else None


def _rate(record: Record, moves: list[Move]) -> float | None:
    """The rate of a pull towards one fixed point: changes differ by that share of how the weights differ, up to
    rounding. None where they do not."""
    pairs = list(itertools.pairwise(moves))
    indices = set.intersection(*(set(m.change) for m in moves))
    if not indices:
        return None
    top = bottom = 0.0
    for a, b in pairs:
        for i in indices:
            weights, changes = _minus(b.before[i], a.before[i]), _minus(b.change[i], a.change[i])
            top -= _dot(changes, weights)
            bottom += _dot(weights, weights)
    rate = top / bottom if bottom > 0.0 else 0.0
    if not 0.0 < rate < 1.0 + 1e-6:
        return None
    left = rounding = 0.0
    for a, b in pairs:
        for i in indices:
            weights, changes = _minus(b.before[i], a.before[i]), _minus(b.change[i], a.change[i])
            rest = [c + rate * w for c, w in zip(changes, weights, strict=True)]
            left += _dot(rest, rest)
            ulp = ULPS * _EPSILON[record.parameters[i].dtype]
            rounding += ulp**2 * _dot(b.before[i], b.before[i])
    known = rate**2 * bottom >= 100.0 * rounding
    return rate if known and left <= rounding + 1e-12 * rate**2 * bottom else None


def _holding(record: Record, point: dict[int, list[float]], indices: set[int]) -> set[int]:
    """Parameters besides these that hold the values of the point from the first to the last."""
    changed = record.changed()
    return {
        p.index
        for p in record.parameters
        for i, values in point.items()
        if p.index not in indices | changed
        and p.shape == record.parameters[i].shape
        and _same(record, p.index, values, i)
    }


def _same(record: Record, index: int, values: Sequence[float], like: int) -> bool:
    """Whether a parameter began with these values, up to the rounding of how they were found."""
    entry = record.parameters[index]
    code = _CODES.get(entry.dtype)
    if code is None or record.parameters[like].dtype != entry.dtype:
        return False
    start = array.array(code, entry.start.raw)
    if len(start) != len(values):
        return False
    size = max((abs(v) for v in start), default=0.0)
    return all(abs(a - b) <= 1e-3 * size for a, b in zip(start, values, strict=True))


def _minus(a: Iterable[float], b: Iterable[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _dot(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
