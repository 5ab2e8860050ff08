"""The sizes of entries, in halves of a power of ten."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trainloop.views.pictures.sizes import SAMPLED, norm, sizes


def test_large_tensors_are_sampled_and_counted_in_full():
    found = sizes(torch.ones(4 * SAMPLED))
    assert found.bins == {0: 4 * SAMPLED}


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
