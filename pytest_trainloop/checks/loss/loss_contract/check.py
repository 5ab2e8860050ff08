"""Loss functions get what they are documented to take.

What it does
    It looks at every call of a loss function of ``torch.nn.functional`` (by whoever makes it) whose gradient goes into
    what the loop backpropagates, and at losses written by hand as far as they are made of log-softmaxes, logarithms
    and differences: what the input was computed by, what the targets hold, which entries count.

Why is this bad?
    Such a loss runs, falls and looks plausible. Softmax before cross_entropy cannot fall below 1.46 over ten classes;
    (N, 1) against (N,) trains towards the mean of all targets; a padded position that counts teaches padding.

How it decides
    By where the values come from and by what they are, never by the loss. What a tensor was computed by is followed
    through moves, casts, masks, dropout and constant factors to the softmax, the sigmoid or the layer that made it;
    the class axis by making the same moves with the numbers of the entries. A row of scores that sums to 1 by chance
    is no distribution: all rows of all calls must. Entries that get no gradient (masked after ``reduction="none"``, a
    weight of 0) are not judged, nor are losses that are computed and not backpropagated. Scores without a
    normalisation in nll_loss pass where the gradient that arrives at them sums to nothing over the classes: a
    log-sum-exp stands beside it. A loss is maximised by mistake where its negative is all that is backpropagated, no
    other loss is, and drawn weights are trained by it (loaded ones may unlearn).
    Positions are padding where the batch proves it: by the declared pad id, by an embedding's padding_idx, by a mask
    or lengths beyond which one value stands. Labels are compared with the ids that the embedding looked up, and with
    the last input that an output depends on; of a model that sees later inputs no shift is expected.
    What may be meant is advice: log-probabilities into cross_entropy, kl_div by the mean of elements or with its
    gradient through the target, a head far wider than the labels, rare positives without a weight, a loss that is
    computed and left out, or subtracted from another.

Faulty
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x).softmax(-1), y).backward()
    ...     optimizer.step()

Fixed
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Losses inside compiled kernels and custom autograd functions are not seen.

References
    https://docs.pytorch.org/docs/stable/nn.functional.html#loss-functions
    https://docs.pytorch.org/docs/stable/generated/torch.nn.KLDivLoss.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.loss.loss_contract.call import Breach
    from pytest_trainloop.runs.evidence import Evidence

LEARNING = ("loss_at_init", "overfit_one_batch", "update_ratio")

NOT_FINITE = frozenset(
    """all_ignored alignment_impossible arguments_swapped log_target_mismatch log_variance logits_as_log_probabilities
    logits_as_probabilities rate_scale target_outside_unit""".split()
)
"""Causes by which a loss may become NaN or infinite."""

INSTRUMENT = "pytest_trainloop.checks.loss.loss_contract.recorder:LossCallRecorder"

NO_GRADIENT = frozenset({"activation_on_logits", "probabilities_as_logits", "probabilities_saturated", "single_class"})
"""Causes by which gradients may be nothing."""

OUT_OF_ORDER = frozenset({"class_axis", "wrong_axis"})
"""Causes by which scores meet labels of other rows, or rows each other."""

PADDING = frozenset({"padding_counted", "ignore_index_mismatch"})
"""Causes by which the loss counts padding."""

CAUSES = {
    "probabilities_as_logits": "the scores come from a softmax or a sigmoid, or sum to 1 in every row of every call",
    "log_probabilities_as_logits": "the scores come from log_softmax: harmless to cross_entropy",
    "activation_on_logits": "the scores come from a function without values on one side of zero, or of a narrow range",
    "dropout_on_logits": "dropout lies between the last layer and the loss",
    "temperature_inverted": "cosines times a number below one half, or distillation with scores times one above",
    "single_class": "the last layer has one output, whose softmax is 1",
    "wrong_axis": "the softmax runs over another axis than the one that the loss takes for the classes",
    "class_axis": "the entries along the class axis come from several positions of the last layer",
    "logits_as_log_probabilities": "the exponentials of the input sum to more than 1, or it is what a layer gives",
    "probabilities_as_log_probabilities": "the input sums to 1, where its logarithm should",
    "logits_as_probabilities": "raw scores where a binary cross entropy or a divergence takes probabilities",
    "probabilities_saturated": (
        "before the first step probabilities are exactly 0 or 1 and wrong: no gradient comes from them"
    ),
    "target_dtype": "torch refuses the dtype of the targets",
    "target_shape": "torch refuses the shape of the targets",
    "target_out_of_range": "labels below 0 or beyond the last class, or counts below 0",
    "target_outside_unit": "targets of a binary loss below 0 or above 1, where they count",
    "target_not_distribution": "soft targets with negative entries, or with sums that are not 1 in a regular way",
    "all_ignored": "every target of a call is the ignored one, and the mean is over none",
    "index_list_expected": "zeros and ones where lists of class indices are read",
    "signs_expected": "targets of 0 and 1 where 1 and -1 are read",
    "log_target_mismatch": "logarithms as targets without log_target, or probabilities with it",
    "arguments_swapped": "the first argument holds probabilities and the second logarithms",
    "mean_over_elements": "kl_div divides by all entries: its documentation advises batchmean",
    "broadcast": "both sides of a difference grow when they are compared",
    "weight_shape": "a weight makes the loss larger than its input, or has not one entry for each class",
    "log_variance": "what a layer gives, or negative values, are given for a variance",
    "rate_scale": "a rate where its logarithm is taken, or negative values where a rate is",
    "blank_in_targets": "the blank stands among the labels of a CTC loss",
    "lengths_refused": "torch refuses the lengths given to a CTC loss",
    "alignment_impossible": "a target of a CTC loss has more labels than its input has frames",
    "padding_counted": "positions that are padding in the input, all of one label, count in the loss",
    "ignore_index_mismatch": "the same, and another label than theirs is ignored",
    "real_class_ignored": "a label of real positions is the ignored one",
    "shifted_twice": "the labels of a causal model are the inputs two positions on",
    "not_shifted": "the labels of a causal model are the inputs of the same position, or of the one before",
    "ids_out_of_range": "ids beyond the rows of an embedding",
    "sign_flipped": "a negative multiple of the loss, and nothing else, is backpropagated and trains its scores",
    "part_detached": "the value of a loss is added to what is backpropagated, without its history",
    "part_left_out": "no gradient ever came in at a loss with a history, while others were backpropagated",
    "head_too_wide": "no label of the run lies in the lower eighth of the head",
    "classes_imbalanced": "fewer than 5 % of the labels are positive, without a weight",
}


@check(needs={"run"}, causes=CAUSES, rank=10, instrument=INSTRUMENT)
def loss_contract(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_contract.recorder import LossCallRecorder
    from pytest_trainloop.runs.weight_origins import pretrained

    contracts = evidence.shared(LossCallRecorder.of)
    told: set[tuple[str, str, str]] = set()
    for breach, times, calls in contracts.breaches():
        key = breach.cause, breach.culprit, breach.where
        if key not in told:
            told.add(key)
            meant = breach.cause == "sign_flipped" and breach.level == "fault" and evidence.shared(pretrained)
            yield _finding(replace(breach, level="advice") if meant else breach, times, calls)
    if not told and contracts.unread:
        raise CannotDecide(f"a call of a loss function could not be read: {contracts.unread[0]}")


def _finding(breach: Breach, times: int, calls: int) -> Finding:
    often = f"; in {times} of {calls} calls" if calls > 1 else ""
    return Finding(
        cause=breach.cause,
        level=breach.level,
        summary=breach.summary,
        measured=f"{breach.measured}{often}".removeprefix("; "),
        shown_by=breach.shown_by,
        culprits=(breach.culprit,) if breach.culprit else (),
        where=breach.where,
        repair=breach.repair,
        explains=_explained(breach.cause) if breach.level == "fault" else (),
    )


def _explained(cause: str) -> tuple[str, ...]:
    gradients = ("gradient_reaches_every_param", "every_param_moves") if cause in NO_GRADIENT else ()
    order = ("batch_independence",) if cause in OUT_OF_ORDER else ()
    padding = ("padding_invariance",) if cause in PADDING else ()
    return (*LEARNING, *order, *padding, *(("finite",) if cause in NOT_FINITE else ()), *gradients)
