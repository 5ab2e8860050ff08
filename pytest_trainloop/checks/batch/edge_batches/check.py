"""One row, a row without labels, the loader's last batch: the loop takes what an epoch ends with.

What it does
    It runs the loop over batches that an unlucky epoch brings, two steps each, composed of the example batch: one of
    its rows alone; the last batch of the project's ``DataLoader``, where that is smaller; a row in which nothing counts
    (all labels ignored, a mask that is zero); a row of length one, cut to its length; a row that ends in the declared
    padding. Values are never made up, and a batch that the project's own rows do not give is not composed.

Why is this bad?
    The batch comes once in an epoch, hours after the start. ``squeeze()`` takes the row axis out with it, and what was
    (1, classes) is broadcast or breaks far from there. The mean over no labels is NaN, and one step with it makes
    every weight NaN.

How it decides
    Many right loops raise on one row or make NaN of it (batch norm, contrastive losses, a standard deviation over rows)
    since their loaders never give one. So that alone is no fault. It is one where the project's own ``DataLoader`` ends
    an epoch with such a batch, and the loop raises or loses its weights there; or where an observation shows that one
    row was meant to work: the loop is run on one row again with ``squeeze`` taking out only what it takes out of a full
    batch. If it then goes through, and in float64 the gradient of two rows is the sum of those of each alone, or a mean
    of them (see accumulation_equivalence), the row axis was lost by that call. A loader with ``drop_last`` has no such
    batch, nor has a quasi-Newton method, which is given all data; one whose last batch is larger gets advice. So does
    a loop that raises on one row, where no loader is given: whether one comes is not known, and it would be noticed.
    A row in which nothing counts must exist in the example batch. Weights lost to it are a fault if such a row can be a
    batch: the loader leaves any one row, or a quarter of the rows are so and ``accumulate`` splits them; else advice.
    Length one is looked at where such a row is there and the project's batches differ in width, as they do where each
    is padded to its longest row; it is a fault if the loader leaves any one row, else advice.
    A padding id beyond the table is a fault if the loop raises ``IndexError`` on it. An open way out (a batch that is
    left out, an ``assert``, an exception of the loop's own) is right.

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
    longer than the example are not composed, as nothing says how large they may be.

References
    https://docs.pytorch.org/docs/stable/generated/torch.squeeze.html
    https://docs.pytorch.org/docs/stable/data.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.registry import check
from pytest_trainloop.wording import be, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.edge_batches.embedding_range import Beyond
    from pytest_trainloop.checks.batch.edge_batches.length_one import Short
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
    from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import Lost
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence

CAUSES = {
    "row_axis_squeezed": "with squeeze taking out only what it takes out of a full batch, one row goes through, and "
    "its gradient is what it is among other rows",
    "leftover_batch": "the loader's own last batch ends the loop or makes its weights NaN, and full ones do not",
    "nan_when_all_ignored": "a row in which nothing counts makes every weight NaN, and a row in which something does "
    "makes none",
    "nan_at_length_one": "a row of length one, cut to it, makes weights NaN, and a longer one cut so makes none",
    "index_out_of_table": "the loop raises IndexError on a row that ends in the padding which is declared",
}


@check(needs={"fit"}, causes=CAUSES, rank=50)
def edge_batches(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.edge_batches.runs import Edges

    edges = evidence.shared(Edges.of)
    found: list[Finding] = []
    undecided: CannotDecide | None = None
    for findings in (_rows(edges), _content(edges)):
        try:
            found.extend(findings)
        except CannotDecide as reason:
            undecided = reason
    yield from found
    if not found and undecided is not None:
        raise undecided
    if not found and not edges.ending.leaves_none and not edges.ending.leaves_one:
        _require_told(edges.one_row())


def _rows(edges: Edges) -> Iterator[Finding]:
    """What becomes of few rows."""
    if edges.ending.drops:
        return
    lost = edges.row_lost()
    if lost is not None:
        yield _squeezed(edges, lost)
        return
    last = edges.leftover()
    if last is not None and not last.fine and not last.by_hand:
        yield _leftover(edges, last)


def _content(edges: Edges) -> Iterator[Finding]:
    """What becomes of rows in which nothing counts, of short ones, and of padding."""
    beyond = edges.padded()
    if beyond is not None:
        yield _beyond(beyond)
    if edges.ending.drops:
        return
    empty = edges.nothing_counts()
    if empty is not None and (empty.lost or (empty.nan and edges.may_be_empty)):
        yield _uncounted(edges, empty, "fault" if edges.may_be_empty and empty.lost else "advice")
        return
    short = edges.short()
    if short is not None and short.outcome.lost:
        yield _short(short, "fault" if edges.ending.leaves_any else "advice")


def _require_told(one: Outcome) -> None:
    """Say of one row that does not go through that nothing is known of it."""
    if one.fine or one.by_hand:
        return
    what = f"fit raised {one.raised}" if one.raised else f"{some(one.lost)} {be(one.lost)} not finite after a step"
    raise CannotDecide(
        f"on a batch of one row {what}, and nothing says whether one comes: give the project's DataLoader as batches= "
        "to have its last batch judged"
    )


def _squeezed(edges: Edges, lost: Lost) -> Finding:
    first = lost.squeezes[0]
    calls = some(list(dict.fromkeys(s.call for s in lost.squeezes)))
    harm = f"fit raises {lost.raised}" if lost.raised else "the gradient is another one, and nothing is raised"
    at = f" at {lost.raised_at}" if lost.raised_at else ""
    known = "not finite" if lost.ratio != lost.ratio else f"{lost.ratio:.4g} times as long, cosine {lost.cosine:.3f}"
    weights = ", ".join(f"{w:.3g}" for w in lost.weights)
    return Finding(
        cause="row_axis_squeezed",
        level="fault" if _may_come(edges, lost) else "advice",
        summary=f"on a batch of one row {calls} takes the row axis out too: {harm}",
        measured=f"{_shape(first.shape)} becomes {_shape(first.left)}"
        + (at if lost.raised else f"; the row's gradient is {known}, against the one with the axis left in"),
        shown_by=(
            f"with the axis left in {'one row goes through' if lost.raised else 'it is as among others'}, and the "
            f"gradient of two rows is that of each alone, weighed [{weights}] and added, float64"
        ),
        culprits=tuple(dict.fromkeys(s.call for s in lost.squeezes)),
        where=str(first.place),
        smallest="1 row",
        repair="name the axis: squeeze(-1), squeeze(1); or flatten(1), which keeps rows",
    )


def _may_come(edges: Edges, lost: Lost) -> bool:
    """Whether one row is a batch that the loop must take: the loader ends with one; or, where nothing is known of a
    loader, the gradient is wrong and nothing is raised (what is raised is noticed the first time it comes)."""
    ending = edges.ending
    return ending.leaves_one or not (ending.leaves_none or lost.raised)


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _leftover(edges: Edges, last: Outcome) -> Finding:
    end = edges.ending
    what = f"fit raises {last.raised}" if last.raised else f"{some(last.lost)} {be(last.lost)} not finite after a step"
    made = f"; the first operation that is not finite is {last.origin.op}()" if last.origin else ""
    return Finding(
        cause="leftover_batch",
        summary=f"the loader ends an epoch with a batch of {last.words}, on which {what}",
        measured=f"{end.data} rows of data in batches of {end.of}: {last.words} left over{made}",
        shown_by="that batch as the loader's dataset and collate_fn give it; full batches go through",
        culprits=("DataLoader",) + ((last.origin.op,) if last.origin else ()),
        where=last.where,
        smallest=last.words,
        repair="drop_last=True in the training loader; or have the loop leave out or join what is too small",
    )


def _uncounted(edges: Edges, empty: Outcome, level: Level) -> Finding:
    op = empty.origin.op if empty.origin else "step"
    made = f"{len(empty.lost)} weights NaN" if empty.lost else "the loss NaN, and weights stay finite"
    return Finding(
        cause="nan_when_all_ignored",
        level=level,
        summary=f"a batch in which nothing counts makes {made}: {op}() divides by none",
        measured=f"{len(edges.without)} of {edges.count} rows of the example batch have nothing that counts",
        shown_by="a row in which something counts, alone, leaves all weights finite",
        culprits=(op,),
        where=empty.where,
        smallest=empty.words,
        repair="sum the losses and divide by the count, at least 1 (reduction='sum', clamp(min=1)); or leave such a "
        "batch out before backward()",
    )


def _short(short: Short, level: Level) -> Finding:
    outcome = short.outcome
    op = outcome.origin.op if outcome.origin else "step"
    return Finding(
        cause="nan_at_length_one",
        level=level,
        summary=f"a row of length one makes {len(outcome.lost)} weights NaN, by {op}()",
        measured=f"row {short.row} of the example batch has length one",
        shown_by="a longer row, cut to its own length, leaves all weights finite",
        culprits=(op,),
        where=outcome.where,
        smallest=outcome.words,
        repair="leave rows of length one out of the data, or a batch in which nothing is left to predict",
    )


def _beyond(beyond: Beyond) -> Finding:
    table, pad = beyond.table, beyond.pad_id
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
