"""Hypothesis strategies for property tests of your own.

Of a loss, from its contract:

>>> from hypothesis import given
>>> from pytest_trainloop import LossContract, strategies
>>> focal = LossContract(criterion=FocalLoss(), expects="logits", num_classes=3)
>>> @given(strategies.calls(focal))
... def test_focal_is_never_negative(call):
...     assert focal.criterion(*call) >= 0

Of a batch that your data loader gives:

>>> @given(strategies.row_selections(batch))
... def test_a_row_does_not_see_the_others(rows):
...     assert torch.allclose(model(rows.batch["ids"]), model(batch["ids"])[list(rows.indices)])

``row_selections`` chooses rows of a batch, ``paddings`` pads it in other ways, ``splits`` cuts rows into micro-batches,
``token_batches`` and ``sequences`` make batches for language and sequence models.

Structure is drawn (which rows, how long, what is special), and a seed from which the values come, never a tensor entry
by entry: failures shrink to few rows, short and in order, with nothing special about them.
"""

from __future__ import annotations

from pytest_trainloop.instruments.strategies.losses import MOST_ROWS, calls, cases, outputs, targets
from pytest_trainloop.instruments.strategies.padding import Padded, paddings
from pytest_trainloop.instruments.strategies.rows import Rows, row_selections
from pytest_trainloop.instruments.strategies.seeds import SEEDS
from pytest_trainloop.instruments.strategies.series import Sequences, packed_sequences, sequences
from pytest_trainloop.instruments.strategies.splitting import splits
from pytest_trainloop.instruments.strategies.tokens import token_batches

__all__ = [
    "MOST_ROWS",
    "SEEDS",
    "Padded",
    "Rows",
    "Sequences",
    "calls",
    "cases",
    "outputs",
    "packed_sequences",
    "paddings",
    "row_selections",
    "sequences",
    "splits",
    "targets",
    "token_batches",
]
