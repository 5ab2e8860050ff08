"""Training does not depend on how much padding is in the batch.

What it does
    It runs the first step twice on the rows with the most padding: as they are, and cut to their length. It compares
    the gradients that the optimizer reads, before any clipping: in float64, from the same weights, without dropout,
    with the running statistics of batch norms.

Why is this bad?
    The same sentence gives another gradient, and another answer, in a batch with a longer one. Attention spreads over
    nothing, a mean shrinks with the longest neighbour, the last state is that of the padding.

How it decides
    Padding is what the batch proves: positions at one side of the rows, given by a declared pad id, an embedding's
    padding_idx, a mask or lengths (also a list of them, and where time comes first). Every tensor with rows and
    positions must hold one single value there. Of several sequences in one batch (chosen and rejected, source and
    target) each is cut alone. A tensor belongs to the mask or lengths at whose padding it holds one value, and several
    before; ``Padding(of=)``, or a list of paddings, declares it. A loop that takes only sequences of one width, or of
    widths that differ by a position or two, gets all of them cut together. No value is made up: rows and positions are
    slices of the batch.

    It passes where both gradients agree to rounding (1e3 eps). If only the first padded position counts, it may be the
    end of a text: the gradients agree once that one is kept. A difference below the rounding of float32 is judged only
    where attention or pooling explains it: a table of angles that numpy made moves positions by as much. Where
    ``padding=`` is declared, batch norms are compared once more with the statistics of the batch.

    The step on cut rows is a tape of calls. In the step on whole rows each call is compared with the tape, on the real
    positions. Where they differ, the call is made again on these positions alone. If that gives the tape's result,
    padding comes in there. The step is then repeated with the results of one kind of call replaced; the first kind that
    makes both gradients agree is the cause. The kinds are attention, pooling and reading at the ends, tables of
    positions, and means of losses that are zero at padded positions.

    With ``padding=`` declared any difference is a fault, explained or not. Undeclared, a difference alone is no fault:
    many models mix neighbours or scale by length. It is one where a kind of call explains it, or where the gradient is
    exactly the share of real positions times the other. It is one where outputs beyond the first padded position get a
    gradient from a call that also takes values of the batch (a loss, a difference, an index): there they are trained
    towards padding, in whichever term. It is one where such outputs enter another term, and the loss is divided by all
    positions. It is one where another id fills the rows than the one that the model takes for padding (``padding_idx``,
    ``config.pad_token_id``). Where sequences can be cut together only, other values of the same row are put into
    padding: if they change the gradient exactly where the mask of the other sequence is real, that mask is the one that
    is read.

    It is advice where the project may want it so. With batches of one fixed length these are positions from the left
    edge, a constant divisor, zeros in a mean. So is padding that only an embedding's padding_idx shows (and no
    ``config.pad_token_id`` of the model, as in transformers), or a mask next to features, which may be of observations.
    So are pooling behind convolutions, maxima, and statistics that go back to every position, as in a norm or a gate;
    terms without a target, as a penalty on outputs, that are not divided by all positions; and a recurrent net that is
    not packed, if no state in or behind the padding is used: its backward direction, or the whole net where padding
    comes first, only begins in another state. Two things stay advice where padding is declared. One is positions from
    the left edge where several batches are given, all of one length, and the table of positions ends there. The other
    is an unexplained difference in a loop that draws random numbers, which may choose what is trained on by the length.
    A declared ``pad_id`` is about the tensors whose ids it pads, and not about others with padding of their own.

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
    Models of one fixed length raise on cut rows and are skipped, as are loops whose random numbers depend on the
    length of the batch. Recurrent cells stepped one by one are named as padding_counts only; so is what is inside an
    activation checkpoint that is not torch's own, or a compiled kernel, and what comes after the first GiB of calls.

References
    https://huggingface.co/docs/transformers/pad_truncation
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html (key_padding_mask)
    https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pack_padded_sequence.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.padding_invariance.causes import CAUSES
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.batch.padding_invariance.rules import Case
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=20)
def padding_invariance(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.padding_invariance.compared import comparisons
    from pytest_trainloop.checks.batch.padding_invariance.rules import Case, under_another_mask

    todo = list(evidence.shared(comparisons))
    refused: list[CannotDecide] = []
    decided = False
    for made in todo:
        try:
            difference = made.first_difference()
        except CannotDecide as reason:
            refused.append(reason)
            if made.instead is not None and made.instead not in todo:
                todo.append(made.instead)
            continue
        decided = True
        if difference is not None and made.full is not None:
            made.require_comparable(made.full)
            yield next(_causes(Case(made, made.full, difference)))
            return
    for made in todo:
        if made.instead in todo and (crossed := next(under_another_mask(made), None)):
            yield crossed
            return
    if not decided:
        raise refused[0]


def _causes(case: Case) -> Iterator[Finding]:
    """The causes that an observation proves; the first one is reported."""
    from pytest_trainloop.checks.batch.padding_invariance import rules

    yield from rules.batch_statistics(case)
    yield from rules.mask_inverted(case)
    yield from rules.share_of_real_positions(case)
    yield from rules.other_pad_id(case)
    yield from rules.one_path(case)
    yield from rules.targets_met(case)
    yield from rules.mean_of_one_term(case)
    yield from rules.two_paths(case)
    yield from rules.outputs_count(case)
    yield from rules.padding_counts(case, case.first_call())
