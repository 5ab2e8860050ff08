"""Accumulating over k micro-batches gives the gradient of the same examples in one batch.

What it does
    It runs the loop with its knob ``accumulate`` at 1 on two whole batches, and at 2, 3 and 4 on the same rows split
    evenly, and compares what each optimizer step consumes: before any clipping, in float64, without dropout, from the
    same weights. Rows are put in an order that makes the counts of valid targets as uneven as they can be.

Why is this bad?
    A micro-batch loss that is not divided trains at k times the rate that was set. A mean over each micro-batch's own
    tokens weighs a token in a short sequence more than one in a long one. Both look like training.

How it decides
    The reference is the loop itself at ``accumulate=1``, never a declared loss. In float64 both ways agree to rounding.
    Where they do not, g_i, the gradient of micro-batch i alone, is taken, and both gradients are written as sums of
    w_i g_i by least squares: the weights w_i are the diagnosis. [1, 1] against [.5, .5]: not divided. [0, .5]: the
    first is wiped. [.5, .5] against [.52, .48]: a mean of means. Where more than 1e-9 of the whole batch's gradient
    lies outside the span of the g_i, examples interact and nothing is judged: on the loops of our tests separable
    losses leave at most 2e-15 there, others at least 1e-3 (python scripts/span_residuals.py).
    A loop that gives other gradients and the same weights is right: its rate is scaled to match, or its optimizer
    gathers. Optimizers are judged apart: one that consumes each micro-batch undivided, beside one that waits for the
    window's end, is to do so. Where the factor is one over k, windows of k whole batches tell a loss that is divided
    twice from one that is divided by a constant. A batch norm is judged with its running statistics.
    A fault is then looked for over fewer rows, with equal counts first: ``smallest`` is what still shows it.

Faulty
    >>> for i, (x, y) in enumerate(batches, start=1):
    ...     F.cross_entropy(model(x), y).backward()
    ...     if i % accumulate == 0:
    ...         optimizer.step()
    ...         optimizer.zero_grad()

Fixed
    >>> for i, (x, y) in enumerate(batches, start=1):
    ...     (F.cross_entropy(model(x), y) / accumulate).backward()
    ...     if i % accumulate == 0:
    ...         optimizer.step()
    ...         optimizer.zero_grad()

Known limits
    Losses in which examples meet (contrastive ones) are skipped: no equality is due. So are loops that draw with
    python's or numpy's generators. An uneven last window is advice. Without the knob only the declared ``loss`` is
    looked at.

References
    https://huggingface.co/blog/gradient_accumulation (mean of means over tokens)
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE, alike
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.runs import Accumulation, Split
    from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio")

OUTSIDE = 1e-9
"""Share of a gradient outside of a span from which it is none of its sums (separable losses stay below 1e-14)."""

WINDOW = 4
"""Micro-batches a window where the end of the data is looked at."""

NORMALISED = 1e-2
"""How near the lengths of two gradients of one direction are where the loop divides them by their norm plus some
epsilon. No cause changes a gradient by so little, and no rate is set more finely."""

CAUSES = {
    "loss_not_divided": "every micro-batch, or one part of its loss, weighs k times what it does in one batch",
    "divided_twice": "micro-batches weigh 1/k of what they do in one batch, or less with every later one",
    "only_last_counts": "the first micro-batches of a window weigh nothing",
    "mean_of_means": "all micro-batches weigh the same, where in one batch each weighs by its valid targets",
    "carried_over": "the second window holds gradients of the first one's micro-batches",
    "stepped_inside_window": "a step comes before all micro-batches of the window have had their backward pass",
    "last_window_lost": "the micro-batches after the last full window are never stepped",
    "update_differs": "the gradients of the first window agree, and the weights after it do not",
}


@check(needs={"run"}, causes=CAUSES, rank=10)
def accumulation_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.accumulation_equivalence.runs import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.shrink import smallest

    if "accumulate" not in evidence.knobs:
        yield from _by_loss(evidence)
        return
    made = evidence.shared(Accumulation.of)
    splits = [made.split(k) for k in made.sizes()]
    if any(w.ratio != w.ratio for s in splits for w in s.windows if w.difference == 0.0):
        raise CannotDecide("the gradients are not finite, in one batch and accumulated alike (see finite)")
    wrong = [s for s in splits if not s.equal and s.updates > s.bound]
    if wrong:
        for found in _explained(evidence, made, wrong, splits):
            yield found if found.cause == "update_differs" else replace(found, smallest=smallest(made, wrong[0]))
        return
    yield from _last_window(evidence)
    moved = [s for s in splits if s.equal and s.updates > CLOSE and s.rates_differ]
    if moved:
        yield _update_differs(moved[0])


def _explained(
    evidence: Evidence, made: Accumulation, wrong: Sequence[Split], splits: Sequence[Split]
) -> Iterator[Finding]:
    """One finding: the first cause that an observation proves."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.preconditions import (
        require_divisor_by_rows,
        require_windows_of_one_size,
    )

    first = wrong[0]
    if first.steps > first.steps_expected or first.first_window < first.accumulate:
        require_windows_of_one_size(evidence, WINDOW)
        yield _stepped_inside(first)
        return
    if first.windows[0].difference <= first.bound:
        yield _later_window(made, first)
        return
    if len(wrong) == len(splits) > 1 and (factor := _exact_factor(wrong)):
        require_divisor_by_rows(made, first, factor)
        yield _scaled(first, None, wrong, factor, len(splits))
        return
    weighing = made.weigh(first)
    noise = made.reordered(first)
    if noise * 1e3 > first.windows[0].difference:
        raise CannotDecide(
            f"reversing the rows of one batch changes the gradient by {noise:.1e} of its size: no equality is due"
        )
    factors = [w.windows[0].ratio for w in wrong if w.windows[0].cosine > 1 - CLOSE]
    if len(factors) == len(wrong) and all(abs(factor - 1) < NORMALISED for factor in factors):
        return  # brought to a length: what is left of the factor is what keeps the division from zero
    yield _weighed(made, first, weighing, wrong if len(factors) == len(wrong) else [first], len(splits))


