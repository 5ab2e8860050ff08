"""Accumulating over k micro-batches gives the gradient of the same examples in one batch.

What it does
    It runs the loop with its knob ``accumulate`` at 1 on two whole batches, and at 2, 3 and 4 on the same rows split
    evenly, and compares the gradients that each optimizer step reads: before any clipping, in float64, without dropout,
    from the same weights. Rows are put in an order that makes the numbers of valid targets as uneven as possible.

Why is this bad?
    A micro-batch loss that is not divided trains at k times the learning rate. A mean over each micro-batch's own
    tokens gives a token in a short sequence more weight than one in a long sequence. Both look like training.

How it decides
    The reference is the loop itself at ``accumulate=1``, never a declared loss. In float64 both gradients agree to
    rounding. Where they do not, the check takes g_i, the gradient of micro-batch i alone, and writes both gradients as
    sums of w_i g_i by least squares: the weights w_i are the diagnosis. [1, 1] against [.5, .5]: not divided. [0, .5]:
    the first micro-batch is cleared. [.5, .5] against [.52, .48]: a mean of means. Where more than 1e-9 of the whole
    batch's gradient lies outside the span of the g_i, examples interact and nothing is judged: on the loops of our
    tests separable losses leave at most 2e-15 there, others at least 1e-3 (python scripts/span_residuals.py).
    What the weights do not explain is left out, one thing after another, in two more runs: what the loop writes to
    gradients between the micro-batches of a window (a clip), what it changes there in an average or target network, in
    weights, in a statistic, the schedule of the optimizer's options, the hooks on parameters. Where windows and one
    batch agree without it to rounding, it is the cause. A schedule that is called once a micro-batch and built for as
    many calls is right: it is as far on after the same training, with accumulation and without. A statistic that a
    layer keeps of each of its forward passes is no fault: so do batch norms. Rates that differ at the same steps and do
    not move inside a window are advice: they may be to scale with it. What agrees without none of these is advice too,
    and says what was ruled out.
    A loop whose gradients differ and whose weights do not is right: its learning rate is scaled to match, or its
    optimizer gathers gradients. Each optimizer is judged by itself: next to one that waits for the end of the window,
    one may step with each micro-batch's own gradient, undivided. Where the factor is 1/k, windows of k whole batches
    separate a loss that is divided twice from one that is divided by a constant. A factor of (n // k) k / n, with n the
    rows of the loop's batch, comes from a weight of n // k rows where k does not divide n: advice. Batch norm uses its
    running statistics. Hypothesis then shrinks the rows: ``smallest`` is the smallest composition that still shows the
    fault.
    A loss of which one term is a sum over rows and another a mean is found with or without the knob: with every row
    twice one part of the gradient doubles and the other stays. It is named where two rows confirm it exactly, one part
    being the sum of theirs and the other the mean; where rows interact nothing confirms it, and a penalty on weights is
    the same for every row. With the knob it is a fault, since micro-batches then weigh the terms otherwise; without,
    advice: where all batches have one number of rows, the term's weight may be meant for it.
    A loop without the knob that takes several batches a step is compared with itself over windows in which every
    micro-batch is the whole batch: how micro-batches weigh against each other is then judged, and no common factor.
    Weights that follow the place in the window are a fault, a mean of means is advice.

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
    Rows are taken along the first axis, or along ``batch_dim``. Where nothing in the batch says that the first axis
    lists rows, and windows agree once the batch is cut along the second, the check is skipped: time may come first. So
    it is where the loop refuses the rows that were taken (one graph is the whole batch): ``split_batch`` says how the
    project splits a batch, and is then given whole ones.
    Losses in which examples interact (contrastive ones) are skipped: the gradients need not be equal. So are loops that
    draw with python's or numpy's generators. An uneven last window is advice. An average that no run calls is looked at
    where ``TrainLoop.model`` declares it. Without the knob a factor that
    all micro-batches share is not seen; where a step takes one batch, the declared ``loss`` is looked at, for a note.

References
    https://huggingface.co/blog/gradient_accumulation (mean of means over tokens)
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.causes import CAUSES, REPAIRS_IN
from pytest_trainloop.checks.batch.accumulation_equivalence.diagnosis import (
    OUTSIDE,
    Diagnosis,
    by_weights,
    exact_factor,
    listed,
    listed_weights,
    scaled,
    stepped_inside,
)
from pytest_trainloop.checks.batch.accumulation_equivalence.inside_window import RULED_OUT, settled
from pytest_trainloop.checks.batch.accumulation_equivalence.weights import CLOSE, all_equal
from pytest_trainloop.errors import CannotDecide, Refused
from pytest_trainloop.finding import Finding, code_of
from pytest_trainloop.registry import check
from pytest_trainloop.wording import direction, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation
    from pytest_trainloop.checks.batch.accumulation_equivalence.split import Split
    from pytest_trainloop.checks.batch.accumulation_equivalence.weights import Weighing
    from pytest_trainloop.runs.evidence import Evidence

WINDOW = 4
"""Micro-batches a window where the end of the data is looked at."""

NORMALISED = 1e-2
"""How near the lengths of two gradients of one direction are where the loop divides them by their norm plus some
epsilon. No cause changes a gradient by so little, and no learning rate is set more finely."""

_AT_THE_STEP = ("stepped_inside_window", "carried_over")
"""Causes that lie at the optimizer's step; the others lie at the backward pass."""


