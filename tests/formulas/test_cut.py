"""Values that are drawn anew for the arguments of a form."""

from __future__ import annotations

import torch

from pytest_trainloop.instruments.formulas.cut import other


def test_values_drawn_anew_are_of_the_same_kind():
    binary = torch.tensor([0.0, 1, 1, 0, 0, 1], dtype=torch.float64)
    assert set(other(binary, 1).tolist()) <= {0.0, 1.0}
    whole = torch.tensor([3, 5, 9])
    assert other(whole, 1).dtype is whole.dtype
    assert 3 <= int(other(whole, 2).min()) <= int(other(whole, 2).max()) <= 9
    shares = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64)
    assert bool(((other(shares, 3) >= 0.2) & (other(shares, 3) <= 0.7)).all())
    assert float(other(shares, 4, bound=3.0).abs().max()) <= 3
    assert torch.equal(other(torch.ones(4), 5), torch.ones(4))
    assert other(torch.tensor([True, False]), 6).dtype is torch.bool
