"""What the windows of a wrong split show: the cause, in words, and the observation that proves it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
    from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
    from pytest_trainloop.finding import Level

OUTSIDE = 1e-9
"""Share of a gradient outside of a span from which it is none of its sums (separable losses stay below 1e-14)."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause that is proven; ``shown`` is the observation that proves it, ``repair`` what to change where it is not
    the cause's own."""

    cause: str
    summary: str
    shown: str = ""
    repair: str = ""
    level: Level = "fault"


def exact_factor(wrong: Sequence[Split]) -> float:
    """The first split's factor, where in every split the first window is the one batch's gradient times the number of
    micro-batches, or over it: proof, whether examples interact or not. 0 otherwise."""
    for power in (1, -1):
        if all(
            abs(w.ratio * s.accumulate**-power - 1) < CLOSE and w.cosine > 1 - CLOSE
            for s in wrong
            for w in s.windows[:1]
        ):
            return float(wrong[0].accumulate ** power)
    return 0.0


def by_weights(
    made: Accumulation, split: Split, weighing: Weighing, wrong: Sequence[Split], splits: Sequence[Split]
) -> Diagnosis | None:
    """What the weights of the micro-batches say; None where they follow no known pattern."""
    k, pattern = split.accumulate, weighing.pattern
    if weighing.accumulated.residual > OUTSIDE:
        return _TERM_NOT_DIVIDED if made.grows_with_windows(split) else None
    if pattern == "last_absent":
        return Diagnosis("stepped_inside_window", _after(k - len(weighing.absent), k))
    if pattern == "absent":
        return _lost(split, len(weighing.absent))
    if pattern in ("scaled", "scaled_means"):
        return scaled(made, split, wrong, weighing.factor, splits)
    if pattern == "means":
        return mean_of_means(weighing)
    if pattern == "other":
        return None
    largest = made.weigh(splits[-1])
    again = pattern == "scaled_again"
    same = largest.decays_by(weighing.factor_to_next) if again else largest.pattern == pattern
    return by_place(weighing) if same else None


def by_place(weighing: Weighing) -> Diagnosis | None:
    """What weights say that differ by the micro-batches' places in their window; None where they follow no pattern."""
    k, pattern = len(weighing.accumulated.weights), weighing.pattern
    if pattern == "divided_again":
        return Diagnosis(
            "divided_twice",
            "the accumulated .grad is divided again with every further micro-batch of the window",
            f"each micro-batch weighs exactly 1/{k} of what the next one weighs",
        )
    if pattern == "divided_by_position":
        return Diagnosis(
            "loss_not_divided",
            "each micro-batch is divided by its place in the window, not by the number of micro-batches",
            "the first weighs exactly 2, 3, ... times what the second, third, ... weighs",
        )
    if pattern == "scaled_again":
        factor = weighing.factor_to_next
        by = f"divided by {1 / factor:.6g}" if 0 < factor < 1 else f"multiplied by {factor:.6g}"
        return Diagnosis(
            "divided_twice",
            f"the accumulated .grad is {by} again with every further micro-batch of the window",
            f"the last micro-batch weighs what it does in one batch, each one before it {factor:.4g} times the next",
        )
    return None


_TERM_NOT_DIVIDED = Diagnosis(
    "loss_not_divided",
    "a term of the loss is not divided: what it adds to the gradient grows with the number of micro-batches",
    "the excess over 4 micro-batches is exactly three times the excess over 2",
)


def _lost(split: Split, absent: int) -> Diagnosis:
    """Micro-batches that weigh nothing: no backward pass was made for them, or its gradients were cleared."""
    do, its = ("do", "their gradients are") if absent > 1 else ("does", "its gradient is")
    summary = f"{absent} of {split.accumulate} micro-batches {do} not count: "
    if split.backwards > split.accumulate - absent:
        return Diagnosis("only_last_counts", f"{summary}{its} cleared before the step")
    return Diagnosis(
        "only_last_counts",
        f"{summary}backward() is not called for their loss",
        repair="call backward() for every micro-batch: only the step waits for the window's end",
    )