@check(needs={"run"}, causes=CAUSES, rank=10, steps=50)
def accumulation_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.batches.own_data import makes_own_data
    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation

    if "accumulate" not in evidence.knobs:
        found = []
        if "fit" in evidence.offers and evidence.repeatable:
            found = [f for f in (_terms_apart(evidence), _fixed_window(evidence)) if f is not None]
        yield from found or _declared_loss(evidence)
        return
    made, splits = evidence.shared(Accumulation.of).compare()
    if any(w.ratio != w.ratio for s in splits for w in s.windows if w.difference == 0.0):
        raise CannotDecide("on rows taken from the batch the gradients are not finite, whole and in micro-batches")
    wrong = [s for s in splits if not s.equal and s.updates > s.bound]
    if evidence.shared(makes_own_data):
        yield from _counted(evidence, wrong)
        return
    if wrong:
        _require_wrong_along_other_axis(evidence)
        evidence.shared(Accumulation.of).told = made, wrong[0]
        yield from _first_cause(evidence, made, wrong, splits)
        return
    yield from _last_window(evidence)
    moved = [s for s in splits if s.equal and s.updates > CLOSE]
    if moved:
        inside = settled(evidence, made, moved[0])
        if inside is not None and inside.finding is not None:
            yield inside.finding
        elif inside is None and moved[0].lr_differs:
            yield _lr_differs(moved[0])


def _require_wrong_along_other_axis(evidence: Evidence) -> None:
    """Raise ``CannotDecide`` where windows and one batch agree once the batch is cut along its second axis, and nothing
    says that rows lie along the first: what is summed over time, and averaged over rows, differs if time is cut."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation

    other = evidence.shared(Accumulation.along_other_axis)
    if other is None:
        return
    try:
        _, splits = other.compare()
    except CannotDecide:
        return
    if all(s.equal or s.updates <= s.bound for s in splits):
        raise CannotDecide(
            "with the batch cut along its second axis the gradients agree, along its first they do not, and nothing "
            "says along which of them rows lie: give batch_dim=1, or batch_dim=0 if the first axis holds them",
            needs="batch_dim=",
        )


def _first_cause(
    evidence: Evidence, made: Accumulation, wrong: Sequence[Split], splits: Sequence[Split]
) -> Iterator[Finding]:
    """What the weights of the micro-batches prove; else what the loop does inside a window, if windows and one batch
    agree without it."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.fewest_rows import fewest_rows

    first, found, undecided = wrong[0], None, None
    try:
        found = _explained(evidence, made, wrong, splits)
        if found is None:
            return
    except CannotDecide as reason:
        undecided = reason
    if found is not None and found.cause != "update_differs":
        if found.cause == "only_last_counts" and "cleared" in found.summary:
            found = replace(found, change=_clearing(evidence, first.accumulate))
        whole = found.cause == "loss_not_divided" and "times the gradient" in found.summary and not found.repair
        if whole and (line := _divided(evidence, found.where)):
            found = replace(found, repair=f"{line}\n{CAUSES[found.cause].repair}")
        shown, words = fewest_rows(evidence, made, first, by_counts=found.cause == "mean_of_means")
        yield replace(found, smallest=words, composition=shown.composition.told())
        return
    apart = None if first.steps_too_early or undecided is None else _terms_apart(evidence)
    inside = None if first.steps_too_early or apart is not None else settled(evidence, made, first)
    if apart is not None:
        yield apart
    elif inside is not None and inside.finding is not None:
        shown, words = (first, "") if first.equal else fewest_rows(evidence, made, first, without=inside.kind)
        yield replace(inside.finding, smallest=words, composition=shown.composition.told() if words else None)
    elif inside is None and undecided is not None:
        raise undecided
    elif inside is None and found is not None:
        yield found


