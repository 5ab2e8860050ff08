"""Loss functions get what they are documented to take.

What it does
    It examines every call of a loss function of ``torch.nn.functional`` (by whatever code) that the loop
    backpropagates, those of libraries and of the project that it has a contract for, and losses that are written out in
    log-softmaxes, logarithms and differences: what the input was computed by, what the targets hold, which entries
    count.

Why is this bad?
    Such a loss runs, falls and looks plausible. With softmax before cross_entropy it cannot fall below 1.46 over ten
    classes; with (N, 1) against (N,) the model learns the mean of all targets; with padded positions that count, it
    learns padding.

How it decides
    By the origin of the values and by the values, never by the size of the loss. The origin of a tensor is followed
    through reshapes, casts, masks, dropout and constant factors back to a softmax, a sigmoid or a layer; the class axis
    by applying the same reshapes to the indices of the entries. A row of scores that sums to 1 by chance is no
    distribution: all rows of all calls must. Entries without a gradient (masked after ``reduction="none"``, a weight of
    0) are not judged, nor are losses that are computed and not backpropagated. A padded position counts only if the
    gradient at its prediction is not 0: it is read at the loss function's input, and at what this was made of. Scores
    in nll_loss that are not normalised pass where the gradient at them sums to 0 over the classes: the loss then has a
    log-sum-exp as another term. A loss is maximised by mistake where only its negative is backpropagated, no other loss
    is, and it trains randomly initialised weights (pretrained ones may unlearn).
    Positions are padding where the batch proves it: by the declared pad id, by an embedding's padding_idx, by a
    mask or lengths beyond which all values are equal in something that the model may be given: slots that only targets
    leave empty are none. The labels of all calls from one line are compared with the
    ids that the embedding looked up, and with the last input that an output depends on (where embeddings are
    frozen, in a further run in which a gradient reaches them); for a model that sees later inputs no shift is
    expected. It is a fault where of 1e9 orders of the ids less than one would agree as well, and advice up to 1 in
    1000: few labels, or few kinds of them, prove little. Labels two ahead are meant where one operation shifts by
    two, or another loss of the same inputs has the next id; labels of the previous id where a blank comes first, as
    in an echo.
    Losses of libraries are known by name, their flags (``from_logits``, ``sigmoid``) are read from the call, and their
    arguments are what they are at the function's first call of torch. Boxes that are read as corners must have
    x1 <= x2 and y1 <= y2 in the data; of predicted boxes it is advice, and a fault where a distance compares the same
    predictions with the same targets in the other format. A table of all pairs is meant where its entries do not all
    count alike; the product of (N,) and (N, 1) is then that of two sums, and of log-probabilities never meant. A loss
    of pairs has none where no two rows, or all, have one label and its value is exactly 0.
    Sides are turned where names of the batch (pos and neg, chosen and rejected) contradict the gradients at their
    scores: products with something else of the batch, cosines and log-probabilities, no distances, in every row.
    Where it may be meant, it is advice: log-probabilities given to cross_entropy, kl_div by the mean of elements or
    with its gradient through the target, a head far wider than the labels, rare positives without a weight, a loss that
    is subtracted from another, or computed and left out: it may be a metric, or begin after a warm-up. Left out, it is
    a fault where no other loss trains its layer, or where the source of the function shows that nothing can read it:
    the value is thrown away, no line reads its name, or the next assignment replaces it.

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
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import code_of
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
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
            meant = turned and evidence.shared(pretrained)  # these may be made to unlearn
            repair = adapted(finding.cause, code_of(finding.where), finding.repair or CAUSES[finding.cause].repair)
            yield replace(finding, repair=repair, level="advice" if meant else finding.level)
    if not reported and calls.unread:
        raise CannotDecide(f"a call of a loss function could not be judged: {calls.unread[0]}")
