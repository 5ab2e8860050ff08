"""The search for the smallest call that violates a property: Hypothesis over cases, in two passes.

The first pass judges all examples and notes which causes occur. The second pass shrinks each cause alone, so that
shrinking one fault never ends at another. The number of examples is that of the user's Hypothesis profile, where one is
loaded. The search is repeatable, unless ``--hypothesis-seed=random`` asks for another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import NoSuchExample

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import Finding

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.instruments.strategies.loss_cases import Case

T = TypeVar("T")

Judge = Callable[["Case"], Finding | None]
"""What is wrong with one case, or None. Raises ``CannotDecide`` for a case that says nothing."""

EXAMPLES = 40
"""Calls that each property is tried on under Hypothesis' own profile."""


@dataclass(frozen=True, slots=True)
class Violation:
    """The smallest case that shows one cause."""

    case: Case
    finding: Finding
    """What the property says of this case."""
    times: int
    """Examples of the first pass that showed the cause, ..."""
    examples: int
    """... among this many that could be judged."""


@dataclass(frozen=True, slots=True)
class Search:
    """How to search: with which random numbers, and among which share of the examples."""

    seed: int
    hypothesis_seed: str = ""
    """Hypothesis' own option, which wins over ``seed``: a number, or "random"."""
    share: float = 1.0

    def violations(self, cases: SearchStrategy[Case], judge: Judge) -> list[Violation]:
        """Each cause with its smallest case, the most frequent one first.

        Raises ``CannotDecide`` with the most frequent reason where no case could be judged.
        """
        causes: Counter[str] = Counter()
        undecided: Counter[str] = Counter()
        judged = 0

        def note(case: Case) -> bool:
            nonlocal judged
            try:
                finding = judge(case)
            except CannotDecide as reason:
                undecided[str(reason)] += 1
                return False
            judged += 1
            if finding is not None:
                causes[finding.cause] += 1
            return False

        self._find(cases, note)
        if not judged and undecided:
            raise CannotDecide(undecided.most_common(1)[0][0])
        return [self._smallest(cases, judge, cause, times, judged) for cause, times in causes.most_common()]

    def _smallest(self, cases: SearchStrategy[Case], judge: Judge, cause: str, times: int, examples: int) -> Violation:
        def shows(case: Case) -> bool:
            try:
                finding = judge(case)
            except CannotDecide:
                return False
            return finding is not None and finding.cause == cause

        case = self._find(cases, shows)
        finding = None if case is None else judge(case)
        if case is None or finding is None:
            raise CannotDecide(f"{cause} did not occur again: the criterion is not reproducible under one seed")
        return Violation(case, finding, times, examples)

    def _find(self, cases: SearchStrategy[Case], condition: Callable[[Case], bool]) -> Case | None:
        return find(cases, condition, Repeatable(self.seed, self.hypothesis_seed), share=self.share)


@dataclass(frozen=True, slots=True)
class Repeatable:
    """The random numbers of a search: the same each time, unless Hypothesis' own option says "random"."""

    seed: int
    hypothesis_seed: str = ""
    """Hypothesis' own option, which wins over ``seed``: a number, or "random"."""

    def random(self) -> Random | None:
        if self.hypothesis_seed == "random":
            return None
        try:
            return Random(int(self.hypothesis_seed))
        except ValueError:
            return Random(self.seed)


def find(
    strategy: SearchStrategy[T], condition: Callable[[T], bool], repeatable: Repeatable, *, share: float = 1.0
) -> T | None:
    """The smallest example that meets the condition; None where none was found.

    As many examples are tried as the user's Hypothesis profile says, or 40 under Hypothesis' own, times ``share``.
    Nothing is read from its database or written to it: what an earlier run saw decides nothing.
    """
    default = hypothesis.settings.default or hypothesis.settings()
    examples = default.max_examples
    if examples == hypothesis.settings.get_profile("default").max_examples:
        examples = EXAMPLES
    settings = hypothesis.settings(
        default,
        max_examples=math.ceil(share * examples),
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return hypothesis.find(strategy, condition, settings=settings, random=repeatable.random())
    except NoSuchExample:
        return None
