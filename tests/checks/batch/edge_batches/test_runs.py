"""Batches that an epoch ends with: how a loader composes them, and where none can be made."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytest_trainloop.checks.batch.edge_batches.last_batch import ending, last_batch
from pytest_trainloop.checks.batch.edge_batches.runs import Edges
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.runs.evidence import Evidence
from tests.loops.plain import loop


def rows(count):
    return TensorDataset(torch.arange(count).float())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(13))


@pytest.mark.parametrize(
    "given",
    [
        None,
        [1, 2],
        lambda n: [1] * n,
        DataLoader(Stream(), batch_size=4),
        DataLoader(rows(5), batch_sampler=[[0, 1], [2]]),
    ],
)
def test_of_what_is_no_plain_loader_nothing_is_known(given):
    end = ending(given)
    assert end.last is None
    assert not end.drops
    assert not end.leaves_one
    assert not end.leaves_none


def test_the_last_batch_is_what_the_loader_gives():
    loader = DataLoader(rows(13), batch_size=5)
    assert torch.equal(last_batch(loader, ending(loader))[0], list(loader)[-1][0])


class Fetched(TensorDataset):
    def __getitems__(self, indices):
        return [(self.tensors[0][indices].sum(),)]


class Absent(TensorDataset):
    def __getitem__(self, index):
        raise KeyError("no such file")


def test_a_dataset_is_asked_as_the_loader_asks_it():
    loader = DataLoader(Fetched(torch.arange(7.0)), batch_size=5)
    assert torch.equal(last_batch(loader, ending(loader))[0], torch.tensor([11.0]))


def test_a_dataset_that_does_not_give_the_batch_decides_nothing():
    loader = DataLoader(Absent(torch.arange(7.0)), batch_size=5)
    with pytest.raises(CannotDecide, match="no such file"):
        last_batch(loader, ending(loader))


def edges(batch, loss):
    return Edges.of(Evidence(lambda: loop(nn.Linear(4, 3), batch, loss)))


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
    with pytest.raises(CannotDecide, match=reason):
        edges(batch, item_by_item)


def test_filters_of_warnings_are_as_they_were():
    before = list(warnings.filters)
    assert edges(
        (torch.randn(6, 4), torch.arange(6)), lambda model, batch: model(batch[0]).squeeze().std(0).sum()
    ).one_row.ok
    assert list(warnings.filters) == before
