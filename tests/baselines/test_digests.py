"""Digests: which sums add up, what they see, and which tensors have one."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.instruments.baselines.trajectory import Digest
from pytest_trainloop.instruments.baselines.trajectory_recorder import SAMPLED, Digests


def digest(*tensors: torch.Tensor) -> Digest:
    found: list[Digest] = []
    digests = Digests()
    digests.take(tensors, found.append)
    digests.resolve()
    return found[0]


@pytest.mark.parametrize(
    ("tensor", "squares"),
    [
        (torch.empty(0, 3), 0.0),
        (torch.tensor(3.0), 9.0),
        (torch.tensor([3 + 4j]), 25.0),
        (torch.eye(3).to_sparse(), 3.0),
        (torch.ones(2, 2, dtype=torch.bfloat16), 4.0),
        (torch.ones(2, device="meta"), 0.0),
        (torch.ones(2, 3).expand(2, 3).t(), 6.0),
        (torch.ones(SAMPLED * 2 + 1), SAMPLED * 2 + 1),
        (torch.tensor([float("inf")]), float("inf")),
    ],
)
def test_every_kind_of_tensor_has_one(tensor, squares):
    assert digest(tensor).squares == squares


def close(a: float | None, b: float | None) -> bool:
    return a == pytest.approx(b, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("moved", [lambda x: x.flip(1), lambda x: x.roll(1, 1), lambda x: x[:, [1, 0, 2, 3, 4]]])
def test_entries_that_change_places_in_a_row_are_seen(moved):
    x = torch.randn(3, 5)
    assert not close(digest(x).by_row, digest(moved(x)).by_row)
    assert not close(digest(x).ordered, digest(moved(x)).ordered)


def test_rows_that_change_places_are_seen_by_the_order_alone():
    x = torch.randn(3, 5)
    assert close(digest(x).by_row, digest(x.flip(0)).by_row)
    assert not close(digest(x).ordered, digest(x.flip(0)).ordered)
