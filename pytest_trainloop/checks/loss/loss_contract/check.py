"""Loss functions get what they are documented to take.

What it does
    It examines every loss that the loop backpropagates: calls of ``torch.nn.functional`` (by whatever code), functions
    of libraries and of the project that it has a contract for, and losses written out in log-softmaxes, logarithms and
    differences. It looks at what the input was computed from, what the targets contain, and which entries count.

Why is this bad?
    Such a loss runs, falls and looks plausible. With softmax before cross_entropy it cannot fall below 1.46 over ten
    classes. With (N, 1) against (N,) the model learns the mean of all targets. With padded positions that count, it
    learns padding.

How it decides
    By where values come from and by the values, never by the size of the loss. The origin of a tensor is followed
    through reshapes, casts, masks, dropout and constant factors back to a softmax, a sigmoid or a layer. The class axis
    is found by applying the same reshapes to the indices of the entries. One row of scores may sum to 1 by chance: it
    is a distribution only if all rows of all calls do.
    Entries without a gradient are not judged (masked after ``reduction="none"``, a weight of 0), nor are losses that
    are not backpropagated. A padded position counts only if the gradient at its prediction is not 0: it is read at the
    input of the loss function, and at what that was made of. Scores in nll_loss that are not normalised pass if the
    gradient at them sums to 0 over the classes: another term of the loss is their log-sum-exp. A maximised loss is a
    fault if only its negative is backpropagated, no other loss is, and it trains randomly initialised weights:
    pretrained weights may unlearn.
    Positions are padding where the batch proves it: by the declared pad id, by an embedding's padding_idx, or by a mask
    or lengths beyond which all values of an input are equal. Slots that only targets leave empty are no padding.
    The labels of all calls from one line are compared with the ids that the embedding looked up, and with the last
    input that an output depends on. Where embeddings are frozen, a further run lets a gradient reach them. A model that
    sees later inputs may have labels of any shift. A shift is a fault if fewer than one in 1e9 orders of the ids would
    agree as well, and advice up to one in 1000: few labels, or few kinds of them, prove little. It is intended where
    one operation shifts by two, where another loss of the same inputs has the next id, and where a blank comes first,
    as in an echo.
    Losses of libraries are known by name. Their flags (``from_logits``, ``sigmoid``) are read from the call, their
    arguments at the function's first call of torch. Boxes that are read as corners must have x1 <= x2 and y1 <= y2 in
    the data. For predicted boxes this is advice; it is a fault where another loss compares the same boxes in another
    format. A table of all pairs is intended where its entries have different weights. The product of (N,) and (N, 1) is
    a fault where they have not, since it is the product of two sums; for log-probabilities it is always one. A loss of
    pairs has none if all labels differ, or none does, and its value is exactly 0.
    Sides are turned where names in the batch (pos and neg, chosen and rejected) contradict the gradients at their
    scores in every row. Only products with another tensor of the batch, cosines and log-probabilities are such scores:
    distances are not.
    What may be intended is advice: log-probabilities given to cross_entropy, kl_div by the mean of elements or with its
    gradient through the target, a head far wider than the labels, rare positives without a weight, a loss that is
    subtracted from another. So is a loss that is computed and left out: it may be a metric, or begin after a warm-up.
    It is a fault where no other loss trains its layer, or where the source of the function shows that nothing can read
    it: the value is thrown away, no line reads its name, or the next assignment replaces it.

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

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.loss.loss_contract.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.finding import code_of
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence

INSTRUMENT = "pytest_trainloop.checks.loss.loss_contract.calls:LossCalls"


@check(needs={"run"}, causes=CAUSES, rank=10, instrument=INSTRUMENT)
def loss_contract(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_contract.adapted import adapted
    from pytest_trainloop.checks.loss.loss_contract.calls import LossCalls
    from pytest_trainloop.runs.weight_origins import pretrained

    calls = evidence.shared(LossCalls.of)
    shifts = calls.shifts
    if shifts.unseen and evidence.repeatable:
        shifts = evidence.shared(LossCalls.with_open_embeddings).shifts
    reported: set[tuple[str, tuple[str, ...], str]] = set()
    for finding in itertools.chain(calls.findings(), shifts.findings(), calls.sides.findings(calls.record)):
        key = finding.cause, finding.culprits, finding.where
        if key not in reported:
            reported.add(key)
            turned = finding.cause in ("sign_flipped", "sides_turned") and finding.level == "fault"
            intended = turned and evidence.shared(pretrained)  # these may be made to unlearn
            repair = adapted(finding.cause, code_of(finding.where), finding.repair or CAUSES[finding.cause].repair)
            yield replace(finding, repair=repair, level="advice" if intended else finding.level)
    if not reported and calls.unread:
        raise CannotDecide(f"a call of a loss function could not be judged: {calls.unread[0]}")
