"""A picture as plain data: axes with units, what is drawn, what to look for, and the checks that it belongs to.

Nothing here draws. Numbers are finite or None: where a value is not finite, the drawing has a gap, and a mark says so.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DIGITS = 4
"""Significant digits of a number: more than any screen shows."""

Scale = Literal["linear", "log"]

Role = Literal["own", "reference", "each", "faint", "event"]
"""Of a curve. "own": the loop's; "reference": another run, to compare with; "each": one of several of the same rank;
"faint": the single values behind a mean; "event": single moments, drawn as points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What an axis, or the colour of a map, counts."""

    title: str
    unit: str = ""
    """Empty for a number without one."""
    scale: Scale = "linear"
    """"log" only where every value is above 0."""
    zero: str = ""
    """Of the colour of a map: what a 0 means, where the drawing marks it with a hatching."""


STEP_AXIS = Axis(title="optimizer step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve: as many ``x`` as ``y``; None in ``y`` is a gap."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    role: Role = "own"
    stepped: bool = False
    """Whether a value holds until the next one: drawn as stairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bars of one kind, one for each label; None where there is none."""

    name: str
    values: tuple[float | None, ...]
    role: Literal["own", "reference"] = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a step."""

    lane: str
    """What is called: "zero", "forward", "backward", "clip", "step", ... with the name of the module or optimizer where
    there are several."""
    where: str
    """``train.py:31``, relative to the project; empty where no line of the project's made it."""
    code: str
    """The source of that line."""
    block: int = 0
    """Calls in a row with the same number are repeated together, as often as ``times`` says."""
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across the drawing at one value, with its text."""

    axis: Literal["x", "y"]
    at: float
    text: str
    where: str = ""
    """The line of the user's that sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What one drawing shows. ``kind`` says which of ``curves``, ``bars``, ``cells`` and ``calls`` it has."""

    key: str
    """Its stable name: "rates"."""
    kind: Literal["curves", "bars", "map", "calls"]
    title: str
    look: str
    """What to look for, in one sentence."""
    of: str
    """The run that it is of, in words."""
    checks: tuple[str, ...] = ()
    """The checks, or ``check:cause``, whose failure it belongs to, those that it shows best first."""
    where: str = ""
    """The line of the user's that what is drawn comes from."""
    x: Axis = STEP_AXIS
    y: Axis = Axis(title="")
    curves: tuple[Curve, ...] = ()
    labels: tuple[str, ...] = ()
    """Of the bars, or of the rows of a map from the top down: names of tensors or modules, or sizes ("1e-3")."""
    bars: tuple[Bar, ...] = ()
    columns: tuple[float | str, ...] = ()
    """Of a map: the x value of each column."""
    cells: tuple[tuple[float | None, ...], ...] = ()
    """Of a map: a row for each label, a value for each column."""
    colour: Axis = Axis(title="")
    """Of a map: what the values are."""
    calls: tuple[Call, ...] = ()
    marks: tuple[Mark, ...] = ()
    note: str = ""
    """What is left out, or else must be known: "60 of 148 tensors"."""

    def to_json(self) -> dict[str, Any]:
        """The picture as plain data, without the fields of the other kinds."""
        others = frozenset().union(*FIELDS.values()) - FIELDS[self.kind]
        return {name: value for name, value in asdict(self).items() if name not in others}


FIELDS = {
    "curves": frozenset({"x", "y", "curves"}),
    "bars": frozenset({"x", "labels", "bars"}),
    "map": frozenset({"x", "y", "labels", "columns", "cells", "colour"}),
    "calls": frozenset({"calls"}),
}
"""The fields of each kind of picture that not all have. The values of bars lie along ``x``."""


POINTS = 200
"""Points of one curve at most: as many as a phone shows."""


def curve(
    name: str, x: Iterable[float], y: Iterable[float | None], role: Role = "own", *, stepped: bool = False
) -> Curve:
    """A curve whose numbers are finite or None; of more points than are seen the first, the last, the highest and the
    lowest of each stretch."""
    points = [(at, number(value)) for at, value in zip(x, y, strict=True)]
    if len(points) > POINTS:
        points = [points[i] for i in _seen([value for _, value in points])]
    return Curve(name=name, x=tuple(at for at, _ in points), y=tuple(v for _, v in points), role=role, stepped=stepped)


def _seen(values: Sequence[float | None]) -> list[int]:
    """The numbers of the points that are kept: of each stretch those between which all others lie."""
    stretches = POINTS // 2 - 1
    kept = {0, len(values) - 1}
    for n in range(stretches):
        stretch = range(n * len(values) // stretches, (n + 1) * len(values) // stretches)
        known = [i for i in stretch if values[i] is not None]
        kept |= (
            {min(known, key=lambda i: values[i] or 0.0), max(known, key=lambda i: values[i] or 0.0)} if known else set()
        )
    return sorted(kept)


def scale_of(curves: Iterable[Curve], *, span: float = 10.0) -> Scale:
    """ "log" where all values are above 0 and the highest is ``span`` times the lowest or more."""
    known = [value for one in curves for value in one.y if value is not None]
    return "log" if known and min(known) > 0 and max(known) >= span * min(known) else "linear"


LEAST_SPAN = 0.1
"""Of the largest value: what a linear axis spans at least, so that rounding and noise do not look like a descent."""


def widened(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest of values, widened to at least ``LEAST_SPAN`` of the larger: what an axis shows."""
    known = sorted(values)
    low, high = known[0], known[-1]
    lacking = max(0.0, LEAST_SPAN * max(abs(low), abs(high)) - (high - low))
    return low - lacking / 2, high + lacking / 2


def gaps(curves: Iterable[Curve]) -> Iterator[Mark]:
    """A mark where a curve begins to be no number."""
    for one in curves:
        first = next((x for x, y in zip(one.x, one.y, strict=True) if y is None), None)
        if first is not None and one.role != "faint":
            yield Mark(axis="x", at=first, text=f"{one.name}: not finite from here")
            return


def number(value: float | None) -> float | None:
    """A number to a few digits; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def numbers(values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(map(number, values))