def _counted(evidence: Evidence, wrong: Sequence[Split]) -> Iterator[Finding]:
    """Of a loop that makes its own data: what the number of its steps shows."""
    from pytest_trainloop.batches.own_data import require_given_data
    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import require_windows_of_one_size

    early = [s for s in wrong if s.steps_too_early]
    if not early:
        require_given_data(evidence, "the same examples cannot be handed over whole and in parts")
    require_windows_of_one_size(evidence, WINDOW)
    yield _finding(early[0], stepped_inside(early[0]))


def _explained(
    evidence: Evidence, made: Accumulation, wrong: Sequence[Split], splits: Sequence[Split]
) -> Finding | None:
    """The first cause that an observation proves; None where the loop brings gradients to a length."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.knob_use import knob_unused
    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import require_windows_of_one_size

    first = wrong[0]
    if first.steps_too_early:
        if knob_unused(evidence):
            return _unused(first, evidence.knobs["accumulate"])
        require_windows_of_one_size(evidence, WINDOW)
        found = _finding(first, stepped_inside(first))
        return _unprepared(evidence, found) if first.library == "accelerate" != first.step_library else found
    if first.windows[0].difference <= first.bound:
        return _later_window(made, first)
    if len(wrong) == len(splits) > 1 and (factor := exact_factor(wrong)):
        return _finding(first, scaled(made, first, wrong, factor, splits))
    weighing = made.weigh(first)
    noise = made.difference_when_reversed(first)
    if noise * 1e3 > first.windows[0].difference:
        raise CannotDecide(
            f"reversing the rows of one batch changes the gradient by {noise:.1e} of its size: no equality is due"
        )
    parallel = all(w.windows[0].cosine > 1 - CLOSE for w in wrong)
    if parallel and all(abs(w.windows[0].ratio - 1) < NORMALISED for w in wrong):
        return None  # what is left of the factor is the epsilon that keeps the division from zero
    diagnosis = by_weights(made, first, weighing, wrong if parallel else [first], splits)
    return _finding(first, diagnosis, weighing) if diagnosis is not None else _unexplained(first, weighing)


def _unprepared(evidence: Evidence, found: Finding) -> Finding:
    """Accelerate divides the loss, and the optimizer steps by itself: only a prepared one waits for the window."""
    from pytest_trainloop.tracing.made_at import MadeAt

    made = evidence.shared(MadeAt.of)
    return replace(
        found,
        summary=f"{found.summary}, since the optimizer was not given to accelerator.prepare()",
        shown_by=f"{found.shown_by}; accelerate makes the backward passes, and not these steps",
        change=made.prepare() or made.optimizer(),
        repair="model, optimizer = accelerator.prepare(model, optimizer)\n"
        "a prepared optimizer steps once a window inside accelerator.accumulate(model)",
        do_not="count micro-batches by hand: accumulate() does",
    )


def _divided(evidence: Evidence, where: str) -> str:
    """The line of the backward pass with the loss divided by the knob of the project."""
    divided = rf"(\1 / {evidence.knobs['accumulate']}).backward()"
    line, made = re.subn(r"\b(\w+)\.backward\(\)", divided, code_of(where))
    return line if made == 1 else ""


def _clearing(evidence: Evidence, k: int) -> str:
    """The line that clears gradients between the first two micro-batches."""
    from pytest_trainloop.recording.events import GradWrite

    record = evidence.run(accumulate=k)
    first, second = record.backwards()[:2] if len(record.backwards()) > 1 else (None, None)
    if first is None or second is None:
        return ""
    between = [w for w in record.of(GradWrite) if first.at < w.at < second.at and w.how in ("none", "zero")]
    return str(between[0].place) if between else ""


def _later_window(made: Accumulation, split: Split) -> Finding:
    """The first window is right, the second is not."""
    excess = made.excess_of_second_window(split)
    if excess and excess.residual < OUTSIDE and min(excess.weights) > CLOSE and all_equal(excess.weights):
        diagnosis = Diagnosis(
            "carried_over",
            f"the second window of {split.accumulate} micro-batches holds gradients of the first one besides its own",
            f"the excess is the sum of the first window's micro-batches, with weights {listed(excess.weights)}",
        )
        return _finding(split, diagnosis)
    if split.lr_differs:
        return _lr_differs(split)
    raise CannotDecide(
        "the gradients of the first window agree and those of the second do not, for no reason that is known here: "
        "some state besides the weights lives on from window to window"
    )


def _finding(split: Split, found: Diagnosis, weighing: Weighing | None = None) -> Finding:
    window = next((w for w in split.windows if w.difference > split.bound), split.windows[0])
    at_the_step = found.cause in _AT_THE_STEP
    return Finding(
        cause=found.cause,
        level=found.level,
        summary=found.summary,
        measured=(
            f"|g_{split.accumulate}| / |g_1| = {window.ratio:.3f}, {direction(window.cosine)}, "
            f"all {split.parameters} parameters, {split.precision}"
        ),
        shown_by="; ".join(part for part in (found.shown, listed_weights(weighing) if weighing else "") if part),
        culprits=("optimizer.step()",) if at_the_step else ("loss.backward()",),
        where=split.step_place if at_the_step else split.place,
        repair=found.repair or REPAIRS_IN.get((split.library, found.cause), ""),
    )


def _unused(split: Split, knob: str) -> Finding:
    """The knob reaches nothing: what it would have done cannot be judged."""
    return replace(
        _finding(split, stepped_inside(split)),
        summary=f"the loop did the same with {knob}=1 and {knob}={split.accumulate}: the knob does not reach it",
        shown_by=f"with {knob}=1, 2 and 3 the losses and steps are the same, bit for bit",
        culprits=(knob,),
        repair=f"hand {knob} on to the loop, or take the parameter out of the test function",
    )


def _lr_differs(split: Split) -> Finding:
    """Gradients that agree, and weights that do not, by the learning rate."""
    return Finding(
        cause="update_differs",
        level="advice",
        summary=f"accumulating over {split.accumulate} micro-batches gives the same gradient and another update",
        measured=(
            f"after the last step weights differ by {share(split.updates)} of how far they moved, {split.precision}"
        ),
        shown_by="the learning rates at the same optimizer steps differ",
        culprits=("scheduler.step()",),
        where=split.step_place,
        repair="step the scheduler once for each optimizer step, or skip the check where learning rates are to scale",
    )


def _unexplained(split: Split, weighing: Weighing) -> Finding:
    k, outside = split.accumulate, weighing.accumulated.residual
    within = outside <= OUTSIDE
    others = "in weights of no known pattern" if within else "and no weighing of the micro-batches explains it"
    return Finding(
        cause="update_differs",
        level="advice",
        summary=f"{k} micro-batches give another gradient than the same examples in one batch, {others}",
        measured=f"|g_{k}| / |g_1| = {split.windows[0].ratio:.3f}, {direction(split.windows[0].cosine)}; "
        + (listed_weights(weighing) if within else f"{outside:.1e} of it lies outside the span of their gradients"),
        shown_by="not determined; ruled out: a wrong factor, cleared micro-batches, a mean of means, random numbers, "
        + RULED_OUT,
        culprits=("loss.backward()",),
        where=split.place,
        repair="look for what the loop keeps by itself and moves on with every micro-batch: the weight of a term, a "
        "temperature, a running value",
    )


def _fixed_window(evidence: Evidence) -> Finding | None:
    """Of a loop without the knob, which accumulates all the same."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.fixed_window import fixed_window

    seen = fixed_window(evidence)
    if seen is None:
        return None
    return Finding(
        cause=seen.found.cause,
        level=seen.found.level,
        summary=f"in windows of {len(seen.composition.parts)} {seen.found.summary}",
        measured=listed_weights(seen.weighing),
        shown_by=f"{seen.found.shown}; the one batch is a window in which every micro-batch holds all of the rows",
        culprits=("loss.backward()",),
        where=seen.place,
        smallest=str(seen.composition),
        composition=seen.composition.told(),
        repair=""
        if seen.found.level == "fault"
        else f"{CAUSES[seen.found.cause].repair}; with a keyword accumulate=1 "
        "that is passed on to the loop it is a fault",
    )


