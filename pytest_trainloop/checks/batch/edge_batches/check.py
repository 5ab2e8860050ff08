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

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import Cause, check
from pytest_trainloop.wording import be, direction, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.edge_batches.embedding_range import BeyondTable
    from pytest_trainloop.checks.batch.edge_batches.length_one import ShortRow
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import SqueezedRow
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "row_axis_squeezed": Cause(
        proof="with squeeze removing only what it removes from a full batch, one row goes through, and its gradient is "
        "what it is among other rows",
        repair="name the axis: squeeze(-1), squeeze(1); or flatten(1), which keeps rows",
        change=("seen",),
        explains=("data_order:last_batch_raises",),
        source="https://github.com/layumi/Person_reID_baseline_pytorch/issues/77",
    ),
    "leftover_batch": Cause(
        proof="the loader's own last batch ends the loop or makes its weights NaN, and full ones do not",
        repair="drop_last=True in the training loader; or have the loop skip or join batches that are too small",
        change=(
            "loader",
            "seen",
        ),
        explains=("data_order:last_batch_raises",),
        source="https://github.com/openvinotoolkit/nncf/pull/379",
    ),
    "nan_when_all_ignored": Cause(
        proof="a row in which nothing counts makes every weight NaN, and a row in which something does makes none",
        repair="sum the losses and divide by the count, at least 1 (reduction='sum', clamp(min=1)); or skip such a "
        "batch before backward()",
        change=("seen",),
        settle="the project's DataLoader as batches= says whether such a row comes alone: if it does, this is a fault",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3796",
    ),
    "nan_at_length_one": Cause(
        proof="a row of length one, cut to it, makes weights NaN, and a longer one cut so makes none",
        repair="leave rows of length one out of the data; take a standard deviation over time with unbiased=False, "
        "and add an eps",
        change=("seen",),
        settle="the project's DataLoader as batches= says whether such a row comes alone: if it does, this is a fault",
        source="https://github.com/facebookresearch/fairseq/issues/1863",
    ),
    "index_out_of_table": Cause(
        proof="the loop raises IndexError on a row that ends in the declared padding",
        change=(
            "module",
            "seen",
        ),
        source="https://github.com/lucidrains/audiolm-pytorch/issues/18",
    ),
}


