"""Which axis holds the rows, and how many of them are taken."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.batch.batch_independence.few_rows import few_rows, few_rows_of_call
from pytest_trainloop.core.errors import CannotDecide


def rows_of(batch, sizes=(), **fields):
    model = torch.nn.Linear(2, 2)
    return few_rows(TrainLoop(model=model, batch=batch, fit=lambda batches: None, **fields), sizes)


def ids(rows, length, vocabulary=50):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


PADDED = ids(6, 9).where(torch.arange(9)[None] < torch.tensor([9, 5, 7, 4, 9, 6])[:, None], torch.tensor(77))
LATER = ids(6, 10)


@pytest.mark.parametrize(
    ("batch", "rows_known"),
    [
        ((torch.randn(8, 5), torch.randn(8)), True),
        ((torch.randn(8, 5, 3), torch.zeros(8)), True),
        ((torch.randn(8, 5, 3), torch.randn(8, 2)), True),
        ((torch.randn(8, 5, 3), torch.randn(8, 5)), False),
        ((torch.randn(8, 5, 3), torch.arange(8)), False),
        ((torch.randn(8, 8, 3), torch.zeros(8)), False),
        (PADDED, True),
        ((torch.randn(8, 4, 4), torch.randint(3, (8, 4), generator=torch.Generator().manual_seed(3))), False),
        ((LATER[:, :-1], LATER[:, 1:]), True),
        ((LATER[:-1], LATER[1:]), False),
        (LATER, False),
    ],
    ids="table class vector tag times square padded labels next_position next_row ids".split(),
)
def test_rows_are_told_from_positions(batch, rows_known):
    assert rows_of(batch).rows_known is rows_known


@pytest.mark.parametrize(("shuffle", "known"), [(True, True), (False, False)])
def test_items_in_an_order_drawn_at_random_are_rows(shuffle, known):
    loader = DataLoader(TensorDataset(torch.randn(24, 5, 3), torch.randn(24, 5)), batch_size=8, shuffle=shuffle)
    model = torch.nn.Linear(3, 1)
    found = few_rows(TrainLoop(model=model, batches=loader, fit=lambda batches: None), ())
    assert found.rows_known is known


def test_a_declared_axis_is_believed():
    found = rows_of(torch.randn(5, 8, 3), batch_dim=1)
    assert (found.rows, found.axis, found.rows_known) == (7, 1, True)
    assert found.batch.shape == (5, 7, 3)


def test_no_other_axis_is_as_long():
    assert rows_of((torch.randn(12, 3, 5), torch.zeros(12)), sizes=(7, 2)).rows == 4
    assert rows_of((torch.randn(2, 2), torch.zeros(2))).rows == 2


def test_one_row_is_too_few():
    with pytest.raises(CannotDecide, match="1 rows along axis 0: at least 2 are needed"):
        rows_of(torch.randn(1, 4))


def test_no_rows_are_taken_of_a_sparse_tensor():
    adjacency = torch.eye(40).to_sparse()
    assert few_rows_of_call(((torch.randn(40, 3), adjacency), {}), None, ()) is None