def mean_of_means(weighing: Weighing) -> Diagnosis:
    """A fault where the one batch weighs by valid targets; weights of classes or examples may be meant."""
    by_counts = weighing.by_counts
    what = "with unequal numbers of valid targets" if by_counts else "whose examples have unequal weights"
    full, got = weighing.one_batch.weights, weighing.accumulated.weights
    return Diagnosis(
        "mean_of_means",
        f"the losses of micro-batches {what} get weights {listed(got)}, and in one batch {listed(full)}",
        "in one batch each weighs in proportion to its number of valid targets" if by_counts else "",
        level="fault" if by_counts else "advice",
    )


def scaled(
    made: Accumulation, split: Split, wrong: Sequence[Split], factor: float, splits: Sequence[Split]
) -> Diagnosis:
    """A gradient of the right direction and the wrong length. A loss that is divided by a constant (the batch size of
    the settings, an expected length) is right for micro-batches of that size, and cannot be judged."""
    if factor < 1 and made.divides_by_a_constant(split):
        raise CannotDecide(
            f"the loss is divided by a constant: {split.accumulate} whole batches a window give the gradient of one, "
            "and parts of it, with fewer rows, give less; give split_batch= where micro-batches of fixed size are due",
            needs="split_batch=",
        )
    rows = made.rows
    if all(abs(s.windows[0].ratio - (rows // s.accumulate) * s.accumulate / rows) < CLOSE for s in splits):
        k = split.accumulate
        return Diagnosis(
            "count_rounded_down",
            f"{k} micro-batches give {factor:.4g} times the gradient of one batch: {rows} does not divide by {k}",
            f"the factor is exactly ({rows} // k) * k / {rows} for splits into {_listed_sizes(splits)}",
            level="advice",
        )
    power = 1 if factor > 1 else -1
    exact = "the number of micro-batches" if power > 0 else "one over the number of micro-batches"
    by_count = all(abs(w.windows[0].ratio * w.accumulate**-power - 1) < CLOSE for w in wrong)
    right = [s for s in splits if s.equal]
    if not by_count and right:
        return Diagnosis(
            "update_differs",
            f"{split.accumulate} micro-batches give {factor:.4g} times the gradient of the same examples in one batch",
            f"splits into {_listed_sizes(right)} give the gradient of one batch: a count was rounded, or a constant is "
            "right for one number of micro-batches only",
            level="advice",
        )
    shown = f"the factor is exactly {exact}" if by_count else f"the factor is {factor:.3g}"
    whole = abs(split.windows[0].ratio / factor - 1) < CLOSE
    return Diagnosis(
        "loss_not_divided" if factor > 1 else "divided_twice",
        f"{split.accumulate} micro-batches give {factor:.2f} times the gradient of the same examples in one batch"
        if whole
        else f"{split.accumulate} micro-batches all weigh the same, and in the mean {factor:.2f} times what they do in "
        "one batch",
        f"{shown} for splits into {_listed_sizes(wrong)}" if len(wrong) == len(splits) else shown,
    )


def _listed_sizes(splits: Sequence[Split]) -> str:
    return " and ".join(", ".join(str(s.accumulate) for s in splits).rsplit(", ", 1))


def stepped_inside(split: Split) -> Diagnosis:
    k, due = split.accumulate, split.steps_expected
    more = f"{split.steps} steps over {due} windows of {k} micro-batches: " if split.steps > due else ""
    summary = f"{more}{_after(max(1, split.first_window), k)}"
    return Diagnosis("stepped_inside_window", summary, "counted from the backward passes before it")


def _after(done: int, k: int) -> str:
    return f"the step comes after {done} of {k} micro-batches"


def listed_weights(weighing: Weighing) -> str:
    return (
        f"as weighted sums of the micro-batches' own gradients: {listed(weighing.accumulated.weights)} accumulated, "
        f"{listed(weighing.one_batch.weights)} in one batch"
    )


def listed(weights: Sequence[float]) -> str:
    largest = max(map(abs, weights))
    return "[" + ", ".join(f"{w:.3g}" if abs(w) > CLOSE * largest else "0" for w in weights) + "]"
