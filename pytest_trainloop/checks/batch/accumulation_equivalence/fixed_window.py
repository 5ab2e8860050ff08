"""Windows of a loop whose number of micro-batches stands in its own code.

The reference is a window in which every micro-batch is the whole batch of the rows: whatever the loop divides by, it
divides both by. What is left to differ is how micro-batches weigh against each other, so that a factor common to all of
them, which a learning rate may be tuned to, is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.diagnosis import Diagnosis, by_place, mean_of_means
from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE, Weighing
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.compositions.step_gradients import StepGradients, combined
from pytest_trainloop.compositions.step_runs import separable
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import window_sizes
from pytest_trainloop.gradients.vectors import Combination

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.runs.evidence import Evidence

MOST = 8
"""Micro-batches of a window that is looked at, at most."""


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """What the weights of micro-batches in such a window say."""

    composition: Composition
    weighing: Weighing
    found: Diagnosis
    place: str
    """The line of the first backward pass."""


def fixed_window(evidence: Evidence) -> FixedWindow | None:
    """None where a step takes one batch, where windows are of no one size, or where nothing is wrong with how
    micro-batches weigh."""
    seen = evidence.run()
    sizes = set(window_sizes(seen)[:-1])  # what is left of the data may be fewer
    if len(sizes) != 1 or seen.rounds < 3 or not seen.rounds < seen.items:
        return None
    try:
        gradients = evidence.shared(StepGradients.of)
        k, rows = gradients.window, gradients.cut.valid.order
        if not 2 <= k <= MOST or len(rows) < 2 or not k * (seen.rounds - 1) < seen.items < k * (seen.rounds + 1):
            return None
        two = Composition((rows[0], *(rows[-1:] * (k - 1))), (1,) * k)
        weighing = _weighing(gradients, two, (two.rows[0], two.rows[1]))
        if weighing is None:
            return None
        found, shown = _means(weighing, k), two
        if found is None and 3 <= k <= len(rows):
            shown = Composition(rows[:k], (1,) * k)
            weighing = _weighing(gradients, shown, shown.rows)
            found = by_place(weighing) if weighing is not None else None
    except CannotDecide:
        return None
    if found is None or weighing is None:
        return None
    place = next((str(b.place) for b in gradients.at(shown).record.backwards()), "")
    return FixedWindow(shown, weighing, found, place)


def _weighing(gradients: StepGradients, composition: Composition, rows: Sequence[int]) -> Weighing | None:
    """How these rows weigh in a window of micro-batches and in one of whole batches; None where both agree, or where
    rows interact."""
    whole, many = gradients.at(composition.whole()), gradients.at(composition)
    bound = gradients.bound(whole, many)
    if not (whole.finite and many.finite) or gradients.differ(whole, many) <= bound:
        return None
    shares = gradients.shares(rows)
    for optimizer in whole.gradients:
        sides = [combined(made, shares, optimizer) for made in (whole, many)]
        one, accumulated = sides
        if one is None or accumulated is None:
            continue
        if max(one.residual, accumulated.residual) > separable(bound):
            return None
        parts = [tuple(r for r in composition.rows if r == row) for row in rows]
        by_counts = gradients.cut.valid.explaining(one.weights, parts) is not None
        return Weighing(one, accumulated, by_counts)
    return None


def _means(weighing: Weighing, k: int) -> Diagnosis | None:
    """Whether each of k micro-batches weighs the same, the first row's and all others', where in one batch they weigh
    by their valid targets."""
    first, others = weighing.accumulated.weights
    total = sum(weighing.one_batch.weights)
    even = abs(first * (k - 1) - others) <= CLOSE * abs(others) and abs(first + others - total) <= CLOSE * abs(total)
    if not even or not weighing.by_counts:
        return None
    whole = weighing.one_batch.weights
    each = Combination((first, others / (k - 1)), 0.0), Combination((whole[0], whole[1] / (k - 1)), 0.0)
    return replace(mean_of_means(Weighing(each[1], each[0], by_counts=True)), level="advice")
