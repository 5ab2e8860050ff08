"""Numbers and tensors that all rows of a batch share."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pytest_trainloop.instruments.batches import totals

ROWS = 4
X = torch.randn(ROWS, 3)
EACH = (5, 2, 6, 3)


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    count: int


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    count: int


class Plain:
    def __init__(self, x, count):
        self.x, self.count = x, count


Named = namedtuple("Named", "x count")
HOLDERS = [Slots, Frozen, Plain, Named]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda h: h.__name__)
def test_a_number_is_found_wherever_it_stands_and_counted_anew(holder):
    batch = {"inner": holder(X, 16)}
    (path,) = totals.shared_by_rows(batch, ROWS)
    assert path[0] == "inner"
    known = totals.totals({path: 16}, ROWS, [EACH])
    anew = totals.recounted(batch, 2, [0, 2], known)["inner"]
    assert anew.count == 11
    assert anew.x is X
    assert type(anew) is holder
    assert batch["inner"].count == 16


@pytest.mark.parametrize("number", [16, 16.0, np.int64(16), np.float32(16), torch.tensor(16), torch.tensor([16.0])])
def test_a_number_keeps_its_type(number):
    (path,) = found = totals.shared_by_rows([X, number], ROWS)
    anew = totals.recounted([X, number], 1, [1], totals.totals(found, ROWS, [EACH]))[1]
    assert (type(anew), int(anew), path) == (type(number), 2, (1,))
    assert not isinstance(number, torch.Tensor) or anew.dtype == number.dtype


def test_the_number_of_rows_and_as_much_for_every_row_are_totals_too():
    known = totals.totals({("rows",): 4, ("all",): 12, ("other",): 7}, ROWS, [])
    assert known == {("rows",): [1, 1, 1, 1], ("all",): [3, 3, 3, 3]}


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, torch.arange(ROWS)),
        {"x": X, "names": ["a"] * ROWS},
        {"x": X, "last": True, "mode": "train", "none": None},
    ],
    ids=["tensor", "pair", "a list with an item for each row", "no numbers"],
)
def test_rows_words_and_switches_are_not_shared_by_rows(batch):
    assert totals.shared_by_rows(batch, ROWS) == {}
    assert totals.doubled(batch, ROWS, {("x",), ("last",)}) is batch


def test_a_tensor_without_rows_is_doubled_to_see_whether_it_matters():
    grid = torch.arange(3.0)
    batch = {"x": X, "grid": grid, "count": 16}
    found = totals.shared_by_rows(batch, ROWS)
    assert set(found) == {("grid",), ("count",)}
    assert found["grid",] != found["grid",]
    twice = totals.doubled(batch, ROWS, {("grid",)})
    assert torch.equal(twice["grid"], 2 * grid)
    assert twice["count"] == 16
    assert twice["x"] is X
    assert batch["grid"] is grid
