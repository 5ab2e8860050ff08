"""Which parts are compared, and what is said where none can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.checks.batch.padding_invariance.grouped import padding_runs
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.loop import Padding
from pytest_trainloop.runs.evidence import Evidence
from tests.loops.plain import loop

RANDOM = np.random.default_rng()
LENGTHS = torch.tensor([8, 3, 3, 5])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


def batch():
    ids = torch.randint(1, 9, (4, 8)) * (torch.arange(8) < LENGTHS[:, None])
    return {"ids": ids, "mask": (ids != 0).long()}


def right(model, item):
    return F.cross_entropy(model(item["ids"]).transpose(1, 2), (item["ids"] % 3).masked_fill(item["mask"] == 0, -100))


def wrong(model, item):
    return F.cross_entropy(model(item["ids"]).transpose(1, 2), item["ids"] % 3)


def evidence(loss=right, given=batch, **fields):
    return Evidence(lambda: loop(Tagger(), given(), loss, **fields))


def padding(made):
    (runs,) = padding_runs(made)
    return runs


def test_a_loop_without_padding_takes_no_step():
    made = evidence(given=lambda: {"ids": torch.randint(1, 9, (4, 8)), "mask": torch.ones(4, 8)})
    with pytest.raises(CannotDecide, match=r"pass padding=Padding\(pad_id="):
        padding(made)
    assert made.own_steps == 0


def test_a_declared_id_that_does_not_occur_is_named():
    made = evidence(padding=Padding(pad_id=77))
    with pytest.raises(CannotDecide, match="declared pad_id 77"):
        padding(
            evidence(
                given=lambda: {"ids": batch()["ids"] + 1, "mask": batch()["mask"] * 0 + 1}, padding=Padding(pad_id=77)
            )
        )
    assert padding(made).reason == "mask is 0 there"


def test_as_many_rows_are_given_as_the_loop_needs():
    def four(model, item):
        if len(item["ids"]) != 4:
            raise ValueError("four rows")
        return wrong(model, item)

    assert padding(evidence(four)).first_difference() is not None


def test_what_the_loop_raises_is_the_reason():
    def fixed(model, item):
        if item["ids"].shape[1] != 8:
            raise ValueError("eight positions")
        return right(model, item)

    with pytest.raises(CannotDecide, match="eight positions"):
        padding(evidence(fixed)).first_difference()


@pytest.mark.parametrize(
    ("noise", "refused", "match"),
    [
        (lambda ids: float(torch.randint(100, ids.shape)[0].double().mean()), CannotDecide, "randint"),
        (lambda ids: float(np.random.normal()), CannotDecide, "numpy"),
        (lambda ids: float(RANDOM.normal()), Unreliable, "determinism"),
    ],
)
def test_draws_by_length_or_of_other_generators_are_not_compared(noise, refused, match):
    made = padding(evidence(lambda model, item: wrong(model, item) * (1 + noise(item["ids"]))))
    with pytest.raises(refused, match=match):
        made.require_comparable(made.first_difference())
