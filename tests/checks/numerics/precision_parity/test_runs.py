"""What is judged of a loop in low precision, and what is not."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from pytest_trainloop.api import check_loop

COUNT = itertools.count()


def loop(loss_of, **given):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 4), torch.randint(2, (8,)))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **given)


def only(make):
    (result,) = check_loop(make, only=["precision_parity"], raises=False).results
    return result


def plain(model, x, y):
    return F.cross_entropy(model(x), y)


def test_a_value_that_the_knob_does_not_offer_is_passed_over():
    def make(precision="fp32"):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

        def loss_of(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                return plain(model, x, y)

        return loop(loss_of)

    assert only(make).outcome == "passed"


def test_a_knob_whose_loop_raises_says_so():
    def make(precision="fp32"):
        def loss_of(model, x, y):
            low = precision != "fp32"
            return plain(model, x.bfloat16() if low else x, y)

        return loop(loss_of)

    result = only(make)
    assert result.outcome == "skipped"
    assert "with precision='bf16' the loop raises RuntimeError" in result.reason


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ({}, "with precision='bf16' building the loop raised KeyError: 'bf16'"),
        (dict.fromkeys(("bf16", "fp16"), torch.float32), "with precision='bf16' nothing is computed in low precision"),
    ],
    ids=["other-names", "not-passed-on"],
)
def test_a_knob_that_does_nothing_gives_the_reason(dtypes, reason):
    def make(precision="fp32"):
        dtype = {"fp32": torch.float32, **dtypes}[precision]

        def loss_of(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not torch.float32):
                return plain(model, x, y)

        return loop(loss_of)

    result = only(make)
    assert result.outcome == "skipped"
    assert result.reason.startswith(reason)


def test_a_loop_that_refuses_autocast_gives_the_reason():
    def loss_of(model, x, y):
        with torch.autocast("cpu", enabled=False):
            return plain(model, x, y)

    result = only(lambda: loop(loss_of))
    assert result.outcome == "skipped"
    assert result.reason.startswith("nothing of this loop is computed in low precision")


def test_draws_without_a_seed_are_no_fault():
    def make(precision="bf16"):
        def loss_of(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
                logits = model(x)
            weight = torch.tensor([1.0, 2.0 + next(COUNT) % 7])
            return F.cross_entropy(logits.float(), y, weight=weight)

        return loop(loss_of)

    assert only(make).outcome in ("passed", "unreliable")


def test_a_low_precision_batch_is_data():
    def make():
        given = loop(lambda model, x, y: plain(model, x.float(), y))
        x, y = given.batch
        given.batch = (x.bfloat16(), y)
        return given

    assert only(make).outcome == "passed"


def test_a_buffer_made_in_low_precision_does_not():
    def make():
        def loss_of(model, x, y):
            return F.mse_loss(model(x) * model.keep.float(), F.one_hot(y, 2).float())

        given = loop(loss_of)
        given.model.register_buffer("keep", torch.cumprod(torch.full((1000,), 0.999).bfloat16(), 0)[-2:])
        return given

    result = only(make)
    assert [f.cause for f in result.faults] == ["precision_lost"]


def test_a_loop_without_low_precision_gets_advice_at_most():
    def loss_of(model, x, y):
        h = model(x) + 300.0
        centred = h - h.mean(0)
        return (centred.square().mean() - 1.0).square()

    result = only(lambda: loop(loss_of))
    assert result.outcome == "passed"
    assert {f.level for f in result.findings} <= {"advice"}
