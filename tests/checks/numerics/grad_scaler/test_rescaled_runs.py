"""Runs at other loss scales."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import RescaledRuns
from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import traces
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.scalers import scalers_built_with


def batch():
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def rescaled(step, *, dtype=torch.bfloat16, init_scale=4096.0, loaded=None, declared=True):
    """The further runs of a loop in which ``step`` is given model, optimizer, scaler and loss."""

    def make():
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        if loaded is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": loaded})

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = F.cross_entropy(model(x), y)
                step(model, optimizer, scaler, loss)

        return TrainLoop(model=model, optimizer=optimizer if declared else None, batch=batch(), fit=fit)

    return Evidence(make).shared(RescaledRuns)


def through(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def past(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    optimizer.step()


def never_scaled(model, optimizer, scaler, loss):
    scaler.scale(torch.zeros(()))
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


def with_penalty_outside(model, optimizer, scaler, loss):
    (scaler.scale(loss) + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
    scaler.step(optimizer)
    scaler.update()


def squared(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad.mul_(scaler.get_scale())
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_unscaled_does_not_depend_on_the_scale(dtype):
    assert list(rescaled(through, dtype=dtype).dependences()) == []


@pytest.mark.parametrize("declared", [True, False])
def test_a_step_past_the_scaler_consumes_half_at_half_the_scale(declared):
    (found,) = rescaled(past, declared=declared).dependences()
    assert (found.kind, found.whole, found.factor, found.scale) == ("grows", True, 0.5, 1024.0)
    assert set(found.names) == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_a_loss_that_was_never_scaled_gives_twice_at_half_the_scale():
    (found,) = rescaled(never_scaled).dependences()
    assert (found.kind, found.whole, found.factor) == ("falls", True, 2.0)


def test_a_part_that_was_never_scaled_is_told_from_the_rest():
    (found,) = rescaled(with_penalty_outside).dependences()
    assert (found.kind, found.whole) == ("falls", False)
    assert found.factor == pytest.approx(1.0, abs=0.01)


def test_what_goes_with_another_power_of_the_scale_is_nobodys_business():
    (found,) = rescaled(squared).dependences()
    assert (found.kind, found.names) == ("otherwise", ())


def test_a_scaler_that_is_loaded_cannot_be_judged():
    assert list(rescaled(past, loaded=64.0).dependences()) == []


def test_a_scale_that_starts_too_high_is_lowered_first():
    assert list(rescaled(through, dtype=torch.float16, init_scale=2.0**40).dependences()) == []


def test_the_lowest_scale_skips_nothing_that_is_finite():
    lowest = rescaled(through).at_lowest(20)
    assert (lowest.skipped, lowest.origin) == (0, None)
    assert lowest.tried >= 12


def test_the_lowest_scale_skips_what_is_not():
    def poisoned(model, optimizer, scaler, loss):
        through(model, optimizer, scaler, loss + (model[0].weight * 0.0).sum().sqrt())

    lowest = rescaled(poisoned).at_lowest(20)
    assert lowest.skipped == lowest.tried >= 20
    assert lowest.origin is not None
    assert lowest.origin.op == "sqrt"


def test_scalers_are_built_as_ever_afterwards():
    with contextlib.suppress(ZeroDivisionError), scalers_built_with(init_scale=8.0):
        assert torch.amp.GradScaler("cpu", 2.0**10).get_scale() == 8.0
        raise ZeroDivisionError
    assert torch.amp.GradScaler("cpu", 2.0**10).get_scale() == 1024.0


class Own(torch.amp.GradScaler):
    def __init__(self, start):
        super().__init__("cpu", init_scale=start, growth_interval=5)


def test_scalers_of_a_subclass_are_built_so_too():
    with scalers_built_with(init_scale=8.0, growth_interval=7):
        scaler = Own(2.0**10)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 7)


def test_no_trace_without_a_step_through_the_scaler():
    found = rescaled(past)
    assert traces(found._seen) == []
