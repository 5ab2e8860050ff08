"""The fewest rows that meet in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.batches.other_values import OtherOrder
from pytest_trainloop.checks.batch.batch_independence.shares import AS_IT_IS, RowShares
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.search import of_rows, smallest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.checks.batch.batch_independence.meetings import Meeting
    from pytest_trainloop.runs.evidence import Evidence

FEWEST, MOST = 2, 3


def that_meet(evidence: Evidence, met: Meeting) -> Composition | None:
    """The rows of the example batch; None where so few do not show it."""
    return _searched(evidence, lambda shares: _meet(shares, met))


def that_meet_in_any_way(evidence: Evidence) -> Composition | None:
    """Rows whose shares depend on each other; None where so few do not."""

    def apart(shares: RowShares) -> bool:
        shift = shares.independence()
        return shift is None or shift.apart

    return _searched(evidence, lambda shares: not apart(shares))


def in_order(evidence: Evidence) -> Composition | None:
    """Rows whose exchange changes the loss."""

    def change(shares: RowShares) -> bool:
        base = shares.tape(AS_IT_IS, shared_draws=True)
        other = shares.tape(OtherOrder(tuple(reversed(range(shares.rows)))), shared_draws=True)
        if base is None or other is None or not base.comparable(other):
            return False
        bound = shares.bound(base, other)
        return any(
            abs(a - b) > bound * max(abs(a), abs(b), 1.0) for a, b in zip(base.values, other.values, strict=True)
        )

    return _searched(evidence, change)


def _searched(evidence: Evidence, holds: Callable[[RowShares], bool]) -> Composition | None:
    shares = evidence.shared(RowShares.of)
    if shares is None:
        return None
    first = Composition(tuple(range(FEWEST)))
    if holds(shares.over(first.rows)):
        return first  # none is smaller
    strategy = of_rows(range(shares.rows), least=FEWEST, most=MOST)
    return smallest(strategy, lambda composition: holds(shares.over(composition.rows)), evidence=evidence)


def _meet(shares: RowShares, met: Meeting) -> bool:
    among = frozenset({met.path}) if met.why in ("every", "permuted") else None
    shift = shares.independence(among=among)
    if shift is None or (shift.equal if met.why == "every" else shift.apart):
        return False
    if met.why == "every":
        moved = shares.at_other_places(frozenset({met.path}))
        return moved is not None and moved.equal
    if met.fix is None:
        return True
    fix = next((fix for fix in shares.fixes if fix.kind == met.fix.kind), None)
    without = shares.independence(fix.replacements, fix.kind) if fix is not None else None
    return without is not None and without.apart
