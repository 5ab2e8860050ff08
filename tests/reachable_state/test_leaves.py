"""When two values of a leaf are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytest_trainloop.runs.reachable_state.leaves import same_value

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1.0, 1.0 + 1e-13),
        (1, 1.0),
        (NAN, NAN),
        (INF, INF),
        (None, None),
        ((1, [2.0]), (1, [2.0])),
        ({1, 2}, {2, 1}),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}),
        (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64) + 1e-5),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j])),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        (np.array(["a", None], dtype=object), np.array(["a", None], dtype=object)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16) + 2**-7),
    ],
)
def test_same(a, b):
    assert same_value(a, b)
    assert same_value(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1.0, 1.0 + 1e-9),
        (1, 2),
        (INF, 1.3),
        (-INF, INF),
        (NAN, 1.0),
        (None, 0),
        (True, 2),
        ("a", "b"),
        ((1,), (1, 2)),
        ({"a": 1}, {"b": 1}),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32)),
        (torch.tensor([1.0, INF]), torch.tensor([1.0, 2.0])),
        (torch.tensor([INF]), torch.tensor([-INF])),
        (torch.tensor([1.0, 1e-9], dtype=torch.float64), torch.tensor([1.0, 2e-3], dtype=torch.float64)),
        (torch.ones(1), None),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16) * 1.125),
        (torch.ones(2, dtype=torch.float16), torch.ones(2) * 1.01),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.full((2,), 1.125).to(torch.float8_e4m3fn)),
        (np.ones(2), np.ones(3)),
        (np.ones(2), torch.ones(2)),
    ],
)
def test_not_the_same(a, b):
    assert not same_value(a, b)
    assert not same_value(b, a)
