"""The fewest rows over which windows of micro-batches still show a fault, and faults that no pair has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop

TAGS = 5
COUNTS = [4, 7, 4, 2, 7, 7, 3, 7]


def undivided(loss, k, number):
    return loss


def divided(loss, k, number):
    return loss / k


def finding(divide=undivided, *, rows=8, counts=None, fewest=1, window=lambda k: k, **fields):
    def make(accumulate=1):
        model = nn.Linear(3, TAGS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for number, (x, y) in enumerate(batches):
                if len(x) < fewest:
                    raise ValueError(f"at least {fewest} rows")
                divide(F.cross_entropy(model(x).flatten(0, -2), y.flatten()), accumulate, number).backward()
                if (number + 1) % window(accumulate) == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        x, y = torch.randn(rows, 7, 3), torch.randint(TAGS, (rows, 7))
        beyond = torch.arange(7) >= torch.tensor(counts or [7] * rows)[:, None]
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, y.masked_fill(beyond, -100)), fit=fit, **fields)

    return check_loop(make, only=["accumulation_equivalence"], raises=False).results[0].findings[0]


@pytest.mark.parametrize(
    ("divide", "given", "cause", "text"),
    [
        (lambda loss, k, number: loss / (number % k + 1), {}, "loss_not_divided", "divided by its place in the window"),
        (undivided, {"counts": COUNTS}, "loss_not_divided", "weigh 2.00 times what they should on average"),
        (lambda loss, k, number: loss / min(k, 2), {}, "update_differs", "3 micro-batches give 1.5 times"),
        (undivided, {"window": lambda k: 1}, "stepped_inside_window", "the knob does not reach it"),
    ],
    ids=["place", "unequal", "constant", "unused"],
)
def test_the_cause_of_a_fault_that_no_pair_has(divide, given, cause, text):
    found = finding(divide, **given)
    assert found.cause == cause
    assert text in found.summary


def test_a_sum_is_shown_by_one_row_in_each_micro_batch():
    assert finding().smallest == "2 micro-batches: row 0, and row 1"
    assert "accumulate" not in finding().repair  # a line of this loop that calls a function has no such name


def test_a_mean_of_means_is_shown_by_rows_with_unequal_counts():
    assert finding(divided, counts=COUNTS).smallest == "2 micro-batches: row 3, and row 7, with 2 and 7 valid targets"


@pytest.mark.parametrize(
    ("fewest", "rows", "expected"),
    [
        (2, 8, "2 micro-batches: rows [0, 1], and rows [2, 3]"),
        (12, 24, "24 rows as [12, 12]"),
    ],
)
def test_a_loop_that_refuses_few_rows_is_shown_more(fewest, rows, expected):
    assert finding(fewest=fewest, rows=rows).smallest == expected


def test_batches_that_the_project_cuts_are_told_by_their_sizes():
    def halves(batch, k):
        return zip(*(tensor.chunk(k) for tensor in batch), strict=True)

    assert finding(split_batch=halves).smallest == "2 rows as [1, 1]"
