"""Runs at other loss scales."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.runs.scalers import scalers_built_with


def batch():
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def found(step, *, dtype=torch.bfloat16, init_scale=4096.0, loaded=None, declared=True):
    """What is found in a loop in which ``step`` is given model, optimizer, scaler and loss."""

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

    (result,) = check_loop(make, only=["grad_scaler"], raises=False).results
    return result.findings


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
    assert found(through, dtype=dtype) == ()


@pytest.mark.parametrize("declared", [True, False])
def test_a_step_past_the_scaler_reads_half_at_half_the_scale(declared):
    (finding,) = found(past, declared=declared)
    assert finding.cause == "not_unscaled"
    assert finding.measured == "with the scale halved from 1024, the first step reads 0.5 times the gradient"
    assert set(finding.culprits) == {"optimizer.step()", "0.weight", "0.bias", "3.weight", "3.bias"}


def test_a_loss_that_was_never_scaled_gives_twice_at_half_the_scale():
    (finding,) = found(never_scaled)
    assert finding.cause == "not_scaled"
    assert "reads 2 times the gradient" in finding.measured
    assert "the whole gradient is divided" in finding.summary


def test_a_part_that_was_never_scaled_is_told_from_the_rest():
    (finding,) = found(with_penalty_outside)
    assert finding.cause == "not_scaled"
    assert "a part of the gradient is divided" in finding.summary


def test_a_gradient_multiplied_by_the_scale_by_hand_depends_on_it():
    assert [finding.cause for finding in found(squared)] == ["scale_in_loss"]


def test_a_scaler_that_is_loaded_cannot_be_judged():
    assert found(past, loaded=64.0) == ()


def test_a_scale_that_starts_too_high_is_lowered_first():
    assert found(through, dtype=torch.float16, init_scale=2.0**40) == ()


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
