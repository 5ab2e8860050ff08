"""Batches that an epoch ends with: how they are composed, and what a squeeze does to them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.batches.valid_targets import rows_without
from pytest_trainloop.checks.batch.edge_batches.embedding_range import beyond_table
from pytest_trainloop.checks.batch.edge_batches.last_batch import ending, last_batch
from pytest_trainloop.checks.batch.edge_batches.length_one import shortest
from pytest_trainloop.checks.batch.edge_batches.runs import Edges, lengths_of
from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import proven
from pytest_trainloop.checks.batch.edge_batches.squeezes import Squeezes
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.record import Record
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.run import RunPlan, run

NOTHING = Record(parameters=[], optimizers=[])


def rows(count):
    return TensorDataset(torch.arange(count).float())


# what a loader says


def test_the_last_batch_is_counted():
    end = ending(DataLoader(rows(13), batch_size=4))
    assert (end.rows, end.batch_size, end.data, end.drops) == (1, 4, 13, False)
    assert end.leaves_one
    assert not end.leaves_any
    assert not end.leaves_none


def test_a_loader_that_shuffles_may_leave_any_row():
    assert ending(DataLoader(rows(13), batch_size=4, shuffle=True)).leaves_any
    weighted = WeightedRandomSampler(torch.ones(13).tolist(), 9)
    assert ending(DataLoader(rows(13), batch_size=4, sampler=weighted)).leaves_any


def test_a_last_batch_that_is_full_or_dropped_leaves_none():
    assert ending(DataLoader(rows(12), batch_size=4)).leaves_none
    assert ending(DataLoader(rows(14), batch_size=4)).leaves_none
    assert ending(DataLoader(rows(13), batch_size=4, drop_last=True)).drops


def test_single_rows_leave_none_over():
    assert not ending(DataLoader(rows(13), batch_size=1)).leaves_one


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


# rows in which nothing counts, and their lengths


def test_rows_without_a_label():
    labels = torch.tensor([[1, 2, -100], [-100, -100, -100], [-100, 4, 5]])
    assert rows_without({"y": labels}, 3, 0, None, NOTHING) == {1: 3}


def test_a_label_that_only_a_shift_drops():
    labels = torch.tensor([[1, 2, -100], [7, -100, -100], [-100, 4, 5]])
    assert rows_without({"y": labels}, 3, 0, None, NOTHING) == {1: 2}


def test_rows_that_a_mask_leaves_out_and_rows_that_are_not_labelled():
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    assert rows_without({"mask": mask}, 3, 0, None, NOTHING)[2] == 2
    assert rows_without((torch.randn(3, 2), torch.tensor([1, -100, 2])), 3, 0, None, NOTHING) == {1: 1}


def test_a_batch_in_which_nothing_counts_has_no_such_row():
    assert rows_without({"mask": torch.zeros(3, 4)}, 3, 0, None, NOTHING) == {}


def test_lengths_by_padding_and_by_mask():
    ids = torch.tensor([[3, 4, 5], [6, 0, 0], [7, 8, 0]])

    def lengths(batch, padding=None, model=None):
        model = model or nn.Linear(1, 1)
        return lengths_of(batch, TrainLoop(model=model, batch=batch, fit=lambda batches: None, padding=padding))

    assert lengths((ids,), Padding(pad_id=0)) == ((3, 1, 2), 3)
    assert lengths({"ids": ids, "mask": (ids != 0).long()}) == ((3, 1, 2), 3)
    assert lengths((ids,), model=nn.Embedding(9, 2, padding_idx=0)) == ((3, 1, 2), 3)
    assert lengths((ids,)) == ((), 0)


# squeezes


def squeezing(squeeze, batch, instead=None):
    """The squeezes of one step of a loop, and the gradient of its weight."""
    seen = []

    def make():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                ((squeeze(model(x)) - y) ** 2).sum().backward()
                seen.append(model.weight.grad.clone())
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    squeezes = Squeezes(instead)
    run(make, RunPlan(contexts=squeezes.contexts, count=1, enough=lambda r: r.rounds >= 1))
    return squeezes, seen[0]


def batch_of(count):
    x = torch.linspace(-1, 1, 4 * count).reshape(count, 4)
    return x, torch.ones(count)


def outright(x):
    return x.squeeze()


def named(x):
    return x.squeeze(-1)


def by_function(x):
    return torch.squeeze(input=x, dim=(0, 1))


def in_place(x):
    return x.squeeze_()


@pytest.mark.parametrize(
    ("squeeze", "removed"), [(outright, {0, 1}), (named, {1}), (by_function, {0, 1}), (in_place, {0, 1})]
)
def test_what_is_taken_out_of_one_row(squeeze, removed):
    (call,) = squeezing(squeeze, batch_of(1))[0].calls.values()
    assert call.removed == removed
    assert call.shape == (1, 1)
    assert "squeeze" in call.place.code


@pytest.mark.parametrize(("squeeze", "lost"), [(outright, 1), (named, 0), (by_function, 1)])
def test_an_axis_is_lost_that_is_left_in_otherwise(squeeze, lost):
    one, three = (squeezing(squeeze, batch_of(n))[0] for n in (1, 3))
    assert len(one.removed_rows(three.calls, 3)) == lost
    assert not three.removed_rows(three.calls, 3)


@pytest.mark.parametrize("squeeze", [outright, by_function])
def test_the_axis_is_left_in_instead(squeeze):
    shapes = []

    def noted(x):
        shapes.append(tuple(squeeze(x).shape))
        return x[:, 0]

    three, _ = squeezing(noted, batch_of(3))
    squeezing(noted, batch_of(1), three.calls)
    assert shapes[-1] == (1,)


def test_torchs_own_squeezes_are_left_alone():
    squeezes, _ = squeezing(lambda x: nn.functional.cosine_similarity(x, x, dim=1), batch_of(2))
    assert not squeezes.calls


# the runs


class Net(nn.Module):
    def __init__(self, squeeze):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.squeeze = squeeze

    def forward(self, x):
        return self.squeeze(self.body(x[:, None]))


def evidence(squeeze=lambda x: x[:, 0], loss=F.cross_entropy, batch=None, **fields):
    def make():
        model = Net(squeeze)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()

        given = batch or (torch.randn(6, 4), torch.arange(6) % 3)
        return TrainLoop(model=model, optimizer=optimizer, batch=given, fit=fit, **fields)

    return Evidence(make)


def test_one_row_goes_through():
    edges = Edges.of(evidence())
    assert edges.one_row.ok
    assert proven(edges) is None
    assert edges.leftover() is None
    assert edges.nothing_counts() is None
    assert shortest(edges) is None
    assert beyond_table(edges) is None


def test_a_lost_row_is_proven_by_leaving_it_in():
    lost = proven(Edges.of(evidence(outright)))
    assert [s.output_shape for s in lost.squeezes] == [(3,)]
    assert "RuntimeError" in lost.raised or "ValueError" in lost.raised
    assert lost.weights == pytest.approx((0.5, 0.5))


def test_a_lost_row_that_changes_the_gradient_only():
    def by_rows(scores, _labels):
        return (scores**2).sum() / len(scores)

    lost = proven(Edges.of(evidence(outright, by_rows)))
    assert not lost.raised
    assert lost.ratio == pytest.approx(1 / 3)
    assert lost.cosine == pytest.approx(1.0)


def test_a_lost_row_that_changes_nothing():
    assert proven(Edges.of(evidence(outright, lambda scores, _labels: (scores**2).mean()))) is None


def test_rows_that_interact_may_not_be_meant_one_by_one():
    def decorrelated(scores, labels):
        return F.cross_entropy(scores - scores.mean(0).exp(), labels)

    edges = Edges.of(evidence(outright, decorrelated))
    assert edges.one_row.raised
    assert proven(edges) is None


def test_a_batch_of_one_row_has_none_to_take():
    with pytest.raises(CannotDecide, match="1 rows"):
        Edges.of(evidence(batch=(torch.randn(1, 4), torch.zeros(1, dtype=torch.long))))


def test_filters_of_warnings_are_as_they_were():
    before = list(warnings.filters)
    assert Edges.of(evidence(outright, lambda scores, _labels: scores.std(0).sum())).one_row.ok
    assert list(warnings.filters) == before


def test_of_several_lost_rows_the_one_that_matters_is_named():
    def twice(x):
        _ = x.squeeze(1).squeeze().sum()
        return x.squeeze()

    (found,) = proven(Edges.of(evidence(twice))).squeezes
    assert found.shape == (1, 1, 3)


def test_a_list_of_items_has_no_axis_of_rows():
    items = [(torch.randn(4), torch.tensor(n % 3)) for n in range(6)]

    def make():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                sum(F.cross_entropy(model(x), y) for x, y in batch).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=items, fit=fit)

    with pytest.raises(CannotDecide, match="list of items"):
        Edges.of(Evidence(make))


def test_the_row_that_lacks_most_comes_first():
    labels = torch.tensor([[1, 2, -100], [7, -100, -100], [-100, -100, -100]])
    assert list(rows_without({"y": labels}, 3, 0, None, NOTHING)) == [2, 1]


def test_rows_that_weigh_each_other_may_not_be_meant_one_by_one():
    """Returns of a rollout: what comes later weighs what came before."""

    def rewarded(scores, labels):
        scores = scores.reshape(-1, 3) if scores.dim() > 1 else scores
        chosen = scores.log_softmax(-1)[torch.arange(len(labels)), labels]
        returns = torch.arange(1.0, len(labels) + 1).flip(0)
        return -(chosen * returns).mean()

    edges = Edges.of(evidence(outright, rewarded))
    assert edges.one_row.raised
    assert proven(edges) is None
