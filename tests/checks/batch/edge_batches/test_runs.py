"""What is known of a loader's last batch, and where none can be composed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytest_trainloop.frontends.api import check_loop
from tests.loops import data
from tests.loops.plain import cross_entropy, loop


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Fetched(TensorDataset):
    def __getitems__(self, indices):
        return [tuple(t[index] for t in self.tensors) for index in indices]

    def __getitem__(self, index):
        raise RuntimeError("one by one")


class Absent(TensorDataset):
    def __getitem__(self, index):
        if index == len(ROWS) - 1:
            raise KeyError("no such file")
        return super().__getitem__(index)


TENSORS = data.labelled(rows=401)
ROWS = TensorDataset(*TENSORS)


def normed():
    """It raises on one row."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def judged(batches, batch=tuple(t[:8] for t in TENSORS), model=normed, loss_of=cross_entropy):
    made = check_loop(lambda: loop(model(), batch, loss_of, batches=batches), only=["edge_batches"], raises=False)
    return made.results[0]


def linear():
    return nn.Linear(4, 4)


@pytest.mark.parametrize(
    "given",
    [
        None,
        DataLoader(Stream(), batch_size=8),
        DataLoader(ROWS, batch_sampler=[range(n, n + 8) for n in range(0, 400, 8)]),
    ],
    ids=["none", "iterable", "own_sampler"],
)
def test_of_what_is_no_plain_loader_nothing_is_known(given):
    result = judged(given)
    assert (result.outcome, result.needs) == ("skipped", "batches=")


def test_a_dataset_is_asked_as_the_loader_asks_it():
    (found,) = judged(DataLoader(Fetched(*TENSORS), batch_size=8)).findings
    assert (found.cause, found.smallest) == ("leftover_batch", "1 row")


def test_a_dataset_that_does_not_give_the_batch_decides_nothing():
    result = judged(DataLoader(Absent(*TENSORS), batch_size=8))
    assert result.outcome == "skipped"
    assert "no such file" in result.reason


def item_by_item(model, batch):
    return sum(
        F.cross_entropy(model(x), y) for x, y in (batch if isinstance(batch, list) else zip(*batch, strict=True))
    )


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((torch.randn(1, 4), torch.zeros(1, dtype=torch.long)), "1 rows"),
        ([(torch.randn(4), torch.tensor(n % 3)) for n in range(6)], "list of items"),
    ],
)
def test_where_no_row_can_be_taken_nothing_is_decided(batch, reason):
    result = judged(None, batch, linear, item_by_item)
    assert result.outcome == "skipped"
    assert reason in result.reason


def test_filters_of_warnings_are_as_they_were():
    before = list(warnings.filters)
    spread = judged(None, (torch.randn(6, 4), torch.arange(6)), linear, lambda m, b: m(b[0]).std(0).sum())
    assert spread.outcome == "skipped"
    assert list(warnings.filters) == before
