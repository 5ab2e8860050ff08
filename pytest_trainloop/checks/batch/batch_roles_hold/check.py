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
    ``roles=Roles(...)`` declares what a tensor is. A declared role is a promise, so that breaking it is a fault.
    Gradients are compared to rounding (1e3 eps), weights and seeds are equal, and dropout is off.

    - A declared tensor must change the gradient. Weights get factors of their own, since a common factor is invisible
      where weights are normalised. Masks lose a place in the middle of each row, since a causal model never reads the
      last key. Only where every edit leaves the gradient as it is, the tensor has no effect. That is a fault of
      weights, graphs and inputs. A mask or lengths without effect are advice, and only where it cannot be seen whether
      what they leave out counts: a causal model that is padded on the right needs no mask.
    - Where a declared mask or declared lengths leave places out, all tensors with an entry for each row and position
      get other values there, taken from the same row. If the gradient changes, these places count. The same holds where
      ``padding=Padding(pad_id=...)`` is declared, the id stands exactly at these places, and a mask or lengths say so.
    - It is advice for floating-point values that are all 0 there, as a convolution pads with 0. It is advice where a
      tensor may have the shape of the mask by chance: no single value stands at these places alone.
    - The first place behind the end of a row may be trained as the end of the text. It is left as it is, unless the
      last real ids are equal in all rows. Then it must not be a target: with the targets of the unchanged batch the
      gradient is equal. A convolution may read it.
    - A tensor without effect is tried once more over two steps, with random numbers as they are drawn: a condition may
      be dropped at random, and a weight may count from the second step on.
    - Ids are left as they are where the loop may tell padding by the id itself: it compares with it, or an embedding
      has it as padding_idx.
    - A graph is kept if three steps agree: the second step is the same with the graph of the first batch in the second
      one; it changes with another graph in the first one, with weights put back; and a first step on the second batch
      depends on its graph. This is a fault without a declaration.

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