def _exact_factor(wrong: Sequence[Split]) -> float:
    """The first split's factor, where in every split all windows are the one batch's gradient times the number of
    micro-batches, or over it: proof, whether examples interact or not. 0 otherwise."""
    for power in (1, -1):
        if all(
            abs(w.ratio * s.accumulate**-power - 1) < CLOSE and w.cosine > 1 - CLOSE
            for s in wrong
            for w in s.windows[:1]
        ):
            return float(wrong[0].accumulate ** power)
    return 0.0


def _weighed(made: Accumulation, split: Split, weighing: Weighing, wrong: Sequence[Split], tried: int) -> Finding:
    if weighing.accumulated.residual > OUTSIDE:
        return _part_not_divided(split, weighing) if made.grows_with_windows(split) else _unexplained(split, weighing)
    pattern = weighing.pattern
    if pattern == "last_absent":
        done = split.accumulate - len(weighing.absent)
        return _finding(split, weighing, "stepped_inside_window", _after(done, split.accumulate))
    if pattern == "absent":
        return _lost(split, weighing, len(weighing.absent))
    if pattern in ("scaled", "scaled_means"):
        from pytest_trainloop.checks.batch.accumulation_equivalence.preconditions import require_divisor_by_rows

        require_divisor_by_rows(made, split, weighing.factor)
        return _scaled(split, weighing, wrong, weighing.factor, tried)
    if pattern == "means":
        return _mean_of_means(split, weighing)
    if pattern.startswith("divided") and made.weigh(made.split(made.sizes()[-1])).pattern == pattern:
        return _divided_again(split, weighing) if pattern == "divided_again" else _divided_by_position(split, weighing)
    if pattern == "scaled_again" and made.weigh(made.split(made.sizes()[-1])).follows(weighing.again):
        return _scaled_again(split, weighing)
    return _unexplained(split, weighing)


def _lost(split: Split, weighing: Weighing, absent: int) -> Finding:
    """Micro-batches that weigh nothing: no backward pass was made for them, or its gradients were wiped."""
    do, its = ("do", "their gradients are") if absent > 1 else ("does", "its gradient is")
    summary = f"{absent} of {split.accumulate} micro-batches {do} not count: "
    if split.backwards > split.accumulate - absent:
        return _finding(split, weighing, "only_last_counts", f"{summary}{its} wiped before the step")
    finding = _finding(split, weighing, "only_last_counts", f"{summary}backward() is not called for their loss")
    return replace(finding, repair="call backward() for every micro-batch: only the step waits for the window's end")


def _mean_of_means(split: Split, weighing: Weighing) -> Finding:
    """A fault where the one batch weighs by valid targets; weights of classes or examples may be meant."""
    full, got = weighing.one_batch.weights, weighing.accumulated.weights
    what = "with unequal numbers of valid targets" if weighing.by_counts else "whose examples have unequal weights"
    finding = _finding(
        split,
        weighing,
        "mean_of_means",
        f"micro-batches {what} weigh {_list(got)}, and in one batch {_list(full)}",
        shown="in one batch they weigh as their numbers of valid targets do" if weighing.by_counts else "",
    )
    return finding if weighing.by_counts else replace(finding, level="advice", explains=())


