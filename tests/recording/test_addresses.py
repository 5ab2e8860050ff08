"""Where a tensor's entries begin: 0 for every tensor that has no memory to point at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.recording.shards import address

WITHOUT_MEMORY = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "empty": lambda: torch.empty(0, 3),
    "lazy": lambda: nn.LazyLinear(3).weight,
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_no_address(name):
    assert address(WITHOUT_MEMORY[name]()) == 0


def test_no_address_inside_a_transform():
    found = []
    torch.func.vmap(lambda row: found.append(address(row)) or row)(torch.ones(4, 3))
    assert found == [0]


def test_a_view_begins_where_it_begins():
    rows = torch.zeros(4, 3)
    assert address(rows) == rows.data_ptr()
    assert address(rows[1:]) == rows.data_ptr() + 3 * rows.element_size()
