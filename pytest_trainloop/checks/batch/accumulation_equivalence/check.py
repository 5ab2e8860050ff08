"""Accumulating over k micro-batches gives the gradient of the same rows in one batch.

What it does
    It runs the loop with its knob ``accumulate`` at 1 on two whole batches, and at 2, 3 and 4 on the same examples in
    equal micro-batches. It compares the gradients that each optimizer step reads: before any clipping, in float64,
    without dropout, from the same weights. Examples are ordered so that micro-batches have unequal numbers of valid
    targets.

Why is this bad?
    A micro-batch loss that is not divided trains at k times the learning rate. A mean over each micro-batch's own
    tokens gives a token in a short sequence more weight than one in a long sequence. Both look like training.

How it decides
    1. The reference is the loop itself at ``accumulate=1``. Gradients must agree to rounding in float64. Equal weights
       after the last step pass, whatever the gradients are.
    2. g_i is the gradient of micro-batch i alone. Least squares write both gradients as sums of w_i g_i; the weights
       name the cause (docs/how-it-decides.md#accumulation-as-weights).
    3. Without such a pattern, one thing at a time is left out between the micro-batches. If windows and one batch then
       agree, it is the cause. Correct are statistics of each forward pass, and a scheduler called and built for
       micro-batches. An optimizer that steps with each micro-batch, next to one that waits for the window, is correct
       too.
    4. Where the factor is 1/k, windows of k whole batches separate a loss divided twice from one divided by a constant,
       which is a skip.
    5. A loop without the knob that takes several batches a step is compared over windows in which every micro-batch is
       the whole batch. Weights that follow the place are a fault, a mean of means is advice.

    | seen, if one batch has [.5, .5] | cause | advice if |
    |---|---|---|
    | a step before all micro-batches, or the last weighs 0 | ``stepped_inside_window`` |  |
    | [1, 1]; or one term of the loss counts k times | ``loss_not_divided`` |  |
    | [.25, .25] | ``divided_twice`` |  |
    | [0, .5] | ``only_last_counts`` |  |
    | [.5, .5], and one batch has [.52, .48] | ``mean_of_means`` | counts of targets do not explain it |
    | a factor of (n // k) k / n | ``count_rounded_down`` | always |
    | the second window holds terms of the first | ``carried_over`` |  |
    | clips left out make them agree | ``clipped_inside_window`` |  |
    | schedule, average or statistic moved once a step does | ``scheduled_inside_window``, ``averaged_inside_window``,
      ``statistic_inside_window`` |  |
    | other writes to gradients or weights, or hooks, left out do | ``changed_inside_window`` |  |
    | rows twice: a part doubles, all halves | ``term_grows_with_rows``, ``divided_by_rows_again`` | no knob |
    | an uneven last window; other learning rates; none | ``last_window_lost``, ``update_differs`` | always |

When it is skipped
    It skips batches whose axis of rows is unclear and that agree along the second. It skips the loop if more than 1e-9
    of the whole batch's gradient lies outside the span of the g_i: then examples interact. Right loops leave at most
    2e-15, others at least 1e-3.

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
    Examples are taken along the first axis, or along ``batch_dim``. Where nothing in the batch says which axis it is,
    and windows agree once the batch is cut along the second, the check is skipped. It is skipped too where the loop
    raises on part of a batch: ``split_batch`` says how the project splits one.

    Losses in which examples interact (contrastive ones) and loops that draw with python's or numpy's generators are
    skipped. Batch norms use their running statistics. An uneven last window is advice. An average that no run calls is
    looked at where ``TrainLoop.model`` declares it. Without the knob, where a step takes one batch, the declared
    ``loss`` is looked at, for a note.

References
    https://huggingface.co/blog/gradient_accumulation (mean of means over tokens)
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.accumulation_equivalence.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Split
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=10, steps=50)
def accumulation_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.accumulation_equivalence import inside, weights, windows
    from pytest_trainloop.instruments.batches.own_data import makes_own_data, require_given_data

    if "accumulate" not in evidence.knobs:
        found = []
        if "fit" in evidence.offers and evidence.repeatable:
            found = [f for f in (weights.mixed_terms(evidence), weights.fixed_window(evidence)) if f is not None]
        yield from found or weights.of_declared_loss(evidence)
        return
    splits = evidence.shared(windows.Accumulation.of).at_each_size()
    if any(w.ratio != w.ratio for s in splits for w in s.windows if w.difference == 0.0):
        raise CannotDecide("on rows taken from the batch the gradients are not finite, whole and in micro-batches")
    # gradients that differ and weights that do not: the learning rate is scaled to match, or the optimizer gathers
    wrong = [s for s in splits if not s.equal and s.updates > s.bound]
    if evidence.shared(makes_own_data):
        early = [s for s in wrong if s.steps_too_early]
        if not early:
            require_given_data(evidence, "the same rows cannot be passed whole and in parts")
        yield windows.stepped_too_early(evidence, early[0])
    elif wrong:
        _require_wrong_along_other_axis(evidence)
        evidence.shared(windows.Accumulation.of).shown = wrong[0]
        yield from _first_cause(evidence, wrong, splits)
    else:
        yield from windows.last_window(evidence)
        moved = next((s for s in splits if s.equal and s.updates > windows.CLOSE), None)
        if moved is not None:
            explained = inside.settled(evidence, moved)
            yield from explained if explained is not None else weights.other_lrs(moved)


def _first_cause(evidence: Evidence, wrong: Sequence[Split], splits: Sequence[Split]) -> Iterator[Finding]:
    """What the weights of the micro-batches prove; else what the loop does inside a window, if windows and one batch
    agree without it."""
    from pytest_trainloop.checks.batch.accumulation_equivalence import inside, weights, windows

    first, proven, undecided = wrong[0], None, None
    if first.steps_too_early:
        yield windows.shrunk(evidence, first, windows.stepped_too_early(evidence, first))
        return
    try:
        proven = weights.proven(evidence, wrong, splits)
        if proven is None:
            return
    except CannotDecide as reason:
        undecided = reason
    if proven is not None and proven.cause != "update_differs":
        yield windows.shrunk(evidence, first, proven)
        return
    mixed = weights.mixed_terms(evidence) if undecided is not None else None
    explained = [mixed] if mixed is not None else inside.settled(evidence, first)
    if explained is not None:
        yield from explained
    elif undecided is not None:
        raise undecided
    elif proven is not None:
        yield proven


def _require_wrong_along_other_axis(evidence: Evidence) -> None:
    """Raise ``CannotDecide`` where windows and one batch agree once the batch is cut along its second axis, and nothing
    says that rows lie along the first: what is summed over time, and averaged over rows, differs if time is cut."""
    from pytest_trainloop.checks.batch.accumulation_equivalence.windows import Accumulation

    other = evidence.shared(Accumulation.along_other_axis)
    try:
        splits = other.at_each_size() if other is not None else []
    except CannotDecide:
        return
    if splits and all(s.equal or s.updates <= s.bound for s in splits):
        raise CannotDecide(
            "with the batch cut along its second axis the gradients agree, along its first they do not, and nothing "
            "says along which of them rows lie: give batch_dim=1, or batch_dim=0 if the first axis holds them",
            needs="batch_dim=",
        )
