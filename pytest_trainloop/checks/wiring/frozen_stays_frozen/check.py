"""What is frozen stays as it is: parameters, and the running statistics of its norms.

What it does
    It watches what changes parameters that do not train (``frozen=`` names them, or they do not require grad), and the
    running statistics of norms among them.

Why is this bad?
    A backbone "frozen" by zeroing its gradients still shrinks by weight decay and drifts by momentum. Batch norms of a
    frozen backbone in training mode follow the new data, and the features change under the head that is trained on
    them.

How it decides
    1. Only a move inside an optimizer's step, of a parameter that this optimizer holds, counts. Averages and codebooks
       that user code writes do not.
    2. A parameter whose gradient is set to zero before every step counts as frozen. A group of such parameters with a
       larger decay of its own is to shrink. A gradient that user code assigns is intended.
    3. So do entries of a parameter, if a gradient arrives at them and the step finds zero there, the same ones each
       time. They must be whole rows or filters, or pruned. A further run compares the two, entry by entry, where user
       code writes gradients or has hooks on weights. What user code puts back after the step stays.
    4. Running statistics are a fault if all weights of their norm are frozen and nobody writes them. The norm must also
       belong to what ``frozen=`` names, or run within a model whose other parts train.
    5. Statistics are silent if only norms are frozen without a layer next to them, or if something that trains lies
       before the norm.
    6. Other buffers are judged only in what ``frozen=`` names.
    7. Filters by name are tried. A pattern that no name of ``named_parameters()`` matches gets the answer "yes" in a
       further build and step. It gets it for names that it nearly has (``embeddings.`` for ``bert.embeddings.``). It is
       a filter if their parameters are frozen then.

    | first that holds | cause | advice if |
    |---|---|---|
    | declared, requires grad, gets gradients and moves | ``still_trainable`` |  |
    | the update runs along its values, or is gone without weight decay | ``weight_decay`` |  |
    | the step reads, bit for bit, an earlier gradient | ``stale_gradient`` |  |
    | an earlier step used a gradient of it | ``momentum`` |  |
    | held entries move: not without decay, or still | ``weight_decay``, ``momentum`` |  |
    | running statistics of a frozen norm change | ``statistics_drift`` | an undeclared net called on its own |
    | a filter that freezes matches no name | ``freeze_matches_nothing`` | always |
    | ``module.requires_grad = False``, and its parameters train | ``freeze_sets_an_attribute`` | always |

When it is skipped
    It skips a loop in which nothing is frozen.

Faulty
    >>> model.encoder.requires_grad_(False)            # its batch norm still follows the data
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> model.encoder.requires_grad_(False).eval()     # and again after every model.train()
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Known limits
    Statistics of a net that is called on its own (a teacher, a target) and is not declared are advice. Filters by
    ``re`` and by sets of names are not seen.

References
    https://docs.pytorch.org/docs/stable/notes/autograd.html#setting-requires-grad
    https://keras.io/guides/transfer_learning (batch norm and frozen layers)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.frozen_stays_frozen.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


def _nothing_frozen(evidence: Evidence) -> str:
    from pytest_trainloop.recording.events import Step

    record = evidence.run()
    if record.frozen or any(not p.trainable for p in record.parameters) or any(s.frozen for s in record.of(Step)):
        return ""
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.held_entries import HeldEntries

    if evidence.shared(HeldEntries.of):
        return ""
    return "no parameter is frozen: all require gradients, and frozen= names none"


@check(needs={"fit"}, causes=CAUSES, rank=60, steps=1, absent=_nothing_frozen)
def frozen_stays_frozen(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.frozen_stays_frozen import held_entries, moves, statistics
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.unmatched_filters import (
        attribute_of_a_module,
        unmatched_filters,
    )

    record = evidence.run()
    yield from moves.moved_by_steps(evidence, record)
    yield from held_entries.moved_entries(evidence)
    yield from statistics.drifting(evidence, record)
    yield from statistics.other_buffers(evidence, record)
    yield from unmatched_filters(evidence)
    yield from attribute_of_a_module(evidence)
