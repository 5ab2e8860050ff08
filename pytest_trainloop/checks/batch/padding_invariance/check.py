"""Training does not depend on how much padding is in the batch.

What it does
    It runs the first step twice on the rows with the most padding: as they are, and cut to their length. It compares
    the gradients that the optimizer reads, before any clipping: in float64, from the same weights, without dropout,
    with the running statistics of batch norms.

Why is this bad?
    The same sentence gives another gradient, and another answer, in a batch with a longer one. Attention spreads over
    nothing, a mean shrinks with the longest neighbour, the last state is that of the padding.

How it decides
    1. It finds padding: positions at one side of the rows that a declared pad id, ``padding_idx``, a mask or lengths
       give. Every tensor with rows and positions must hold one single value there. Each sequence of a batch is cut
       alone; those that the loop takes at one width only are cut together. ``Padding(of=)`` declares which tensor
       belongs to which mask.
    2. It compares the gradients with and without padding. It passes if they agree to 1e3 eps of float64
       (docs/how-it-decides.md#bounds-on-rounding), also if only once the first padded position is kept, which may end a
       text. A difference below the rounding of float32 is judged only where attention or pooling explains it.
    3. It finds the cause. It repeats the step on the padded rows, each time with the results of one kind of call from
       the cut rows. It reports the first line of the table that holds.
    4. With ``padding=`` declared a finding is a fault, with two exceptions. Positions stay advice where all batches
       have one length and the table of positions ends there. An unexplained difference stays advice where the loop
       draws random numbers.
    5. Undeclared, the last column says what is advice. "Weakly known": all batches have one length, and only
       ``padding_idx`` (without ``config.pad_token_id``) or a mask next to features marks the padding.
    6. It skips gradients that are not finite, and an unexplained difference by a single padded position.
    7. Where sequences are cut together: other values in padding that count exactly where another sequence's mask is
       real prove ``mask_of_another``.

    | the gradients are equal with this, or it is seen | cause | undeclared, advice if |
    |---|---|---|
    | declared: running statistics of batch norms | ``padding_counts`` |  |
    | zeros in the row of ``padding_idx``, drawn as the others were | ``pad_row_drawn`` |  |
    | a mask of the batch inverted, which is 1 at the padding id | ``padding_pooled`` |  |
    | a factor, the share of real positions; or last, one term's mean over these | ``mean_over_padding`` | one length |
    | the id that the model takes for padding | ``other_pad_id`` | weakly known |
    | attention without padded keys; real keys weigh 0 | ``padded_keys_attended`` | weakly known; lengths as targets |
    | pooling over real positions only | ``padding_pooled`` | also: see Known limits |
    | positions counted from the first real one | ``positions_shifted`` | one length |
    | seen: outputs past the first padded one meet a target | ``padded_targets`` | weakly known |
    | two of attention, pooling, positions together | the first of the two | its row says |
    | no padded outputs (equal, or the share as a factor) | ``padded_targets`` | equal; weakly known |
    | none of these | ``padding_counts`` | always |

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
    Pooling is also advice behind convolutions, for maxima, where it goes back to every position (a norm, a gate), and
    for zeros in a mean at one length. A recurrent net whose padded states no later operation reads is advice,
    ``padding_counts``.

    Models of one fixed length raise on cut rows and are skipped, as are loops whose random numbers depend on the length
    of the batch. Recurrent cells stepped one by one are named as padding_counts only. So are activation checkpoints
    that are not torch's own, compiled kernels, and what comes after the first GiB of calls.

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
    yield from rules.row_of_padding_drawn(case)
    yield from rules.mask_inverted(case)
    yield from rules.mask_of_batch_inverted(case)
    yield from rules.share_of_real_positions(case)
    yield from rules.other_pad_id(case)
    yield from rules.one_path(case)
    yield from rules.targets_met(case)
    yield from rules.mean_of_one_term(case)
    yield from rules.two_paths(case)
    yield from rules.outputs_count(case)
    yield from rules.padding_counts(case, case.first_call())
