"""What the first steps show: an eps that is 0 where it is added, and steps that divide by it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.numerics.optimizer_numerics.first_steps import FirstSteps, zero_eps
from pytest_trainloop.checks.numerics.optimizer_numerics.zero_denominators import ZeroDenominators
from pytest_trainloop.runs.evidence import Evidence


def evidence(build, dtype=torch.float32, scale=1.0):
    def make():
        model = nn.Linear(6, 4).to(dtype)
        optimizer = build(model.parameters())

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                (scale * F.mse_loss(model(x.to(dtype)).float(), y)).backward()
                optimizer.step()

        batch = (torch.randn(8, 6), torch.randn(8, 4))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return Evidence(make)


@pytest.mark.parametrize(
    ("dtype", "eps", "options", "zero"),
    [
        (torch.float16, 1e-8, {}, (1e-8, "float16")),
        (torch.float16, 1e-4, {}, None),
        (torch.float16, 1e-8, {"fused": True}, None),
        (torch.float16, 1e-8, {"capturable": True}, None),
        (torch.bfloat16, 1e-8, {}, None),
        (torch.float32, 1e-30, {}, None),
        (torch.float32, 0.0, {}, (0.0, "float32")),
        (torch.float32, 1e-50, {}, (1e-50, "float32")),
        (torch.complex64, 1e-8, {}, None),
    ],
)
def test_an_eps_in_the_dtype_of_the_state(dtype, eps, options, zero):
    assert zero_eps("Adam", {"eps": eps, **options}, {"exp_avg_sq": torch.zeros(3, dtype=dtype)}) == zero


def test_an_eps_where_there_is_no_state_or_no_such_number():
    assert zero_eps("SGD", {"lr": 0.1}, {"momentum_buffer": torch.zeros(3)}) is None
    assert zero_eps("Adam", {"eps": 0.0}, {}) is None


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_small_gradients_in_float16_are_divided_by_zero(kind):
    found = evidence(lambda params: kind(params, lr=1e-3), torch.float16, scale=1e-3)
    assert [e.dtype for e in found.shared(FirstSteps.of).zero_eps()] == ["float16"]
    assert {d.step for d in found.shared(ZeroDenominators).found} == {1}


def test_larger_gradients_are_not():
    found = evidence(lambda params: torch.optim.Adam(params, lr=1e-3), torch.float16, scale=100.0)
    assert len(found.shared(FirstSteps.of).zero_eps()) == 1
    assert found.shared(ZeroDenominators).found == []


def test_float32_has_nothing_to_show():
    found = evidence(lambda params: torch.optim.Adam(params, lr=1e-3)).shared(FirstSteps.of)
    assert found.zero_eps() == []
    assert [f.snap.kind for f in found.found.values()] == [torch.optim.Adam]
    assert found.record.rounds == 2
