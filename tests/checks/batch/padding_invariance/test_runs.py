"""Which parts are compared, and what is said where none can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.checks.batch.padding_invariance.grouped import padding_runs
from pytest_trainloop.errors import CannotDecide, Unreliable
from pytest_trainloop.loop import Padding
from pytest_trainloop.runs.evidence import Evidence

RANDOM = np.random.default_rng()
LENGTHS = torch.tensor([8, 3, 3, 5])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


def batch(length=8):
    ids = torch.randint(1, 9, (4, length)) * (torch.arange(length) < LENGTHS.clamp(max=length)[:, None])
    return {"ids": ids, "mask": (ids != 0).long()}


def right(model, item):
    return F.cross_entropy(model(item["ids"]).transpose(1, 2), (item["ids"] % 3).masked_fill(item["mask"] == 0, -100))


def wrong(model, item):
    return F.cross_entropy(model(item["ids"]).transpose(1, 2), item["ids"] % 3)


def evidence(loss=right, given=batch, *, window=1, batches=None, **fields):
    def make():
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for number, item in enumerate(batches, start=1):
                loss(model, item).backward()
                if number % window == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=given(), batches=batches, fit=fit, **fields)

    return Evidence(make)


def padding(made):
    (runs,) = padding_runs(made)
    return runs


def test_a_right_loop_takes_two_steps_for_each_part():
    made = evidence()
    assert not made.shared(makes_own_data)
    before = made.own_steps
    assert padding(made).first_difference() is None
    assert made.own_steps - before == 4


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


@pytest.mark.parametrize("window", [1, 3])
def test_a_difference_is_found_in_windows_of_any_length(window):
    made = padding(evidence(wrong, window=window))
    found = made.first_difference()
    assert found is not None
    assert found.full.rows == (1, 2)
    assert (found.full.span.total, found.trimmed.span.total) == (8, 3)
    assert not found.factor
    assert made.without_outputs(found).factor == pytest.approx(3 / 8)
    smallest = made.smallest(found, lambda _found: True)
    assert (smallest.full.rows, smallest.full.span.total) == ((1,), 2)


def test_the_share_of_real_positions_is_exact():
    def over_all(model, item):
        each = F.cross_entropy(model(item["ids"]).transpose(1, 2), item["ids"] % 3, reduction="none")
        return (each * item["mask"]).mean()

    assert padding(evidence(over_all)).first_difference().factor == 3 / 8
    assert not padding(evidence(lambda *given: 0.9 * wrong(*given))).first_difference().factor


def test_batches_of_several_lengths():
    assert not padding(evidence()).varying
    assert padding(evidence(batches=lambda n: [batch(8 - i % 2) for i in range(n)])).varying


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


def test_draws_by_length_are_not_compared():
    def noisy(model, item):
        return right(model, item) * (1 + torch.randint(100, item["ids"].shape)[0].double().mean())

    made = padding(evidence(noisy))
    with pytest.raises(CannotDecide, match="randint"):
        made.require_comparable(made.first_difference())


@pytest.mark.parametrize(
    ("noise", "refused", "match"),
    [
        (lambda: float(np.random.normal()), CannotDecide, "numpy"),
        (lambda: float(RANDOM.normal()), Unreliable, "determinism"),
    ],
)
def test_draws_of_other_generators_are_not_compared(noise, refused, match):
    made = padding(evidence(lambda model, item: wrong(model, item) * (1 + noise())))
    with pytest.raises(refused, match=match):
        made.require_comparable(made.first_difference())


def test_the_end_of_a_text_is_no_difference():
    def once(model, item):
        ids = item["ids"]
        labels = (ids % 3).masked_fill((ids == 0) & (ids.roll(1, 1) == 0), -100)
        return F.cross_entropy(model(ids).transpose(1, 2), labels)

    assert padding(evidence(once)).first_difference() is None
