"""The search for the smallest call that breaks a property: Hypothesis over cases, in two passes.

The first pass looks at all examples and notes which causes are seen; only then is the smallest case searched for each,
so that shrinking one fault never ends at another. The number of examples is that of the user's Hypothesis profile,
where one is loaded; the search is repeatable, unless ``--hypothesis-seed=random`` asks for another.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import NoSuchExample

from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.strategies.loss_cases import Case

    Look = Callable[[Case], Any]


EXAMPLES = 40
"""Calls that each property is tried on under Hypothesis' own profile."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at one case saw: the cause, and what a finding says of it."""

    cause: str
    summary: str
    measured: str
    shown_by: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The smallest case that shows a cause, and how often it was seen among the examples of the first pass."""

    case: Case
    seen: Seen
    times: int
    of: int


def search(cases: SearchStrategy[Case], look: Look, seed: int, hypothesis_seed: str, share: float = 1.0) -> list[Found]:
    """Each cause with its smallest case, among a share of the examples; raises ``CannotDecide`` with the commonest
    reason where no case was judged."""
    causes: Counter[str] = Counter()
    undecided: Counter[str] = Counter()
    judged = 0

    def note(case: Case) -> bool:
        nonlocal judged
        try:
            seen = look(case)
        except CannotDecide as reason:
            undecided[str(reason)] += 1
            return False
        judged += 1
        if seen is not None:
            causes[seen.cause] += 1
        return False

    number = None if hypothesis_seed == "random" else _number(hypothesis_seed, seed)
    _find(cases, note, number, share)
    if not judged and undecided:
        raise CannotDecide(undecided.most_common(1)[0][0])
    return [_smallest(cases, look, cause, times, judged, number, share) for cause, times in causes.most_common()]


def _smallest(
    cases: SearchStrategy[Case], look: Look, cause: str, times: int, judged: int, number: int | None, share: float
) -> Found:
    def shows(case: Case) -> bool:
        try:
            seen = look(case)
        except CannotDecide:
            return False
        return seen is not None and seen.cause == cause

    case = _find(cases, shows, number, share)
    if case is None:
        raise CannotDecide(f"{cause} was seen and not found again: the criterion does not repeat itself under one seed")
    return Found(case, look(case), times, judged)


def _find(
    cases: SearchStrategy[Case], condition: Callable[[Case], bool], number: int | None, share: float
) -> Case | None:
    default = hypothesis.settings.default or hypothesis.settings()
    wished = default.max_examples
    own = wished == hypothesis.settings.get_profile("default").max_examples
    settings = hypothesis.settings(
        default,
        max_examples=math.ceil(share * (EXAMPLES if own else wished)),
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return hypothesis.find(cases, condition, settings=settings, random=None if number is None else Random(number))
    except NoSuchExample:
        return None


def _number(hypothesis_seed: str, seed: int) -> int:
    try:
        return int(hypothesis_seed)
    except ValueError:
        return seed
