"""Activation checkpointing changes what a step costs, and not its gradients.

What it does
    It runs the loop as it is, and with every checkpoint of torch's turned into a plain call of the same function, and
    compares the losses and the gradients that arrive: in float64, under one seed, from the same weights. With a knob
    ``checkpoint`` it compares both ways of the knob as well.

Why is this bad?
    The recomputation in the backward pass must repeat the forward pass. Where it draws other random numbers, or finds
    another state, gradients belong to a model that never made the loss; a re-entrant checkpoint whose inputs need no
    gradient gives none to the parameters inside it. Nothing is raised, and the loss still falls.

How it decides
    Both runs make the same operations, so that their gradients agree to rounding. Where they do not, one thing at a
    time is put right: checkpoints that no gradient can flow through become plain calls; then the states of all
    generators (torch's, python's, numpy's, those that the loop creates) are restored for each recomputation. What makes
    the gradients agree is the cause. Where nothing does, every call of torch under a checkpoint is compared with the
    same call in the recomputation; where all of them agree, re-entrant checkpoints are replaced by others. Calls are
    compared as well where torch refuses the plain ones because a tensor was changed before its backward pass: a
    checkpoint hides that. The knob's other way is compared without dropout, since it may draw in another order.
    Buffers that end with other values are advice: a batch norm that moves by its momentum twice a step forgets faster,
    and some libraries leave it so (torchvision's memory-efficient DenseNet). They are a fault where a knob
    ``checkpoint`` declares that checkpointing changes nothing. Nothing is said of a momentum of 1 - sqrt(1 - m) for an
    m of at most two digits, which is made for two updates, nor of counts of batches where momentum is not None: torch
    reads them for cumulative averages alone, and these come to the same.

Faulty
    >>> from torch.utils.checkpoint import checkpoint
    >>> for x, y in batches:
    ...     def encoded(x):
    ...         return F.dropout(model.encoder(x), 0.5)
    ...     features = checkpoint(encoded, x, use_reentrant=False, preserve_rng_state=False)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model.head(features), y).backward()
    ...     optimizer.step()

Fixed
    >>> from torch.utils.checkpoint import checkpoint
    >>> for x, y in batches:
    ...     def encoded(x):
    ...         return F.dropout(model.encoder(x), 0.5)
    ...     features = checkpoint(encoded, x, use_reentrant=False)
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model.head(features), y).backward()
    ...     optimizer.step()

Known limits
    A recomputation of the project's own is seen only through the knob. Casts in a checkpointed function are for
    ``precision_parity``: in float64 there are none. Losses of later passes may differ, since a function that runs twice
    may advance generators and counters twice.

References
    https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.checkpointing_equivalence.causes import CAUSES
from pytest_trainloop.core.errors import DoesNotApply
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"run"}, causes=CAUSES, rank=60)
def checkpointing_equivalence(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.numerics.checkpointing_equivalence.runs import Checkpointing, checkpoint_knob

    if checkpoint_knob(evidence) is None and not any(call.grad_enabled for call in evidence.run().checkpoints):
        raise DoesNotApply(
            "no activation checkpointing was seen, and there is no knob checkpoint= that is True or False"
        )
    runs = evidence.shared(Checkpointing)
    if finding := runs.other_gradients() or runs.moved_buffers():
        yield finding
    else:
        runs.require_recomputation()
