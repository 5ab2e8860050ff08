"""Loss functions get what they are documented to take.

What it does
    It examines every loss that the loop backpropagates. These are calls of ``torch.nn.functional`` (by whatever code),
    functions of libraries and of the project that it has a contract for, and losses written out in log-softmaxes,
    logarithms and differences. It looks at what the input was computed from, what the targets contain, and which
    entries count.

Why is this bad?
    Such a loss runs, falls and looks plausible. With softmax before cross_entropy it cannot fall below 1.46 over ten
    classes. With (N, 1) against (N,) the model learns the mean of all targets. With padded positions that count, it
    learns padding.

How it decides
    1. It judges every loss that is backpropagated, by where values come from and by the values.
    2. It follows a tensor back through reshapes, casts, masks, dropout and constant factors to a softmax, a sigmoid or
       a layer. The class axis is found by applying the same reshapes to the indices of entries. Scores are a
       distribution only if all rows of all calls sum to 1.
    3. Entries without a gradient are not judged. A padded position counts only if its prediction has a gradient.
    4. Padding must be proven: by a declared pad id, ``padding_idx``, or a mask or lengths beyond which all values of an
       input are equal. Slots that only targets leave empty are none.
    5. Labels are compared with embedded ids and with the last input that an output depends on. Where embeddings are
       frozen, a further run lets gradients reach them. If nothing shows that input, a shift is advice. A model that
       sees later inputs may have any shift. A shift by two in one operation, a leading blank, or another loss of the
       next id is intended.
    6. Functions of libraries are known by name. Flags (``from_logits``) are read from the call
       (docs/how-it-decides.md#losses-of-libraries).
    7. Rows that end in the id that fills them: all their ends are ignored, no label before is. No gradient raises the
       score of this id.
    8. Each finding is a fault, with the exceptions of the table.

    | seen | fault if | otherwise |
    |---|---|---|
    | labels are shifted | under one in 1e9 orders of the ids agree as well | advice to 1 in 1000 |
    | the end of all rows is ignored | its loss is all that is backpropagated | advice |
    | a torch loss is maximised | it is all that is backpropagated, and no weights are pretrained | advice |
    | maximised, next to other losses, in a game, or as an attack |  | silent |
    | a loss is left out (``part_left_out``) | its layer trains by nothing else, or nothing can read it | advice |
    | boxes as corners have x2 < x1 | they are data, or compared in another format too | advice |
    | a table of all pairs | all entries have the same weight | silent |
    | (N,) times (N, 1) | the weights are equal; always of log-probabilities | silent |
    | no pairs in the labels | the loss is exactly 0 in every call | silent |
    | gradients contradict names (pos, neg) in all rows | of products, cosines, log-probabilities | silent |
    | nll_loss of raw scores | their gradient does not sum to 0 over classes | silent |
    | kl_div by elements, a wide head, rare positives, log-softmax as logits, a learned temperature |  | advice |

When it is skipped
    It skips a call that it could not compute with, if nothing else is found.

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


@check(needs={"run"}, causes=CAUSES, rank=10, instrument=INSTRUMENT, listener=INSTRUMENT)
def loss_contract(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.loss.loss_contract.adapted import adapted
    from pytest_trainloop.checks.loss.loss_contract.calls import LossCalls
    from pytest_trainloop.runs.weight_origins import pretrained

    calls = evidence.shared(LossCalls.of)
    shifts = calls.shifts
    if shifts.unseen and evidence.repeatable:
        shifts = evidence.shared(LossCalls.with_open_embeddings).shifts
    reported: set[tuple[str, tuple[str, ...], str]] = set()
    others = shifts.findings(), calls.ends.findings(), calls.sides.findings(calls.record)
    for finding in itertools.chain(calls.findings(), *others):
        key = finding.cause, finding.culprits, finding.where
        if key not in reported:
            reported.add(key)
            turned = finding.cause in ("sign_flipped", "sides_turned") and finding.level == "fault"
            intended = turned and evidence.shared(pretrained)  # these may be made to unlearn
            repair = adapted(finding.cause, code_of(finding.where), finding.repair or CAUSES[finding.cause].repair)
            yield replace(finding, repair=repair, level="advice" if intended else finding.level)
    if not reported and calls.unread:
        raise CannotDecide(f"a call of a loss function could not be judged: {calls.unread[0]}")
