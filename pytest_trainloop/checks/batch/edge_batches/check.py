"""One row, a row without labels, the loader's last batch: the loop takes what an epoch ends with.

What it does
    It runs the loop for two steps on each batch that may end an epoch, made from the example batch: one row alone; the
    last batch of the project's ``DataLoader``, if it is smaller; a row in which nothing counts (all labels ignored, a
    mask of zeros); a row of length one, cut to its length; a row that ends in the declared padding. No values are
    invented: a batch that cannot be made from the project's own rows is not tried.

Why is this bad?
    Such a batch comes once in an epoch, hours after the start. ``squeeze()`` then removes the row axis too: outputs of
    shape (1, classes) are broadcast, or raise far from there. The mean over no labels is NaN, and one step with it
    makes every weight NaN.

How it decides
    Many correct loops raise on one row or make NaN of it (batch norm, contrastive losses, a standard deviation over
    rows), since their loaders never give one. It is a fault in two cases. The project's own ``DataLoader`` ends an
    epoch with such a batch, and the loop raises or its weights become NaN. Or one row was meant to work: it is run
    again with ``squeeze`` removing only what it removes from a full batch, the loop goes through, and in float64 the
    gradient of two rows is the sum or a mean of the gradients of each row (see accumulation_equivalence).
    ``drop_last`` gives no such batch, nor does a quasi-Newton method, which gets all data. It is advice if the loader's
    last batch has more rows, or if the loop raises on one row and no loader is given.
    A row in which nothing counts must exist in the example batch. NaN weights are a fault if such a row can be a batch:
    the loader may leave any one row, or nothing counts in a quarter of the rows and ``accumulate`` splits them. Length
    one is tried if such a row exists and the project's batches differ in width. It is a fault if the loader may leave
    any one row. Both are advice otherwise.
    A padding id beyond the table is a fault if the loop raises ``IndexError`` on it. What a loop does on purpose (a
    batch that it skips, an ``assert``, an exception of its own) is correct.

Faulty
    >>> class Net(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x[:, None]).squeeze()        # of one row: (1, 1, 3) becomes (3,)
    >>> model = Net(8, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

Fixed
    >>> class Net(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x[:, None]).squeeze(1)
    >>> model = Net(8, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

Known limits
    Only ``squeeze`` is known to lose a row; ``[0]``, ``reshape`` and numpy's are not looked at. Batches larger or
    longer than the example are not composed: nothing says how large they may be.

References
    https://docs.pytorch.org/docs/stable/generated/torch.squeeze.html
    https://docs.pytorch.org/docs/stable/data.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.edge_batches.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=5)
def edge_batches(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges

    edges, undecided = Edges(evidence), None
    findings: list[Finding] = []
    for rules in (_few_rows(edges), _content(edges)):
        try:
            findings.extend(rules)
        except CannotDecide as reason:
            undecided = reason
    yield from findings
    if not findings and undecided is not None:
        raise undecided
    if findings or edges.ending.leaves_none or edges.ending.leaves_one:
        return
    one, loader = edges.one_row, "give the project's DataLoader as batches= to have its last batch judged"
    if one.raised_by_loop:
        raise CannotDecide(f"the loop refuses a batch of one row: {one.failure}; {loader}", needs="batches=")
    if not one.ok:
        raise CannotDecide(
            f"on a batch of one row {one.failure}, and nothing says whether one comes: {loader}", needs="batches="
        )


def _few_rows(edges: Edges) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches.few_rows import leftover_batch, row_axis_squeezed

    if not edges.ending.drops:
        squeezed = list(row_axis_squeezed(edges))
        yield from squeezed or leftover_batch(edges)


def _content(edges: Edges) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches import content

    yield from content.index_out_of_table(edges)
    if not edges.ending.drops:
        empty = list(content.nan_when_all_ignored(edges))
        yield from empty or content.nan_at_length_one(edges)
