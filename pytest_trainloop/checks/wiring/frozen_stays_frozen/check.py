"""What is frozen stays as it is: parameters, and the running statistics of its norms.

What it does
    It watches what changes parameters that do not train (``frozen=`` names them, or they do not require grad), and the
    running statistics of norms among them.

Why is this bad?
    A backbone "frozen" by zeroing its gradients still shrinks by weight decay and drifts by momentum. Batch norms of a
    frozen backbone in training mode follow the new data, and the features change under the head that is trained on
    them.

How it decides
    Only a move inside an optimizer's step, of a parameter that this optimizer holds, is the optimizer's doing: an
    average, a target or a codebook that user code writes is not. A declared parameter that requires grad, gets
    gradients and moves is still trainable. One that does not train and moves all the same was moved by weight decay if
    the update runs along its own values, or if it stays in a run without weight decay; by an old gradient if what the
    step reads is bit for bit an earlier one; else by momentum, where an earlier step used a gradient of it. One whose
    gradient is set to zero before every step counts as frozen; a group of such with a larger decay of its own is to
    shrink. A gradient that user code assigns is meant.
    Running statistics are a fault where all weights of their norm are frozen and nobody writes these, and where the
    norm belongs to what ``frozen=`` names, or was called within a model other parts of which train. Not so where only
    norms are frozen, with no layer next to them, or where something that trains lies before the norm: these statistics
    must follow. Other buffers are looked at only in what ``frozen=`` names.
    A filter that is to freeze by names and matches none is advice. The names that ``named_parameters()`` hands out note
    what they are asked (``in``, ``startswith``, ``endswith``, ``==``). A pattern that is true of none gets the answer
    "yes" in a further build and step: for the names that it all but has (``embeddings.`` for ``bert.embeddings.``), or
    for one, where nothing matches in that function. It is a filter of what is frozen where their parameters are frozen
    then.
    ``module.requires_grad = False`` is advice where its parameters are trained: nothing reads that attribute.

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
    return "no parameter is frozen: all require gradients, and frozen= names none"


@check(needs={"fit"}, causes=CAUSES, rank=60, steps=1, absent=_nothing_frozen)
def frozen_stays_frozen(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.wiring.frozen_stays_frozen import moves, statistics
    from pytest_trainloop.checks.wiring.frozen_stays_frozen.unmatched_filters import (
        attribute_of_a_module,
        unmatched_filters,
    )

    record = evidence.run()
    yield from moves.moved_by_steps(evidence, record)
    yield from statistics.drifting(evidence, record)
    yield from statistics.other_buffers(evidence, record)
    yield from unmatched_filters(evidence)
    yield from attribute_of_a_module(evidence)
