"""The first operation whose result is not finite though its inputs are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.tracing.nonfinite import NonFiniteOrigins
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.body, self.head, self._between = nn.Linear(3, 4), nn.Linear(4, 1), between

    def forward(self, x):
        return self.head(self._between(self.body(x)))


def origins(between=torch.tanh, loss_of=lambda out: out.square().mean(), given=None):
    def make():
        net, batch = Net(between), torch.randn(6, 3) if given is None else given
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        return plain.loop(net, batch, lambda model, x: loss_of(model(x)), optimizer)

    made = Evidence(make)
    made.run()
    return made.shared(NonFiniteOrigins.of)


def zero(h):
    return h - h


@pytest.mark.parametrize(
    ("between", "op", "value"),
    [
        (lambda h: zero(h) / zero(h), "div", "NaN"),
        (lambda h: h / zero(h), "div", "inf"),
        (lambda h: torch.exp(h + 1e4), "exp", "inf"),
        (lambda h: (h.square() + 1).neg().sqrt(), "sqrt", "NaN"),
        (lambda h: zero(h).log(), "log", "inf"),
        (lambda h: h.masked_fill(h.abs() >= 0, float("-inf")).softmax(1), "softmax", "NaN"),
        (lambda h: h[:0].mean(0) + h, "mean", "NaN"),
    ],
    ids=["0 / 0", "x / 0", "exp", "sqrt of negative", "log 0", "softmax of a masked row", "mean of nothing"],
)
def test_the_operation_is_named_with_its_module(between, op, value):
    origin = origins(between).root
    assert (origin.op, origin.value, origin.direction, origin.step) == (op, value, "forward", 0)
    assert origin.module == "Net"
    assert "between" in origin.place.code or "lambda" in origin.place.code


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.masked_fill(h > 0, float("-inf")).softmax(1).nan_to_num() + 0 * h,
        lambda h: torch.where(h > 0, h, torch.tensor(float("-inf"))).logsumexp(1, keepdim=True).clamp_min(-9) + 0 * h,
        lambda h: torch.sigmoid(torch.full_like(h, float("inf"))) * h,
    ],
    ids=["softmax of a mask", "logsumexp of a mask", "sigmoid of inf"],
)
def test_a_literal_infinity_is_intended(between):
    found = origins(between)
    assert (found.root, found.gradient, found.masked) == (None, None, [])


def test_a_nonfinite_input_comes_from_no_operation():
    found = origins(given=torch.full((6, 3), float("nan")))
    assert (found.root, found.gradient) == (None, None)
    assert (found.from_input.op, found.from_input.module) == ("linear", "body")


@pytest.mark.parametrize(
    ("between", "op"),
    [
        (lambda h: zero(h).square().sum(1, keepdim=True).sqrt() + h, "sqrt"),
        (lambda h: torch.where(h > 0, h.sqrt(), h), "sqrt"),
        (lambda h: (zero(h) + 1).acos() + h, "acos"),
    ],
    ids=["root of zero", "the side not taken", "acos at one"],
)
def test_a_slope_is_found_behind_a_finite_loss(between, op):
    found = origins(between)
    assert found.root is None
    assert (found.gradient.op, found.gradient.direction) == (op, "backward")


@pytest.mark.parametrize(
    ("loss_of", "op"),
    [
        (lambda out: torch.nan_to_num(out.mean() / zero(out).sum()) + out.mean(), "nan_to_num"),
        (lambda out: (out.mean() / zero(out).sum()).clamp(max=9) + out.mean(), "clamp"),
    ],
    ids=["nan_to_num", "clamp"],
)
def test_a_loss_that_is_made_finite_is_noted(loss_of, op):
    (first, *_) = origins(loss_of=loss_of).masked
    assert (first.op, first.origin.op) == (op, "div")


def test_rows_of_a_loss_that_are_set_in_place_are_noted():
    def loss_of(out):
        rows = F.mse_loss(out, torch.cat([out.detach()[:-1], out.detach()[-1:] / 0]), reduction="none")
        rows[rows.isinf()] = 0.0
        return rows.mean() + out.mean()

    (first, *_) = origins(loss_of=loss_of).masked
    assert first.op == "__setitem__"


def test_a_number_for_the_log_is_no_loss():
    def loss_of(out):
        (out.mean() / zero(out).sum()).clamp(max=9).item()
        return out.square().mean()

    assert origins(loss_of=loss_of).masked == []


def test_modules_before_it_are_shown_with_their_ranges():
    trail = origins(lambda h: zero(h) / zero(h)).root.trail
    assert len(trail) == 1
    assert trail[0].startswith("body [")
