"""Cox's partial likelihood by order, against its definition by pairs."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_trainloop.instruments.formulas.survival import _partial


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("censored", [False, True])
def test_ties_are_at_risk_together(before, censored):
    g = torch.Generator().manual_seed(0)
    risk = torch.randn(40, dtype=torch.float64, generator=g)
    time = torch.randint(1, 12, (40,), generator=g).double()
    event = (torch.rand(40, generator=g) < 0.6).double()
    at_risk = time[None, :] <= time[:, None] if before else time[None, :] >= time[:, None]
    total = risk[None, :].expand(40, -1).masked_fill(~at_risk, -math.inf).logsumexp(1)
    wanted = ((total - risk) * (1 - event if censored else event)).sum()
    assert torch.allclose(_partial(risk, time, event, before=before, censored=censored), wanted, rtol=1e-12)


def test_a_map_of_pixels_takes_no_table_of_pairs():
    """A table of pairs of this many entries has 512 GB."""
    entries = torch.arange(262_144, dtype=torch.float64)
    assert bool(_partial(entries / 262_144, entries, (entries % 2)).isfinite())
