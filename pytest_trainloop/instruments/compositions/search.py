"""The search for the smallest composition that shows a fault.

``hypothesis.find`` and not a rule-based machine: a composition is one value, without a history. The verdict is made on
an explicit composition before, so that a search never finds a fault, and only makes one smaller: where it ends early,
for want of steps, what it has found until then is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import CannotDecide, Unreliable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.instruments.compositions.composition import Change, Composition
    from pytest_trainloop.runs.evidence import Evidence

MOST_STEPS = 16
"""The loop's own steps that a search may take by default."""


def smallest(
    strategy: SearchStrategy[Composition],
    shows: Callable[[Composition], bool],
    *,
    evidence: Evidence,
    most: int = MOST_STEPS,
) -> Composition | None:
    """The smallest composition that ``shows`` says yes to, as Hypothesis shrinks the strategy; None where none does.

    At most ``most`` of the loop's own steps are begun. Each composition is asked once; one that cannot be judged
    (``CannotDecide``, ``Unreliable``) shows nothing. The search is the same each time, unless
    ``--hypothesis-seed`` asks for another.
    """
    from pytest_trainloop.instruments.losses.search import Repeatable, find

    until = evidence.own_steps + most
    known: dict[Composition, bool] = {}

    def condition(composition: Composition) -> bool:
        if composition not in known:
            if evidence.own_steps >= until:
                return False
            try:
                known[composition] = shows(composition)
            except (CannotDecide, Unreliable):
                known[composition] = False
        return known[composition]

    return find(strategy, condition, Repeatable(evidence.seed, evidence.hypothesis_seed))


def of_rows(
    rows: Sequence[int], *, least: int = 1, most: int | None = None, change: Change | None = None
) -> SearchStrategy[Composition]:
    """Compositions of ``least`` to ``most`` different rows among ``rows``: shrinks to few, the first of them first."""
    from hypothesis import strategies as st

    from pytest_trainloop.instruments.compositions.composition import Composition

    def composed(places: list[int]) -> Composition:
        chosen = dict.fromkeys(rows[place] for place in places)  # one that is drawn twice can be left out
        for row in rows:
            if len(chosen) < least:
                chosen.setdefault(row)
        return Composition(tuple(chosen), change=change)

    highest = min(most or len(rows), len(rows))
    return st.lists(st.integers(0, len(rows) - 1), min_size=least, max_size=highest).map(composed)


def in_parts(rows: Sequence[int], k: int, *, most: int) -> SearchStrategy[Composition]:
    """Compositions of k micro-batches of equally many rows, ``most`` in each at most: shrinks to one row in each, the
    first of ``rows`` first."""
    from hypothesis import strategies as st

    from pytest_trainloop.instruments.compositions.composition import Composition

    @st.composite
    def drawn(draw: st.DrawFn) -> Composition:
        size = draw(st.integers(1, max(1, min(most, len(rows) // k))))
        return Composition.evenly(_different(draw, rows, size * k), k)

    return drawn()


def _different(draw: st.DrawFn, rows: Sequence[int], number: int) -> tuple[int, ...]:
    """So many of the rows, in order of choice. What is drawn is the place of each, or of the next that is left, so that
    any of them can be left out or become an earlier one while the others stay."""
    from hypothesis import strategies as st

    left = dict(enumerate(rows))
    chosen = []
    for _ in range(number):
        place = draw(st.integers(0, len(rows) - 1))
        chosen.append(left.pop(next(p for p in (*range(place, len(rows)), *range(place)) if p in left)))
    return tuple(chosen)
