"""Each tensor of the batch counts as what it is declared to be: a mask, lengths, weights, segments, a graph.

What it does
    It repeats the first step in float64 with one tensor of the batch changed at a time. Some changes must move the
    gradient: other weights, one more place left out, shorter lengths, another graph. Others must not:
    other values where a mask or lengths leave places out. Where batches differ in a graph, it takes two steps and looks
    whether the second reads the graph of its own batch.

Why is this bad?
    A mask that is cut at the wrong end, a weight that no loss reads, an adjacency from a cache: shapes fit, the loss
    falls, and the model learns from padding or from another graph.

How it decides
    1. ``roles=Roles(...)`` is a promise, so breaking it is a fault. Gradients are compared to 1e3 eps, with equal
       weights and seeds and without dropout.
    2. A declared tensor must change the gradient. Weights get factors of their own. Masks lose a place in the middle of
       each row. A tensor without effect is tried once more over two steps with its own random numbers.
    3. Places that a declared mask, lengths or ``Padding(pad_id=...)`` leave out get other values from the same row. The
       gradient must not change. A mask or lengths without effect are advice, and only if no such place can be tried: a
       causal model padded on the right needs no mask.
    4. The first place behind a row's end may end the text. It is left out, unless the last real ids are equal in all
       rows. Then it must not be a target. A convolution may read it.
    5. Ids are left if the loop may recognise padding by them: it compares with the id, or an embedding has it as
       ``padding_idx``.
    6. A graph is kept if three steps agree. The second step is equal with the first batch's graph; it changes with
       another first graph; a first step on the second batch depends on its graph.
    7. Undeclared, a tensor called a mask is tried on numbers of its shape. Advice: one counts behind the ends of rows,
       and another does not.

    | seen | cause | advice if |
    |---|---|---|
    | no edit of a declared tensor changes the gradient | ``role_without_effect`` | item 3 |
    | every place is left out | ``nothing_counts`` |  |
    | values at left out places change the gradient | ``left_out_places_count`` | zeros; a shape by chance; item 7 |
    | the graph of the first batch is kept (no declaration needed) | ``first_value_kept`` |  |

When it is skipped
    It skips data that ``fit`` makes itself, and steps that do not repeat.

Faulty
    >>> batch = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([0, 1, 2, 0, 1, 2]), torch.linspace(0.2, 1, 6)
    >>> roles = Roles(weights="batch[2]")
    >>> for x, y, weight in batches:
    ...     optimizer.zero_grad()
    ...     F.cross_entropy(model(x), y).backward()
    ...     optimizer.step()

Fixed
    >>> batch = torch.linspace(-2, 2, 48).view(6, 8), torch.tensor([0, 1, 2, 0, 1, 2]), torch.linspace(0.2, 1, 6)
    >>> roles = Roles(weights="batch[2]")
    >>> for x, y, weight in batches:
    ...     optimizer.zero_grad()
    ...     loss = F.cross_entropy(model(x), y, reduction="none")
    ...     ((loss * weight).sum() / weight.sum()).backward()
    ...     optimizer.step()

Known limits
    Rows lie along the first dimension. Masks for pairs of positions are only tested to have an effect. Tensors that are
    neither declared nor a graph are tested by ``input_dependence``, labels to be ignored by
    ``ignored_labels_do_not_count``, and what segments share by ``segment_independence``.

References
    https://github.com/verl-project/verl/issues/3562 (a loss mask cut at the wrong end)
    https://github.com/pyg-team/pytorch_geometric/issues/619 (GCNConv cached=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.batch_roles_hold.causes import CAUSES
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=22, steps=4)
def batch_roles_hold(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.batch_roles_hold.steps import RoleSteps

    yield from RoleSteps(evidence).findings()