def _scaled(split: Split, weighing: Weighing | None, wrong: Sequence[Split], factor: float, tried: int) -> Finding:
    sizes = " and ".join(", ".join(str(w.accumulate) for w in wrong).rsplit(", ", 1))
    power = 1 if factor > 1 else -1
    by_count = all(abs(w.windows[0].ratio * w.accumulate**-power - 1) < CLOSE for w in wrong)
    exact = "the number of micro-batches" if power > 0 else "one over the number of micro-batches"
    shown = f"the factor is exactly {exact}" if by_count else f"the factor is {factor:.3g}"
    return _finding(
        split,
        weighing,
        "loss_not_divided" if factor > 1 else "divided_twice",
        f"{split.accumulate} micro-batches give {factor:.2f} times the gradient of the same examples in one batch",
        shown=f"{shown} for splits into {sizes}" if len(wrong) == tried else shown,
    )


def _divided_again(split: Split, weighing: Weighing) -> Finding:
    return _finding(
        split,
        weighing,
        "divided_twice",
        "what stands in .grad is divided again with every further micro-batch of the window",
        shown=f"each micro-batch weighs exactly 1/{split.accumulate} of what the next one weighs",
    )


def _scaled_again(split: Split, weighing: Weighing) -> Finding:
    factor = weighing.again
    by = f"divided by {1 / factor:.6g}" if 0 < factor < 1 else f"multiplied by {factor:.6g}"
    return _finding(
        split,
        weighing,
        "divided_twice",
        f"what stands in .grad is {by} again with every further micro-batch of the window",
        shown=f"the last micro-batch weighs what it does in one batch, each one before it {factor:.4g} times the next",
    )


def _divided_by_position(split: Split, weighing: Weighing) -> Finding:
    return _finding(
        split,
        weighing,
        "loss_not_divided",
        "each micro-batch is divided by its place in the window, not by the number of micro-batches",
        shown="the first weighs exactly 2, 3, ... times what the second, third, ... weighs",
    )


def _part_not_divided(split: Split, weighing: Weighing) -> Finding:
    return _finding(
        split,
        weighing,
        "loss_not_divided",
        "a part of the loss is not divided: what it adds to the gradient grows with the number of micro-batches",
        shown="what 4 micro-batches give too much is exactly three times what 2 give too much",
    )


_REPAIRS = {
    "loss_not_divided": (
        "loss = loss / accumulate before backward(); with unequal token counts divide the summed loss by all tokens"
    ),
    "divided_twice": "divide once only, either the loss, or the gradients after the last micro-batch",
    "only_last_counts": "call zero_grad() once for each step, right after it, not once for each micro-batch",
    "mean_of_means": (
        "sum the loss over tokens (reduction='sum') and divide by the number of valid targets in the whole window"
    ),
    "stepped_inside_window": (
        "step after the last micro-batch of a window only: if (i + 1) % accumulate == 0; hand the knob on to the loop"
    ),
    "carried_over": "zero_grad() right after every step, before the next micro-batch's backward()",
}


_REPAIRS_IN = {
    ("transformers", "loss_not_divided"): (
        "the Trainer leaves the division to a model that takes num_items_in_batch, and this one does not divide: sum "
        "the loss and divide by num_items_in_batch, or set loss_is_scaled_for_ga = False on the Trainer's class"
    ),
    ("transformers", "divided_twice"): "do not divide in compute_loss: the Trainer divides by itself",
    ("lightning", "divided_twice"): (
        "do not divide in training_step: a Trainer with accumulate_grad_batches divides what it returns"
    ),
    ("accelerate", "divided_twice"): "do not divide before accelerator.backward(loss): it divides by itself",
}

_BY_STEP = ("stepped_inside_window", "carried_over")
"""Causes that lie at the optimizer's step; the others lie at the backward pass."""


def _finding(split: Split, weighing: Weighing | None, cause: str, summary: str, *, shown: str = "") -> Finding:
    window = next((w for w in split.windows if w.difference > split.bound), split.windows[0])
    weights = _weights(weighing) if weighing else ""
    return Finding(
        cause=cause,
        summary=summary,
        measured=(
            f"|g_{split.accumulate}| / |g_1| = {window.ratio:.3f}, cosine {window.cosine:.3f}, "
            f"all {split.parameters} parameters, {split.precision}"
        ),
        shown_by="; ".join(part for part in (shown, weights) if part),
        culprits=("optimizer.step()",) if cause in _BY_STEP else ("loss.backward()",),
        where=split.step_place if cause in _BY_STEP else split.place,
        repair=_REPAIRS_IN.get((split.library, cause), _REPAIRS[cause]),
        explains=CONSEQUENCES,
    )


