"""What is said of loops whose padded and cut rows cannot be compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import check_loop
from tests.loops.plain import loop

RANDOM = np.random.default_rng()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


def over_all(model, item):
    return F.cross_entropy(model(item["ids"]).transpose(1, 2), item["ids"] % 3)


def result_of(loss, lengths=(8, 3, 3, 5)):
    def make():
        ids = torch.randint(1, 9, (4, 8)) * (torch.arange(8) < torch.tensor(lengths)[:, None])
        return loop(Tagger(), {"ids": ids, "mask": (ids != 0).long()}, loss)

    return check_loop(make, only=["padding_invariance"], raises=False).results[0]


def times(factor):
    return lambda model, item: over_all(model, item) * factor(item["ids"])


@pytest.mark.parametrize(
    ("loss", "lengths", "outcome", "reason"),
    [
        (times(lambda ids: 1 + torch.randint(100, ids.shape)[0].double().mean()), (8, 3, 3, 5), "skipped", "randint"),
        (times(lambda ids: 1 + float(np.random.normal())), (8, 3, 3, 5), "skipped", "numpy"),
        (times(lambda ids: 1 + float(RANDOM.normal())), (8, 3, 3, 5), "unreliable", "determinism"),
        (times(lambda ids: torch.nan), (8, 3, 3, 5), "skipped", "is not finite"),
        (over_all, (8, 7, 7, 8), "skipped", "which may be the end of a text"),
        (over_all, (8, 8, 8, 8), "skipped", "pass padding=Padding(pad_id="),
    ],
    ids="draws_by_length numpy unseeded nan one_position no_padding".split(),
)
def test_what_cannot_be_compared_is_a_skip_that_says_why(loss, lengths, outcome, reason):
    result = result_of(loss, lengths)
    assert (result.outcome, result.findings) == (outcome, ())
    assert reason in result.reason


def test_as_many_rows_are_given_as_the_loop_needs():
    def of_four(model, item):
        if len(item["ids"]) != 4:
            raise ValueError("four rows")
        return over_all(model, item)

    assert [f.cause for f in result_of(of_four).findings] == ["padded_targets"]
