"""The fewest rows over which windows of micro-batches still show a fault."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

TAGS = 5
COUNTS = [4, 7, 4, 2, 7, 7, 3, 7]


def smallest(divide=lambda loss, k, rows: loss, *, rows=8, counts=None, fewest=1, **fields):
    """Of a loop that does not divide its loss, or divides it in another way."""

    def make(accumulate=1):
        model = nn.Linear(3, TAGS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                if len(x) < fewest:
                    raise ValueError(f"at least {fewest} rows")
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
                divide(loss, accumulate, len(x)).backward()
                if i % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        x, y = torch.randn(rows, 7, 3), torch.randint(TAGS, (rows, 7))
        beyond = torch.arange(7) >= torch.tensor(counts or [7] * rows)[:, None]
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, y.masked_fill(beyond, -100)), fit=fit, **fields)

    return check_loop(make, only=["accumulation_equivalence"], raises=False).results[0].findings[0].smallest


def divided(loss, k, rows):
    return loss / k


def test_a_sum_is_shown_by_one_row_in_each_micro_batch():
    assert smallest() == "rows [0] | [1]"


def test_a_mean_of_means_is_shown_by_rows_with_unequal_counts():
    assert smallest(divided, counts=COUNTS) == "rows [3] | [7], a smaller example with 2 and 7 valid targets"


@pytest.mark.parametrize(
    ("fewest", "rows", "expected"),
    [
        (2, 8, "rows [0, 1] | [2, 3]"),
        (3, 8, "rows [0, 1, 2] | [3, 4, 5]"),
        (12, 24, "24 rows as [12, 12]"),
    ],
)
def test_a_loop_that_refuses_few_rows_is_shown_more(fewest, rows, expected):
    assert smallest(fewest=fewest, rows=rows) == expected


def test_batches_that_the_project_cuts_are_told_by_their_sizes():
    def halves(batch, k):
        return zip(*(tensor.chunk(k) for tensor in batch), strict=True)

    assert smallest(split_batch=halves) == "2 rows as [1, 1]"
