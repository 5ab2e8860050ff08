"""One row, a row without labels, the loader's last batch: the loop takes what an epoch ends with.

What it does
    It runs the loop over batches that may end an epoch, two steps each, composed of the example batch: one of its rows
    alone; the last batch of the project's ``DataLoader``, where that is smaller; a row in which nothing counts (all
    labels ignored, a mask of zeros); a row of length one, cut to its length; a row that ends in the declared padding.
    Values are never made up, and a batch that the project's own rows cannot make is not composed.

Why is this bad?
    The batch comes once in an epoch, hours after the start. ``squeeze()`` removes the row axis with it, and what was
    (1, classes) is broadcast or fails far from there. The mean over no labels is NaN, and one step with it makes every
    weight NaN.

How it decides
    Many right loops raise on one row or make NaN of it (batch norm, contrastive losses, a standard deviation over rows)
    since their loaders never give one. So that alone is no fault. It is one where the project's own ``DataLoader`` ends
    an epoch with such a batch, and the loop raises or its weights become NaN; or where an observation shows that one
    row was meant to work: the loop is run on one row again with ``squeeze`` removing only what it removes from a full
    batch. If it then goes through, and in float64 the gradient of two rows is the sum of those of each alone, or a mean
    of them (see accumulation_equivalence), that call lost the row axis. A loader with ``drop_last`` gives no such
    batch, nor does one for a quasi-Newton method, which gets all data; a loader whose last batch is larger makes the
    finding advice. So does a loop that raises on one row where no loader is given: whether one comes is not known, and
    it would be noticed.
    A row in which nothing counts must exist in the example batch. Weights that become NaN are a fault if such a row can
    be a batch: the loader may leave any one row, or nothing counts in a quarter of the rows and ``accumulate`` splits
    them; else advice. Length one is looked at where such a row exists and the project's batches differ in width, as
    they do where each is padded to its longest row; it is a fault if the loader may leave any one row, else advice.
    A padding id beyond the table is a fault if the loop raises ``IndexError`` on it. What a loop does on purpose (a
    batch that it skips, an ``assert``, an exception of its own) is right.

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
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.edge_batches.runs import Edges
    from pytest_trainloop.finding import Finding
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
