"""What trains does not depend on how much padding stands in the batch.

What it does
    It takes the rows of the batch with the most padding, gives them to the loop once as they stand and once cut to
    their length, and compares what the first optimizer step consumes: before any clipping, in float64, without dropout,
    batch norm on its running statistics, from the same weights.

Why is this bad?
    The same sentence trains another way, and is answered another way, in a batch with a longer one. Attention spreads
    over nothing, a mean shrinks with the longest neighbour, the last state is that of the padding.

How it decides
    Padding is what the batch proves: runs at one side of the rows, told by a declared pad id, an embedding's
    padding_idx, a mask or lengths, where every tensor with rows and positions holds one and the same value. No value is
    made up: rows and positions are slices of the batch. In float64 both ways agree to rounding (1e3 eps). A loop
    in which only the first padded position counts, as the end of a text, agrees once that one is kept, and passes.
    A difference alone is no fault: many models mix neighbours or scale by length. It is one where closing a single way
    makes both gradients equal: padded keys left out of attention, pooling over real positions only, positions counted
    from the first real one; or where the gradient is exactly the share of real positions times the other.
    It is advice where the project may want it so: with batches of one fixed length, positions from the left edge, a
    constant divisor and zeros in a mean; with padding that only an embedding's padding_idx tells, or a mask beside
    features (it may be of observations); behind convolutions and for maxima, where pooling over padding is common; for
    statistics that go back to every position, as in a norm or a gate; for sums of losses, where a penalty on outputs
    may be meant; and for a recurrent net that is not packed and of which no state in or behind the padding is used: its
    backward direction, or the whole where padding comes first, merely begins in another state.

Faulty
    >>> class Reader(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
    ...
    ...     def forward(self, x):
    ...         ids, lengths = x
    ...         return self.head(self.embed(ids).mean(1))
    >>>
    >>> model = Reader()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    >>> ids, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 0, 0]]), torch.tensor([4, 2, 2])
    >>> batch = (ids, lengths), torch.tensor([0, 1, 2])

Fixed
    >>> class Reader(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
    ...
    ...     def forward(self, x):
    ...         ids, lengths = x
    ...         kept = (torch.arange(ids.shape[1]) < lengths[:, None]).unsqueeze(-1)
    ...         return self.head((self.embed(ids) * kept).sum(1) / lengths[:, None])
    >>>
    >>> model = Reader()
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    >>> ids, lengths = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 0, 0]]), torch.tensor([4, 2, 2])
    >>> batch = (ids, lengths), torch.tensor([0, 1, 2])

Known limits
    Models of one fixed length raise on cut rows and are skipped, as are loops that draw by the length of the batch.
    What attends by an einsum of its own, or steps through time cell by cell, gives advice only; so does what is inside
    an activation checkpoint that is not torch's own, or a compiled kernel.

References
    https://huggingface.co/docs/transformers/pad_truncation
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html (key_padding_mask)
    https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pack_padded_sequence.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.torch_names import EXTREMES, MAX_POOLS_1D, MEAN_POOLS_1D, RECURRENT
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import Met
    from pytest_trainloop.checks.batch.padding_invariance.runs import Compared, PaddingRuns
    from pytest_trainloop.finding import Level
    from pytest_trainloop.runs.evidence import Evidence

CONSEQUENCES = ("overfit_one_batch", "update_ratio")

CAUSES = {
    "padded_keys_attended": "with padded keys left out of attention both gradients are equal",
    "padding_pooled": "with pooling and reading ends over real positions only both gradients are equal",
    "positions_shifted": "with positions counted from the first real one both gradients are equal",
    "mean_over_padding": "the gradient is exactly the share of real positions times that without padding",
    "padded_targets": "without what comes from outputs in padded places it is, and with it is not",
    "padding_counts": "the gradient changes with padding, and no single way explains it",
}


@dataclass(frozen=True, slots=True)
class _Way:
    """A way by which padding comes in: what is closed to show it, and what is said of it."""

    cause: str
    closing: frozenset[str]
    summary: str
    shown_by: str
    repair: str


_ATTENTION = _Way(
    "padded_keys_attended",
    frozenset({"attention"}),
    "attention looks at padded positions",
    "with padded keys left out there both gradients are equal",
    "give attention the mask: key_padding_mask (true at padding), attn_mask, or attention_mask of Hugging Face models",
)
_POOLING = _Way(
    "padding_pooled",
    frozenset({"pooling"}),
    "padded positions are pooled with the real ones",
    "over real positions only both gradients are equal",
    "pool by the mask: (x * mask).sum(1) / mask.sum(1); pack sequences, or read each row at its own last position",
)
_POSITIONS = _Way(
    "positions_shifted",
    frozenset({"positions"}),
    "positions are counted from the left edge, where the padding is",
    "nothing comes in from the padding: counted from the first real one both gradients are equal",
    "position_ids = (mask.cumsum(1) - 1).clamp(min=0), or pad on the right",
)
_WAYS = (_ATTENTION, _POOLING, _POSITIONS)

_MAXIMA = EXTREMES | MAX_POOLS_1D
_MEANS = MEAN_POOLS_1D | {"mean", "nanmean", "embedding_bag"}


@check(needs={"fit"}, causes=CAUSES, rank=20)
def padding_invariance(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns

    all_made = evidence.shared(PaddingRuns.of)
    refused: list[CannotDecide] = []
    for made in all_made:
        try:
            found = made.first_difference()
        except CannotDecide as reason:
            refused.append(reason)
            continue
        if found is not None:
            made.require_comparable(found)
            yield from _explained(evidence, made, found)
            return
    if len(refused) == len(all_made):
        raise refused[0]


def _explained(evidence: Evidence, made: PaddingRuns, found: Compared) -> Iterator[Finding]:
    """One finding: the first cause that an observation proves."""
    inverted = made.seen(found).inverted
    if inverted is not None:
        yield _inverted(made, found, inverted)
        return
    if not found.agreement.difference < float("inf"):
        raise CannotDecide("the gradient is not finite, with the padding or without (see finite)")
    if found.factor:
        yield _mean(made, found)
        return
    for way in _WAYS:
        if made.closes(found, way.closing) is not None:
            yield _of_way(made, found, way, way.closing)
            return
    for first, second in ((_ATTENTION, _POSITIONS), (_ATTENTION, _POOLING), (_POOLING, _POSITIONS)):
        both = first.closing | second.closing
        if made.closes(found, both) is not None:
            yield _of_way(made, found, first, both)
            return
    yield _targets(evidence, made, found) or _counts(made, found)


def _of_way(made: PaddingRuns, found: Compared, way: _Way, closing: frozenset[str]) -> Finding:
    calls = [m for m in made.seen(found, closing).closed if m.way in way.closing]
    if not calls:
        return _counts(made, found)
    if way is _POOLING and (only := _recurrent_only(made, found, calls)):
        return _counts(made, found, calls[0], only)
    others = closing - way.closing
    beside = f", and {_OTHERS[next(iter(others))]}" if others else ""
    reason = _excuse(made, found, way, calls, closing)
    shown = way.shown_by if not others else "with both set right both gradients are equal, and with either alone not"
    return _finding(
        made,
        found,
        way.cause,
        f"{way.summary}{beside}: {_by(found)}",
        shown=f"{shown}{f' ({reason})' if reason else ''}",
        culprit=calls[0].op,
        where=str(calls[0].place),
        repair=way.repair,
        level="advice" if reason else "fault",
        holds=lambda smaller: made.closes(smaller, closing) is not None,
    )


def _recurrent_only(made: PaddingRuns, found: Compared, calls: list[Met]) -> str:
    """Why a recurrent net that runs over padding may be meant; nothing where what is behind the padding is used."""
    if not {m.op for m in calls} & RECURRENT:
        return ""
    if made.left:
        return "it comes first, and changes the state that the row begins with"
    return "" if made.seen(found).behind else "only the backward direction begins in it, and nothing behind it is used"


_OTHERS = {
    "positions": "positions are counted from the left edge, where the padding is",
    "pooling": "padded positions are pooled with the real ones",
}


def _excuse(made: PaddingRuns, found: Compared, way: _Way, calls: list[Met], closing: frozenset[str]) -> str:
    """Why the project may want it so; nothing where it cannot."""
    seen, ops = made.seen(found), {m.op for m in calls}
    if way is _POSITIONS:
        return "" if made.varying else "all batches are of one length, so that positions may be counted from the end"
    if not made.sure:
        return f"that {made.reason} may mean something other than padding: pass padding=Padding(...) to have it judged"
    if seen.target and made.by_lengths:
        return "the lengths are what is to be learned"
    if way is _ATTENTION:
        return ""
    if made.seen(found, closing).spread:
        return "what is pooled goes back to every position, as in a norm or a gate"
    if any("conv" in m.op for m in seen.met):
        return "pooling over padding behind convolutions is common"
    if ops <= _MAXIMA:
        return "a maximum over padding is common"
    if ops <= _MEANS and all(m.zeros for m in calls) and not made.varying:
        return "zeros are pooled in, and all batches are of one length: a constant factor"
    return ""


def _inverted(made: PaddingRuns, found: Compared, met: Met) -> Finding:
    return _finding(
        made,
        found,
        "padded_keys_attended",
        f"the attention mask is inverted: real positions look at padded ones only: {_by(found)}",
        shown="the weights of all real keys are exactly zero, and those of padded ones are not",
        culprit=met.op,
        where=str(met.place),
        repair="turn the mask around: key_padding_mask is true at padding, attn_mask of scaled_dot_product_attention "
        "true where something is looked at",
        level="fault" if made.sure else "advice",
        holds=lambda smaller: made.seen(smaller).inverted is not None,
    )


def _mean(made: PaddingRuns, found: Compared) -> Finding:
    total, real = found.part.span.total, found.less.span.total
    return _finding(
        made,
        found,
        "mean_over_padding",
        f"the loss of {real} real positions is divided by all {total}: {_by(found)}",
        shown="both gradients are parallel, and the factor is exactly the share of real positions"
        + ("" if made.varying else " (all batches are of one length: a constant factor, which may be meant)"),
        culprit="loss.backward()",
        where=made.backward(found),
        repair="divide by the number of real positions: (loss * mask).sum() / mask.sum()",
        level="fault" if made.varying else "advice",
        holds=lambda smaller: bool(smaller.factor),
    )


def _targets(evidence: Evidence, made: PaddingRuns, found: Compared) -> Finding | None:
    """Padded positions that count in the loss like real ones."""
    ways = frozenset({"outputs"})
    cut = made.cut(found, ways) if found.part.padded > 1 else None
    if cut is None:
        return None
    members = cut.factor > 0 and made.sure
    return _finding(
        made,
        found,
        "padded_targets",
        f"outputs in padded positions count in the loss: {_by(found)}",
        shown="without what comes from them the gradient is that of the real positions alone"
        + (
            ", divided by all positions"
            if cut.factor
            else ": a penalty on outputs, or a first token told by the padding before it, may be meant"
        ),
        culprit="loss.backward()",
        where=made.backward(found),
        repair="take padded positions out before the mean: ignore_index, or (loss * mask).sum() / mask.sum()",
        level="fault" if members or evidence.root_causes("padding_invariance") else "advice",
        holds=lambda smaller: made.cut(smaller, ways) is not None,
    )


def _counts(made: PaddingRuns, found: Compared, through: Met | None = None, reason: str = "") -> Finding:
    if found.part.padded < 2:
        raise CannotDecide(
            "the gradient changes with the one padded position of a row, which may be the end of a text: give a batch "
            "with rows that are shorter by two or more"
        )
    first = through or next(iter((*made.seen(found).met, *made.touched(found))), None)
    return _finding(
        made,
        found,
        "padding_counts",
        f"the loss changes with padding{f', first through {first.op}' if first else ''}: {_by(found)}",
        shown=f"over real positions only both gradients are equal: {reason}"
        if reason
        else "not determined; ruled out as single causes: padded keys, pooling, shifted positions, a factor",
        culprit=first.op if first else "loss.backward()",
        where=str(first.place) if first else made.backward(found),
        repair="mask padded positions before positions are mixed; skip the check where this is meant",
        level="advice",
        holds=lambda _smaller: True,
    )


def _by(found: Compared) -> str:
    total, less = found.part.span.total, found.less.span.total
    return (
        f"the gradient of the same rows, {total} positions long and {less}, differs by {found.agreement.difference:.2g}"
    )


def _finding(
    made: PaddingRuns,
    found: Compared,
    cause: str,
    summary: str,
    *,
    shown: str,
    culprit: str,
    where: str,
    repair: str,
    level: Level,
    holds: Callable[[Compared], bool],
) -> Finding:
    smallest = made.smallest(found, holds) or found
    rows, total, real = len(smallest.part.rows), smallest.part.span.total, smallest.part.last - smallest.part.first
    return Finding(
        cause=cause,
        level=level,
        summary=summary,
        measured=(
            f"|g| with padding / without = {found.agreement.ratio:.4g}, cosine {found.agreement.cosine:.4g}, loss "
            f"{found.losses[0]:.5g} and {found.losses[1]:.5g}, all {found.parameters} parameters, {found.precision}"
        ),
        shown_by=f"{shown}; these positions are padding: {made.reason}",
        culprits=(culprit,),
        where=where,
        smallest=f"{rows} row{'s' if rows > 1 else ''} of {total} positions, {real} of them real",
        repair=repair,
        explains=CONSEQUENCES if level == "fault" else (),
    )
