"""One row, a row without labels, the loader's last batch: the loop takes what an epoch ends with.

What it does
    It runs the loop for two steps on each batch that may end an epoch. These are made from the example batch: one row
    alone, and the last batch of the project's ``DataLoader``, if it is smaller. There is a row in which nothing counts
    (all labels ignored, a mask of zeros). There is a row of length one, cut to its length, and a row that ends in the
    declared padding. No values are invented: a batch that cannot be made from the project's own rows is not tried.

Why is this bad?
    Such a batch comes once in an epoch, hours after the start. ``squeeze()`` then removes the row axis too: outputs of
    shape (1, classes) are broadcast, or raise far from there. The mean over no labels is NaN, and one step with it
    makes every weight NaN.

How it decides
    1. Many correct loops raise on one row, or make NaN of it: their loaders never give one. So a fault needs the
       project's own loader, or proof that one row should work.
    2. ``drop_last`` gives no such batch, nor does a quasi-Newton method, which gets all data.
    3. One row should work if it goes through once ``squeeze`` removes only what it removes from a full batch. In
       float64 the gradient of two rows must also be the sum or a mean of each row's.
    4. A row in which nothing counts can be a batch if the loader may leave any one row. It can be one too if it fills a
       quarter of the rows and ``accumulate`` splits them.
    5. Correct is what a loop does on purpose: a skipped batch, an ``assert``, an exception of its own.

    | seen | cause | advice if |
    |---|---|---|
    | item 3 | ``row_axis_squeezed`` | the last batch has more rows; no loader |
    | the loader's last batch makes the loop raise, or weights NaN | ``leftover_batch`` |  |
    | a row in which nothing counts makes weights NaN | ``nan_when_all_ignored`` | no batch; only the loss is NaN |
    | a row of length one does, and batches differ in width | ``nan_at_length_one`` | the loader leaves no single row |
    | a padding id beyond the table raises ``IndexError`` | ``index_out_of_table`` |  |

When it is skipped
    It skips a loop that raises on one row if no loader is given and nothing else is found.

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
    if edges.ending.made:
        loader = "batches(n) makes the batches, and no DataLoader ends with one"
    needs = "" if edges.ending.made else "batches="
    if one.raised_by_loop:
        raise CannotDecide(f"the loop refuses a batch of one row: {one.failure}; {loader}", needs=needs)
    if not one.ok:
        raise CannotDecide(
            f"on a batch of one row {one.failure}, and nothing says whether one comes: {loader}", needs=needs
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
