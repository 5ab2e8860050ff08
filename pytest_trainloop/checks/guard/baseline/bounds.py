"""How far two digests of one tensor may be apart by rounding alone (docs/how-it-decides.md#a-baseline).

The bound of each place is derived from the loop itself: it is made again with each weight at the start and each number
of the data moved by one unit in the last place, and 1e3 times the largest difference that this makes up to a step is
what another order of summation may make. A place that such a change throws anywhere (the bias before a batch norm,
whose gradient is rounding and nothing else) decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_trainloop.baselines.trajectory import Course, Digest, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

ROUNDING = 1e3
"""Times the difference that one unit in the last place makes."""

AT_HOME = 16.0
"""The same on the environment of the baseline, where only another order of the same operations is left; for a loop that
asks for other dtypes than it did."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23}

UNDECIDED = 1e-2
"""A bound from which on a place decides nothing: causes change a number by more than rounding and mostly by more than
this, and a bound this wide comes of growth that leaves no digits."""

Where = tuple[str, "Hashable"]
"""A kind of place ("gradient", "weights", "gave", "given", "loss") and its name there."""


def sum_of(digests: Iterable[Digest]) -> Digest:
    """The digest of the tensors joined, without what depends on their order."""
    parts = list(digests)
    total = None if any(part.total is None for part in parts) else math.fsum(part.total or 0.0 for part in parts)
    by_row = None if any(part.by_row is None for part in parts) else math.fsum(part.by_row or 0.0 for part in parts)
    return Digest(squares=math.fsum(part.squares for part in parts), total=total, by_row=by_row)


def without_order(digest: Digest) -> Digest:
    """The digest as that of a tensor that is laid out in any way."""
    return Digest(squares=digest.squares, total=digest.total)


def distance(a: Digest, b: Digest) -> float:
    """An estimate of |a - b| / max(|a|, |b|) of the tensors behind two digests; infinite where one only is finite.

    The sums change by about |a - b| where the entries of a - b have signs of their own, and by more where they have one
    in common.
    """
    size = math.sqrt(max(a.squares, b.squares, 0.0)) if a.squares == a.squares and b.squares == b.squares else math.nan
    if size == 0.0:
        return 0.0
    if not math.isfinite(size):
        return 0.0 if _same(a.squares, b.squares) else math.inf
    apart = [abs(a.squares - b.squares) / (2 * size * size)]
    for one, other in ((a.total, b.total), (a.ordered, b.ordered), (a.by_row, b.by_row)):
        if one is not None and other is not None:
            apart.append(abs(one - other) / size)
    return max(apart)


def number_distance(a: float, b: float, scale: float = 0.0) -> float:
    """|a - b| over the largest of both and ``scale``."""
    if _same(a, b):
        return 0.0
    size = max(abs(a), abs(b), scale)
    return abs(a - b) / size if math.isfinite(size) else math.inf


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@dataclass(frozen=True, slots=True)
class Nudged:
    """A course of the same loop with last digits moved at the start."""

    course: Course
    later: int = 0
    """1 where weights were moved as a step moves them: what differs at the first step then may differ at the second."""


@dataclass(slots=True)
class Bounds:
    """The bound of each place of a course. ``nudged`` makes courses of the same loop with last digits moved; it is
    asked once, and only where two courses differ by more than rounding makes in a single step."""

    course: Course
    nudged: Callable[[], Sequence[Nudged]]
    eps: float = EPS["float64"]
    times: float = ROUNDING
    _moved: dict[Where, list[tuple[int, float]]] | None = field(default=None)

    @property
    def least(self) -> float:
        return self.times * self.eps

    def exceeded(self, apart: float, where: Where, step: int) -> bool:
        """Whether a difference at this place and step is more than rounding."""
        if apart <= self.least:
            return False
        return apart > self.at(where, step)

    def is_open(self, where: Where, step: int) -> bool:
        """Whether rounding was found to throw this place anywhere; not where nobody had to look."""
        return self._moved is not None and math.isinf(self.at(where, step))

    def at(self, where: Where, step: int) -> float:
        """The bound; infinite where the place decides nothing."""
        if self._moved is None:
            self._moved = moved(self.course, self.nudged())
        largest = max((apart for at, apart in self._moved.get(where, ()) if at <= step), default=0.0)
        bound = max(self.least, self.times * largest)
        return math.inf if bound > UNDECIDED else bound


def moved(course: Course, nudged: Sequence[Nudged]) -> dict[Where, list[tuple[int, float]]]:
    """By place, how far the nudged courses are from this one, at each step."""
    found: dict[Where, list[tuple[int, float]]] = {}
    for other in nudged:
        for mine, theirs in course.paired(other.course):
            for where, apart in differences(mine, theirs):
                found.setdefault(where, []).append((mine.number + other.later, apart))
    return found


def differences(mine: Step, theirs: Step) -> Iterable[tuple[Where, float]]:
    """The places of one step, and how far two courses of the same code are apart there."""
    for name, digest in mine.gradients.items():
        if name in theirs.gradients:
            yield ("gradient", name), distance(digest, theirs.gradients[name])
    for name, digest in mine.weights.items():
        if name in theirs.weights:
            yield ("weights", name), distance(digest, theirs.weights[name])
    for a, b in zip(mine.losses, theirs.losses, strict=False):
        yield ("loss", ""), number_distance(a, b)
    for call, same in zip(mine.calls or (), theirs.calls or (), strict=False):
        if call.path == same.path:
            yield ("gave", call.path), distance(call.gave, same.gave)
            yield ("given", call.path), distance(call.given, same.given)