@check(needs={"fit"}, causes=CAUSES, rank=50, steps=5)
def edge_batches(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges

    edges = evidence.shared(Edges.of)
    found: list[Finding] = []
    undecided: CannotDecide | None = None
    for findings in (_few_rows(edges), _content(edges)):
        try:
            found.extend(findings)
        except CannotDecide as reason:
            undecided = reason
    yield from found
    if not found and undecided is not None:
        raise undecided
    if found or edges.ending.leaves_none or edges.ending.leaves_one:
        return
    one = edges.one_row
    if one.raised_by_loop:
        raise CannotDecide(
            f"the loop refuses a batch of one row: {_failure(one)}; give the project's DataLoader as batches= to have "
            "its last batch judged",
            needs="batches=",
        )
    if not one.ok:
        raise CannotDecide(
            f"on a batch of one row {_failure(one)}, and nothing says whether one comes: give the project's DataLoader "
            "as batches= to have its last batch judged",
            needs="batches=",
        )


def _few_rows(edges: Edges) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import proven

    if edges.ending.drops:
        return
    squeezed = proven(edges)
    if squeezed is not None:
        yield _row_axis_squeezed(edges, squeezed)
        return
    last = edges.leftover()
    if last is not None and not last.ok and not last.raised_by_loop:
        yield _leftover_batch(edges, last)


def _content(edges: Edges) -> Iterator[Finding]:
    """Rows in which nothing counts, short ones, and padding."""
    from pytest_trainloop.checks.batch.edge_batches.embedding_range import beyond_table
    from pytest_trainloop.checks.batch.edge_batches.length_one import shortest

    beyond = beyond_table(edges)
    if beyond is not None:
        yield _index_out_of_table(beyond)
    if edges.ending.drops:
        return
    empty = edges.nothing_counts()
    if empty is not None and (empty.nonfinite or (empty.nonfinite_loss and edges.may_be_empty)):
        yield _nan_when_all_ignored(edges, empty)
        return
    short = shortest(edges)
    if short is not None and short.outcome.nonfinite:
        yield _nan_at_length_one(short, "fault" if edges.ending.leaves_any else "advice")


def _failure(outcome: Outcome) -> str:
    if outcome.raised:
        return f"fit raises {outcome.raised}"
    return f"{some(outcome.nonfinite)} {be(outcome.nonfinite)} not finite after a step"


def _row_axis_squeezed(edges: Edges, row: SqueezedRow) -> Finding:
    """A fault where one row is a batch that must work: the loader ends with one; or nothing is known of a loader, and
    the gradient is wrong and nothing is raised (an exception is noticed the first time it comes)."""
    first = row.squeezes[0]
    names = tuple(dict.fromkeys(s.call for s in row.squeezes))
    at = f" at {row.raised_at}" if row.raised_at else ""
    change = "not finite" if row.ratio != row.ratio else f"{row.ratio:.4g} times as long, {direction(row.cosine)}"
    must_work = edges.ending.leaves_one or not (edges.ending.leaves_none or row.raised)
    return Finding(
        cause="row_axis_squeezed",
        level="fault" if must_work else "advice",
        summary=f"on a batch of one row {some(list(names))} removes the row axis too: "
        + (f"fit raises {row.raised}" if row.raised else "the gradient is another one, and nothing is raised"),
        measured=f"{_shape(first.shape)} becomes {_shape(first.output_shape)}"
        + (at if row.raised else f"; the row's gradient is {change}, against the one with the axis kept"),
        shown_by=(
            f"with the axis kept {'one row goes through' if row.raised else 'it is as among others'}, and the gradient "
            f"of two rows is the sum of those of each alone, with weights "
            f"[{', '.join(f'{w:.3g}' for w in row.weights)}], float64"
        ),
        culprits=names,
        where=str(first.place),
        smallest=str(edges.first),
        composition=edges.first.told(),
        repair="" if must_work else f"{CAUSES['row_axis_squeezed'].repair}; {_no_single_row(edges)}",
    )


def _no_single_row(edges: Edges) -> str:
    """What settles it where no batch of one row is known to come."""
    if edges.ending.leaves_none:
        return f"drop_last=True, since {edges.ending.rows} rows are left over today and one may be tomorrow"
    return "the project's DataLoader as batches= says whether one row comes: if it does, this is a fault"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _leftover_batch(edges: Edges, last: Outcome) -> Finding:
    end = edges.ending
    first = f"; the first operation that is not finite is {last.origin.op}()" if last.origin else ""
    return Finding(
        cause="leftover_batch",
        summary=f"the loader ends an epoch with a batch of {last.words}, on which {_failure(last)}",
        measured=f"{end.data} rows of data in batches of {end.batch_size}: {last.words} left over{first}",
        shown_by="that batch as the loader's dataset and collate_fn give it; full batches go through",
        culprits=("DataLoader",) + ((last.origin.op,) if last.origin else ()),
        where=last.where,
        smallest=last.words,
        composition=last.told,
    )


def _nan_when_all_ignored(edges: Edges, empty: Outcome) -> Finding:
    op = empty.origin.op if empty.origin else "step"
    harm = f"{len(empty.nonfinite)} weights NaN" if empty.nonfinite else "the loss NaN, and weights stay finite"
    return Finding(
        cause="nan_when_all_ignored",
        level="fault" if edges.may_be_empty and empty.nonfinite else "advice",
        summary=f"a batch in which nothing counts makes {harm}: {op}() divides by zero",
        measured=f"in {len(edges.nothing_counts_in)} of {edges.count} rows of the example batch nothing counts",
        shown_by="a row in which something counts, alone, leaves all weights finite",
        culprits=(op,),
        where=empty.where,
        smallest=empty.words,
        composition=empty.told,
    )


def _nan_at_length_one(short: ShortRow, level: Level) -> Finding:
    outcome = short.outcome
    op = outcome.origin.op if outcome.origin else "step"
    return Finding(
        cause="nan_at_length_one",
        level=level,
        summary=f"a row of length one makes {len(outcome.nonfinite)} weights NaN, by {op}()",
        measured=f"row {short.row} of the example batch has length one",
        shown_by="a longer row, cut to its own length, leaves all weights finite",
        culprits=(op,),
        where=outcome.where,
        smallest=outcome.words,
        composition=outcome.told,
    )


def _index_out_of_table(beyond: BeyondTable) -> Finding:
    table, pad = beyond.look_up, beyond.pad_id
    return Finding(
        cause="index_out_of_table",
        summary=f"the padding's id {pad} has no row in {table.module or 'the table'}, which has {table.rows}",
        measured=f"fit raises {beyond.outcome.raised}",
        shown_by=f"{beyond.outcome.words}: no row of the example batch does, so that it goes through",
        culprits=(table.module or "embedding",),
        where=str(table.place),
        smallest=beyond.outcome.words,
        repair=f"give the table {max(pad, table.rows) + 1} rows (resize_token_embeddings), or pad with an id it has",
    )
