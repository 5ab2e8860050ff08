"""Training does not depend on how much padding is in the batch.

What it does
    It runs the first training step twice on the rows with the most padding: with the padding, and without it. It
    compares the gradients before clipping. Both runs use float64, the same weights, no dropout, and the running
    statistics of batch norms.

Why is this bad?
    A sentence gets a different gradient and a different prediction when the batch holds a longer sentence. Attention
    gives weight to padding. Mean pooling divides by the padded length. An RNN's last state comes from padding.

How it decides
    1. Padding is a run of positions at one end of a row. A declared pad id, ``padding_idx``, a mask or lengths mark
       it. Every tensor with row and position axes must be constant there, else it is not taken for padding.
    2. If a batch has several sequences (source, target), each is trimmed separately. If the loop needs equal widths,
       they are trimmed together. ``Padding(of=)`` declares which tensor belongs to which mask.
    3. It passes if the gradients agree within 1e3 eps of float64 (docs/how-it-decides.md#bounds-on-rounding). It also
       passes if they agree when each row keeps its first padded position, which may be an end token.
    4. A difference below float32 rounding is reported only if attention or pooling explains it.
    5. To find the cause, it repeats the padded step. Each repeat takes the results of one kind of call from the trimmed
       run. It reports the first table row that matches. If only two of attention, pooling and positions match
       together, it names the first.
    6. If the test declares ``padding=``, every finding is a fault, with two exceptions. ``positions_shifted`` stays
       advice if all batches have one length and the position table has just that length. ``padding_counts`` stays
       advice if the loop draws random numbers.
    7. If ``padding=`` is missing, the last column says when a finding is only advice. "One length": no two batches of
       different lengths are given. "Weakly known": one length, and only ``padding_idx`` (without
       ``config.pad_token_id``) or a mask over features marks the padding.

    | the gradients agree once (or: the check sees) | cause | without ``padding=``, advice if |
    |---|---|---|
    | batch norms use running statistics; compared only with ``padding=`` | ``padding_counts`` |  |
    | the row of ``padding_idx``, overwritten by the initialisation, is zero | ``pad_row_drawn`` |  |
    | a mask of the batch that is 1 at padding is inverted | ``padding_pooled`` |  |
    | the share of real positions scales one of them, or one term averages these only | ``mean_over_padding`` | one
      length |
    | rows are filled with the model's own padding id | ``other_pad_id`` | weakly known |
    | attention ignores padded keys (or: real keys have weight 0) | ``padded_keys_attended`` | weakly known, or
      lengths are the targets |
    | pooling and last states read real positions only | ``padding_pooled`` | see Known limits |
    | positions count from the first real one | ``positions_shifted`` | one length; not if one batch is given and the
      table is longer |
    | (or: the loss compares outputs past the first padded one with targets) | ``padded_targets`` | weakly known |
    | padded outputs do not count in the loss | ``padded_targets`` | weakly known, or not divided by all positions |
    | (or: they agree if trimmed together, and padding counts just where another sequence's mask is real) |
      ``mask_of_another`` | weakly known, or features |
    | none of these | ``padding_counts`` | always |

When it is skipped
    - No padding is known in the batch, the usual reason. Give rows of unequal lengths, and declare
      ``padding=Padding(pad_id=...)``. Without ids, masks or labels by position the check does not apply.
    - ``fit`` makes its own data: give a ``batch``.
    - The model needs one fixed length, so it raises on trimmed rows.
    - A gradient is not finite, or all are zero.
    - One padded position makes a difference that nothing explains. Give rows that are shorter by two or more.
    - The difference is below float32 rounding, as a table or a constant in float32 makes it.
    - The loop draws random numbers by the length of the batch, or from python's or numpy's generators.

Faulty
    >>> class Reader(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
    ...
    ...     def forward(self, x):
    ...         ids, lengths = x
    ...         return self.head(self.embed(ids).mean(1))  # the mean counts padding
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
    Without ``padding=``, pooling is advice if one of these holds:

    - Padding is weakly known, or lengths are the targets.
    - The model has convolutions before the pooling, or takes a maximum.
    - The pooled value goes back to every position, as in a norm or a gate.
    - Zeros enter a mean, and batches have one length.

    An RNN that runs over padding is ``padding_counts``, not ``padding_pooled``, if no later operation reads what
    padding changed: padding comes first, or only the backward direction begins in it. Recurrent cells that are stepped
    one by one are ``padding_counts`` only. The same holds for activation checkpoints that are not torch's own, for
    compiled kernels, and after the first GiB of recorded call results. If a kernel takes no float64, both runs use
    float32.

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
