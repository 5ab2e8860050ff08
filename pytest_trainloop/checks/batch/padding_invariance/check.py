"""Training does not depend on how much padding stands in the batch.

What it does
    It takes the rows of the batch with the most padding, gives them to the loop once as they are and once cut to their
    length, and compares the gradients that the first optimizer step reads: before any clipping, in float64, without
    dropout, batch norm on its running statistics, from the same weights.

Why is this bad?
    The same sentence gives another gradient, and another answer, in a batch with a longer one. Attention spreads over
    nothing, a mean shrinks with the longest neighbour, the last state is that of the padding.

How it decides
    Padding is what the batch proves: positions at one side of the rows, given by a declared pad id, an embedding's
    padding_idx, a mask or lengths (also a list of them, and where time comes first), where every tensor with rows
    and positions holds one and the same value. Of several sequences in one batch (chosen and rejected, source and
    target) each is cut alone: a tensor belongs to what says where padding stands if it holds one value there, and
    several before; ``Padding(of=)``, or a list of paddings, declares it. A loop that takes sequences of one width
    only gets all of them cut together. No value is made up: rows and positions are slices of the batch. In float64
    both gradients agree to rounding (1e3 eps). A loop in which only the first padded position counts, as the end of
    a text, agrees once that one is kept, and passes. A difference below the rounding of float32 is judged only
    where attention or pooling explains it: a table of angles that numpy made moves positions by as much. With
    ``padding=`` declared any other difference is a fault, explained or not. Batch norms are then compared once more
    with the statistics of the batch. Two things stay advice: positions from the left edge where several batches are
    given, all of one length, and the table of positions ends there (the last position is then always the same one);
    and an unexplained difference in a loop that draws random numbers, which may choose what is trained on by the
    length.  Undeclared, a difference alone is no fault: many models mix neighbours or scale by length. It is one
    where blocking a single path makes both gradients equal: padded keys left out of attention, pooling over real
    positions only, positions counted from the first real one; or where the gradient is exactly the share of real
    positions times the other, or a mean of losses by position, zero at padded ones, makes both equal once it is taken
    over real ones. So it is where outputs beyond the first padded position have a gradient, which is
    exactly zero in right losses, from a call that takes them beside values of the batch (a loss, a difference, an
    index): there they are trained towards padding, in whichever term. So it is where another id fills the rows than
    the one that the model takes for padding (``padding_idx``, ``config.pad_token_id``): with that one there both
    gradients are equal. Where sequences can be cut together only, other values of the same row are put into padding:
    if they change the gradient exactly where the mask of the other sequence is real, that mask is the one that is
    read. It is advice where the project may want it so: with batches of one fixed length, positions from the left
    edge, a constant divisor and zeros in a mean; with padding that only an embedding's padding_idx shows (and no
    ``config.pad_token_id`` of the model, as in transformers), or a mask next to features (it may be of observations);
    behind convolutions and for maxima, where pooling over padding is common; for statistics that go back to every
    position, as in a norm or a gate; for sums of losses, where a penalty on outputs may be meant; and for a recurrent
    net that is not packed and of which no state in or behind the padding is used: its backward direction, or the whole
    net where padding comes first, only begins in another state. A declared ``pad_id`` speaks for the tensors whose ids
    it pads, and not for others that are padded beside them.

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
    length of the batch. Attention by an einsum, and recurrent cells stepped one by one, are named as padding_counts
    only; so is what is inside an activation checkpoint that is not torch's own, or a compiled kernel.

References
    https://huggingface.co/docs/transformers/pad_truncation
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html (key_padding_mask)
    https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.rnn.pack_padded_sequence.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.padding_invariance.causes import CAUSES
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.registry import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence


@check(needs={"fit"}, causes=CAUSES, rank=20)
def padding_invariance(evidence: Evidence) -> Iterator[Finding]:
    from pytest_trainloop.checks.batch.padding_invariance.crossed import mask_of_another
    from pytest_trainloop.checks.batch.padding_invariance.findings import explained, under_another_mask
    from pytest_trainloop.checks.batch.padding_invariance.grouped import padding_runs

    todo = list(evidence.shared(padding_runs))
    refused: list[CannotDecide] = []
    decided = False
    for made in todo:
        try:
            found = made.first_difference()
        except CannotDecide as reason:
            refused.append(reason)
            if made.instead is not None and made.instead not in todo:
                todo.append(made.instead)
            continue
        decided = True
        if found is not None:
            made.require_comparable(found)
            yield explained(evidence, made, found)
            return
    for made in todo:
        if made.instead is not None and made.instead in todo and (other := mask_of_another(made)) is not None:
            yield under_another_mask(made, other)
            return
    if not decided:
        raise refused[0]
