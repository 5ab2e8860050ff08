"""Weights that begin with other values: only other random numbers, or another distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.bounds import distance, sum_of
from pytest_trainloop.checks.guard.baseline.names import constant

if TYPE_CHECKING:
    from pytest_trainloop.baselines.trajectory import Course, Digest, Tensor
    from pytest_trainloop.checks.guard.baseline.names import Match, Names

ERRORS = 6.0
"""Standard errors that the mean and the spread of two draws of one distribution stay within: of a thousand tensors none
is further apart by chance."""

START = 1e-9
"""Draws agree to the rounding of what scales them."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Tensors that begin with other values, in the order of registration."""

    drawn: tuple[str, ...]
    """Those of the same mean and spread: only the random numbers are others."""
    scaled: tuple[str, ...]
    """Those of another mean or spread."""
    text: str
    """What the first of them begins with, before and now."""
    ratio: float | None = None


def begun(old: Course, new: Course, names: Names) -> Begun | None:
    """The tensors that begin with other values; None where all begin alike."""
    order = {name: place for place, name in enumerate(new.tensors)}
    drawn: list[tuple[int, str]] = []
    scaled: list[tuple[int, str, str, float | None]] = []
    for match in names.matches:
        a, b = match.digest(_starts(old), _starts(new))
        if a is None or b is None or distance(a, b) <= START:
            continue
        name = match.new[0]
        if _one_distribution(match, old, new):
            drawn.append((order[name], name))
        else:
            before, now = (_of(course, own) for course, own in ((old, match.old), (new, match.new)))
            ratio = now[1] / before[1] if before[1] and now[1] else None
            text = (
                f"{name}: mean {now[0]:.3g}, spread {now[1]:.3g}; in the baseline {before[0]:.3g} and {before[1]:.3g}"
            )
            scaled.append((order[name], name, text, ratio))
    if not drawn and not scaled:
        return None
    scaled.sort()
    drawn.sort()
    text, ratio = (scaled[0][2], scaled[0][3]) if scaled else ("", None)
    return Begun(tuple(name for _, name in drawn), tuple(name for _, name, *_ in scaled), text, ratio)


def _starts(course: Course) -> dict[str, Digest]:
    return {name: tensor.start for name, tensor in course.tensors.items()}


def _of(course: Course, own: tuple[str, ...]) -> tuple[float, float, int]:
    """Mean, spread and number of the entries of tensors joined."""
    tensors = [course.tensors[name] for name in own]
    size = sum(math.prod(tensor.shape) for tensor in tensors)
    whole = sum_of(tensor.start for tensor in tensors)
    mean = (whole.total or 0.0) / max(size, 1)
    return mean, math.sqrt(max(whole.squares / max(size, 1) - mean * mean, 0.0)), size


def _one_distribution(match: Match, old: Course, new: Course) -> bool:
    """Whether mean and spread agree to the errors of random draws of this size."""
    if any(constant(t) for t in (*_tensors(old, match.old), *_tensors(new, match.new))):
        return False
    (mean, spread, size), (other_mean, other, _) = _of(old, match.old), _of(new, match.new)
    error = math.sqrt(2.0 / size)
    return abs(mean - other_mean) <= ERRORS * error * max(spread, other) and abs(
        spread - other
    ) <= ERRORS * error * max(spread, other)


def _tensors(course: Course, own: tuple[str, ...]) -> list[Tensor]:
    return [course.tensors[name] for name in own]
