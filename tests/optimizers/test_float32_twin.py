"""Optimizers of unknown arithmetic, compared with a float32 twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.instruments.optimizers import float32_twin
from pytest_trainloop.instruments.optimizers.float32_twin import Float32Twins
from pytest_trainloop.runs.evidence import Evidence

ENTRIES = 64


class Gains(nn.Module):
    """Gains of 1.0, where the next numbers of bfloat16 are 1.0078 and 0.9961; each gets a gradient of -1."""

    def __init__(self, dtype):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(ENTRIES, dtype=dtype))

    def forward(self, x):
        return -(x.to(self.gain.dtype) * self.gain).sum()


class Rounding(torch.optim.Optimizer):
    """Descent that computes in float32 and stores what rounds."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p, -group["lr"] * p.grad.float())

    def move(self, p, update):
        p.copy_(p.float() + update)


class Masters(Rounding):
    """Masters in an attribute, which the class's own way to be copied leaves out."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.masters = {id(p): p.detach().float().clone() for g in self.param_groups for p in g["params"]}
        self.order = [p for g in self.param_groups for p in g["params"]]

    def move(self, p, update):
        master = next(m for q, m in zip(self.order, self.masters.values(), strict=True) if q is p)
        p.copy_(master.add_(update))


class Around(Rounding):
    """An optimizer inside: torch's own on float32 masters."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.order = [p for g in self.param_groups for p in g["params"]]
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.order]
        self.inner = torch.optim.SGD(self.masters, lr=lr)

    @torch.no_grad()
    def step(self, closure=None):
        for p, master in zip(self.order, self.masters, strict=True):
            master.grad = p.grad.float()
        self.inner.step()
        for p, master in zip(self.order, self.masters, strict=True):
            p.copy_(master)


def shares(kind, *, dtype=torch.bfloat16, prepare=lambda optimizer: None, **options):
    def make():
        model = Gains(dtype)
        optimizer = kind(model.parameters(), **options)
        after = prepare(optimizer)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
                if after is not None:
                    after.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.ones(ENTRIES), fit=fit)

    return {
        f.name: f.share for f in Evidence(make).shared(Float32Twins).lost_updates(["gain"], ["bfloat16", "float16"])
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_rounded_and_stored_is_lost(dtype):
    lr = 1e-3 if dtype is torch.bfloat16 else 1e-4
    assert shares(Rounding, dtype=dtype, lr=lr) == {"gain": 1.0}


@pytest.mark.parametrize("kind", [Masters, Around])
def test_what_rounding_takes_may_be_kept(kind):
    assert shares(kind)["gain"] < 0.1


def test_steps_above_half_a_spacing_are_not_lost():
    assert shares(Rounding, lr=1e-2) == {"gain": 0.0}


def test_the_rate_counts_to_which_a_warm_up_leads():
    def warm(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=50)

    assert shares(Rounding, lr=2e-2, prepare=warm) == {"gain": 0.0}
    assert shares(Rounding, lr=1e-3, prepare=warm) == {"gain": 1.0}


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def patched(optimizer):
    optimizer.step = lambda step=optimizer.step: step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Rounding, {"prepare": hooked}),
        (Rounding, {"prepare": patched}),
        (torch.optim.SGD, {"lr": 1e-3}),
        (Rounding, {"dtype": torch.float32}),
        (Rounding, {"lr": 1e-6}),
    ],
    ids=["hooks", "patched", "made-again-otherwise", "float32", "too-slow-to-tell"],
)
def test_what_is_not_judged(kind, options):
    assert shares(kind, **options) == {}


def test_large_optimizers_are_not_copied(monkeypatch):
    monkeypatch.setattr(float32_twin, "MOST_ENTRIES", ENTRIES - 1)
    assert shares(Rounding) == {}