def _terms_apart(evidence: Evidence) -> Finding | None:
    """A term that is a sum over rows beside one that is a mean: a fault where the loop accumulates, since micro-batches
    then weigh them otherwise than one batch."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.terms import terms_apart

    found = terms_apart(evidence)
    if found is None:
        return None
    values = [
        f"{a.op}() returns {a.value:.4g} and {b.value:.4g}" for a, b in filter(None, (found.summed, found.averaged))
    ]
    accumulates = "accumulate" in evidence.knobs
    return Finding(
        cause="term_grows_with_rows",
        level="fault" if accumulates else "advice",
        summary="one term of the loss is a sum over rows and another a mean: how much each counts changes with the "
        f"number of rows{', and so with the number of micro-batches' if accumulates else ''}",
        measured=f"for {found.once} alone and for {found.twice} "
        f"{'; '.join([*values, f'the gradients differ by {share(found.change)}'])}, float64",
        shown_by="checked exactly on the gradients of two rows: each alone, both together, both twice",
        culprits=tuple(a.op for a, _ in filter(None, (found.summed,))) or ("loss.backward()",),
        where=found.summed[0].place if found.summed else "",
        smallest=str(found.twice),
        composition=found.twice.told(),
    )


def _last_window(evidence: Evidence) -> Iterator[Finding]:
    """A window that is open when the data end."""
    from pytest_trainloop.records.gradient_ledger import Ledger

    try:
        record = evidence.run(accumulate=WINDOW)
    except Refused:
        return  # so many micro-batches are none that the loop takes
    left = Ledger(record).left_open()
    if left:
        yield Finding(
            cause="last_window_lost",
            level="advice",
            summary=f"the last {len(left)} of {record.items} micro-batches are never stepped: the window stays open",
            measured=f"{len(left)} backward passes after the last step, windows of {WINDOW}",
            shown_by="their gradients are still in .grad when fit returns",
            culprits=("optimizer.step()",),
            where=str(left[0].backward.place),
        )


def _declared_loss(evidence: Evidence) -> Iterator[Finding]:
    """Without a knob: whether dividing by k would be right for the declared loss."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.comparison import Accumulation

    if "loss" not in evidence.offers:
        raise CannotDecide(
            "the function has no knob accumulate: give it accumulate=1 and pass it on to the loop (loss= for a note)",
            needs="accumulate=1",
        )
    weights = evidence.shared(Accumulation.of_loss).weights_of_halves()
    if not all_equal(weights):
        yield Finding(
            cause="mean_of_means",
            level="note",
            summary=f"accumulated as a mean of micro-batch means, this loss would weigh {len(weights)} parts wrongly",
            measured=f"in one batch they weigh {listed(weights)}, divided by {len(weights)} they would weigh the same",
            shown_by="the whole batch's gradient written as a weighted sum of its parts' gradients, float64",
            culprits=("loss",),
        )
