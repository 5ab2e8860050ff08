"""Activation checkpointing changes what a step costs, and not its gradients.

What it does
    It runs the loop as it is, and with every checkpoint of torch's turned into a plain call of the same function. It
    compares the losses and the gradients that arrive: in float64, under one seed, from the same weights. With a knob
    ``checkpoint`` it compares both ways of the knob as well.

Why is this bad?
    The recomputation in the backward pass must repeat the forward pass. Where it draws other random numbers, or finds
    another state, gradients belong to a model that never made the loss; a re-entrant checkpoint whose inputs need no
    gradient gives none to the parameters inside it. Nothing is raised, and the loss still falls.

How it decides
    1. Both runs make the same operations, so gradients must agree to rounding.
    2. If they do not, one thing at a time is put right. What makes them agree is the cause.
    3. If nothing does, every call of torch under a checkpoint is compared with the same call in the recomputation.
       Calls are compared too if torch refuses the plain ones because a tensor was changed before its backward pass.
    4. The knob's other way is compared without dropout, since it may draw in a different order.
    5. Buffers may end with other values. Silent are a momentum of 1 - sqrt(1 - m), with an m of two digits at most, and
       counts of batches where momentum is not None.

    | makes gradients agree, or is seen | cause | advice if |
    |---|---|---|
    | checkpoints that no gradient can flow through, as plain calls | ``inputs_need_grad`` |  |
    | states of all generators restored for the recomputation | ``rng_not_preserved`` |  |
    | re-entrant checkpoints replaced by others | ``side_result_cut`` |  |
    | a call differs in the recomputation | ``state_changed`` |  |
    | the first forward pass differs | ``other_computation`` |  |
    | only buffers end with other values | ``statistics_updated_twice`` | no knob ``checkpoint`` |

When it is skipped
    It skips a loop without checkpoints and without the knob.

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