def _after(done: int, k: int) -> str:
    return f"the step comes after {done} of {k} micro-batches"


def _stepped_inside(split: Split) -> Finding:
    k = split.accumulate
    summary = _after(max(1, split.first_window), k)
    if split.steps > split.steps_expected:
        due = split.steps_expected
        summary = f"{split.steps} steps over {due} windows of {k} micro-batches: {summary}"
    return _finding(split, None, "stepped_inside_window", summary, shown="counted from the backward passes before it")


def _later_window(made: Accumulation, split: Split) -> Finding:
    """The first window is right, the second is not."""
    if split.rates_differ:
        return _update_differs(split)
    weights, residual = made.carried(split)
    if weights and residual < OUTSIDE and min(weights) > CLOSE and alike(weights):
        return _finding(
            split,
            None,
            "carried_over",
            f"the second window of {split.accumulate} micro-batches holds gradients of the first one besides its own",
            shown=f"what it holds too much is the first window's micro-batches, weighed {_list(weights)}",
        )
    raise CannotDecide(
        "the gradients of the first window agree and those of the second do not, by nothing that is known here: "
        "something besides the weights lives on from window to window"
    )


def _update_differs(split: Split) -> Finding:
    return Finding(
        cause="update_differs",
        level="advice",
        summary=f"accumulating over {split.accumulate} micro-batches gives the same gradient and another update",
        measured=f"weights lie {split.updates:.1e} of their way apart after the last step, {split.precision}",
        shown_by="the rates at the same optimizer steps differ" if split.rates_differ else "the rates are the same",
        culprits=("scheduler.step()",) if split.rates_differ else ("optimizer.step()",),
        where=split.step_place,
        repair="step the scheduler once for each optimizer step, or say so with skip= where the rate is meant to scale",
    )


def _unexplained(split: Split, weighing: Weighing) -> Finding:
    k, outside = split.accumulate, weighing.accumulated.residual
    within = outside <= OUTSIDE
    others = "in a way of its own" if within else "and no weighing of the micro-batches explains it"
    return Finding(
        cause="update_differs",
        level="advice",
        summary=f"{k} micro-batches give another gradient than the same examples in one batch, {others}",
        measured=f"|g_{k}| / |g_1| = {split.windows[0].ratio:.3f}, cosine {split.windows[0].cosine:.3f}; "
        + (_weights(weighing) if within else f"{outside:.1e} of it lies outside the span of their gradients"),
        shown_by="not determined; ruled out: a wrong factor, wiped micro-batches, a mean of means, random numbers",
        culprits=("loss.backward()",),
        where=split.place,
        repair=(
            "look for what weighs or scales each micro-batch by itself: a clip inside the window, a weight, a schedule"
            if within
            else "look for what runs once for each micro-batch besides the loss: a penalty, a hook"
        ),
    )


def _weights(weighing: Weighing) -> str:
    return (
        f"as weighted sums of the micro-batches' own gradients: {_list(weighing.accumulated.weights)} accumulated, "
        f"{_list(weighing.one_batch.weights)} in one batch"
    )


def _last_window(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.accumulation_equivalence.last_window import last_window_lost
    from pytest_trainloop.records.gradient_ledger import gradient_ledger

    record = evidence.run(accumulate=WINDOW)
    yield from last_window_lost(record, gradient_ledger(record), WINDOW)


def _by_loss(evidence: Evidence) -> Iterator[Finding]:
    """Without a knob: whether dividing by k would be right for the declared loss."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.runs import Accumulation

    if "loss" not in evidence.offers:
        raise CannotDecide(
            "the function has no knob accumulate: give it accumulate=1 and hand it on to the loop (loss= for advice)"
        )
    weights = evidence.shared(Accumulation.of).weights_of_loss()
    if max(weights) - min(weights) > CLOSE * max(weights):
        yield Finding(
            cause="mean_of_means",
            level="advice",
            summary=f"accumulated as a mean of micro-batch means, this loss would weigh {len(weights)} parts wrongly",
            measured=f"in one batch they weigh {_list(weights)}, divided by {len(weights)} they would weigh the same",
            shown_by="the whole batch's gradient written as a weighted sum of its parts' gradients, float64",
            culprits=("loss",),
            repair=_REPAIRS["mean_of_means"],
        )


def _list(weights: Sequence[float]) -> str:
    largest = max(map(abs, weights))
    return "[" + ", ".join(f"{w:.3g}" if abs(w) > CLOSE * largest else "0" for w in weights) + "]"
