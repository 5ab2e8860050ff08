"""Updates that are lost to rounding, counted against what is known of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.numerics.parameter_precision.runs import blend_weights
from pytest_trainloop.instruments.optimizers.lost_updates import RepeatedSteps
from pytest_trainloop.runs.evidence import Evidence


class Gains(nn.Module):
    """Gains of 1.0, where the next numbers of bfloat16 are 1.0078 and 0.9961; each gets a gradient of -1."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x):
        return -(x.to(self.gain.dtype) * self.gain).sum(1).mean()


def counted(rate, *, schedule=None, batch=(1.0, 1.0, 1.0, 1.0), **options):
    def make():
        model = Gains()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, **options)
        after = None if schedule is None else schedule(optimizer)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                if after is not None:
                    after.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.tensor([batch]), fit=fit)

    return Evidence(make).shared(RepeatedSteps).lost_updates(["gain"], ["bfloat16"])


@pytest.mark.parametrize(("rate", "share"), [(1e-3, 1.0), (3.8e-3, 1.0), (4e-3, 0.0), (1e-2, 0.0)])
def test_half_a_ulp_is_the_limit(rate, share):
    (found,) = counted(rate)
    assert found.share == share
    assert found.updates == 4 * found.steps == 48
    assert found.update == pytest.approx(rate)
    assert found.ulp == 2**-7


def test_updates_rounded_up_make_up_for_lost_ones():
    (found,) = counted(4e-3)
    assert found.share_of_size == 0.0


def test_entries_without_gradient_are_not_counted():
    (found,) = counted(1e-3, batch=(1.0, 0.0, 0.0, 0.0))
    assert (found.share, found.updates, found.sampled) == (1.0, 12, 48)


def test_a_rate_that_rises_to_nobody_knows_where_is_left_out():
    class TrainloopFixture:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.5

    assert counted(1e-6, schedule=TrainloopFixture) == []


def copies(weight, steps=5, *, after=True, other=0.0):
    generator = torch.Generator().manual_seed(0)
    p, a = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(2))
    trained, copied = [p], [a]
    for _ in range(steps):
        step = p + 0.1 * torch.randn(20, generator=generator, dtype=torch.float64)
        a = a * (1 - weight) + weight * (step if after else p) + other * torch.sin(a)
        p = step
        trained.append(p)
        copied.append(a)
    return copied, trained


@pytest.mark.parametrize("after", [True, False])
def test_a_blend_is_known_by_its_weight(after):
    assert blend_weights(*copies(0.001, after=after)) == pytest.approx([0.001] * 5)


def test_what_moves_otherwise_is_no_blend():
    assert blend_weights(*copies(0.001, other=1e-4)) == []
