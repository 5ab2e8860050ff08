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

CHANCE = 1e-7
"""The chance of means or spreads that are further apart in two draws of one distribution: of a thousand tensors none
is."""

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
    """Whether mean and spread are as far apart as chance has it in two draws of this size, by the tests of Student and
    Fisher: of two entries the spread tells nothing, of one neither does the mean."""
    (mean, spread, size), (other_mean, other, _) = _of(old, match.old), _of(new, match.new)
    if size == 1:
        return not {mean, other_mean} & {0.0, 1.0}  # no random number is exactly that
    if any(constant(t) for t in (*_tensors(old, match.old), *_tensors(new, match.new))):
        return False
    free = size - 1
    ratio = max(spread, other) / min(spread, other) if spread and other else math.inf
    if 2 * _beta_tail(1 / (1 + ratio**2), free / 2, free / 2) < CHANCE:
        return False
    student = (mean - other_mean) ** 2 * free / (spread**2 + other**2)
    return _beta_tail(2 * free / (2 * free + student), free, 0.5) >= CHANCE


def _beta_tail(z: float, a: float, b: float) -> float:
    """An upper bound of the incomplete beta function I_z(a, b), close where it is small: z^a (1-z)^b / (a B(a, b))
    times the geometric series that bounds the rest."""
    if z >= (a + 1) / (a + b) or z >= 1.0:
        return 1.0
    if z <= 0.0:
        return 0.0
    beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    tail = math.exp(a * math.log(z) + b * math.log1p(-z) - math.log(a) - beta)
    return min(1.0, tail / (1 - z * (a + b) / (a + 1)))


def _tensors(course: Course, own: tuple[str, ...]) -> list[Tensor]:
    return [course.tensors[name] for name in own]
