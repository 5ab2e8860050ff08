"""The sizes of entries, in halves of a power of ten."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trainloop.pictures.sizes import ENDS, SAMPLED, norm, sizes


def test_each_entry_is_counted_once():
    found = sizes(torch.tensor([0.0, 1.0, -2.0, 5.0, 0.02, math.inf, math.nan]))
    assert found.bins == {0: 2, 1: 1, -4: 1}  # 1 to 3.2, 3.2 to 10, 0.01 to 0.03
    assert (found.zero, found.not_finite, found.entries) == (1, 2, 7)


def test_large_tensors_are_sampled_and_counted_in_full():
    found = sizes(torch.ones(4 * SAMPLED))
    assert found.bins == {0: 4 * SAMPLED}


def test_the_ends_are_bounded():
    assert sizes(torch.tensor([1e-300, 1e300], dtype=torch.float64)).bins == {-2 * ENDS: 1, 2 * ENDS: 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_dtype_is_read(dtype):
    tensor = torch.ones(3, dtype=dtype)
    assert sizes(tensor).bins[0] == 3
    assert norm(tensor) == pytest.approx(math.sqrt(3))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_read():
    tensor = torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,))
    assert sizes(tensor).entries == 2
    assert norm(tensor) == 5


def test_empty_tensors_count_nothing():
    assert sizes(torch.ones(0)).entries == 0
