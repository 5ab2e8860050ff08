"""Dropout that acts in evaluation mode: which calls are noted, and whether they were written so."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.tracing.dropout_in_evaluation import DropoutInEvaluation
from pytest_trainloop.recording.watch import Watch


class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.own, self.listed, self.share = nn.Dropout(0.3), [nn.Dropout(0.2)], 0.1
        self.drop = drop

    def forward(self, x):
        return self.head(self.drop(self, self.body(x).relu()))


class OnItsInput(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))


def evaluations(model, evaluate, *, steps=14):
    """What is noted while the model trains and is evaluated in turn."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = DropoutInEvaluation()
    with Watch({"": model}, [optimizer]) as watch, contextlib.ExitStack() as stack:
        for context in seen.contexts(watch):
            stack.enter_context(context)
        for _ in range(steps):
            model.train()
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            model.eval()
            evaluate(model)
    return seen.found


def without_gradients(model):
    with torch.no_grad():
        model(torch.randn(5, 4))


def attend(h, share):
    return F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=share)[0]


ACTING = {
    "left_out": lambda net, h: F.dropout(h, 0.5),
    "left_out over lines": lambda net, h: F.dropout(
        h,
        p=0.5,
    ),
    "left_out of dropout2d": lambda net, h: F.dropout2d(h[None, None], 0.5)[0, 0],
    "no_switch": lambda net, h: attend(h, net.share),
    "unregistered, made in forward": lambda net, h: nn.Dropout(0.5)(h),
    "unregistered, in a list": lambda net, h: net.listed[0](h),
    "written": lambda net, h: F.dropout(h, 0.5, training=True),
    "written by position": lambda net, h: torch.dropout(h, 0.5, True),
    "unknown, bound before": lambda net, h: functools.partial(F.dropout, p=0.5)(h),
    "unknown, unpacked": lambda net, h: F.dropout(h, **{"p": 0.5}),
}


@pytest.mark.parametrize("case", ACTING)
@pytest.mark.parametrize("evaluate", [without_gradients, lambda model: model(torch.randn(5, 4))])
def test_dropout_that_acts_is_noted_with_the_reason(case, evaluate):
    (found,) = evaluations(Net(ACTING[case]), evaluate)
    assert found.why == case.split(",")[0].split()[0]
    assert found.level == ("advice" if found.why in ("written", "unknown") else "fault")
    assert not found.samples
    assert "dropout" in found.place.code or "net." in found.place.code or "lambda" in found.place.code


SILENT = {
    "the module's mode": lambda net, h: F.dropout(h, 0.5, net.training),
    "a part of the model": lambda net, h: net.own(h),
    "attention by the mode": lambda net, h: attend(h, 0.1 if net.training else 0.0),
    "no share": lambda net, h: F.dropout(h, 0.0),
}


@pytest.mark.parametrize("case", SILENT)
def test_dropout_by_the_mode_is_not_noted(case):
    assert evaluations(Net(SILENT[case]), without_gradients) == []


def test_a_part_that_is_switched_on_for_samples_is_not_noted():
    def sample(model):
        model.own.train()
        without_gradients(model)

    assert evaluations(Net(SILENT["a part of the model"]), sample) == []


def test_the_same_inputs_in_a_row_are_samples():
    x = torch.randn(5, 4)

    def sample(model):
        with torch.no_grad():
            torch.stack([model(x) for _ in range(3)]).std(0)

    (found,) = evaluations(Net(ACTING["left_out"]), sample)
    assert found.samples
    assert found.level == "advice"


def test_the_same_validation_batch_after_each_step_is_no_sample():
    x = torch.randn(5, 4)

    def validate(model):
        with torch.no_grad():
            model(x)

    (found,) = evaluations(Net(ACTING["left_out"]), validate)
    assert found.level == "fault"


def test_rows_that_repeat_are_samples():
    def sample(model):
        with torch.no_grad():
            model(torch.randn(5, 4).repeat(8, 1))

    (found,) = evaluations(Net(ACTING["left_out"]), sample)
    assert found.samples


def test_the_models_own_inputs_may_be_corrupted_on_purpose():
    (found,) = evaluations(OnItsInput(SILENT["the module's mode"]), without_gradients)
    assert found.on_input
    assert found.level == "advice"


def test_a_pass_that_trains_in_evaluation_mode_is_no_evaluation():
    def train_once_more(model):
        model(torch.randn(5, 4)).sum().backward()

    assert evaluations(Net(ACTING["left_out"]), train_once_more, steps=6) == []


def test_a_method_that_is_no_forward_is_looked_into():
    class Encoder(Net):
        def encode(self, x):
            return F.dropout(self.body(x), 0.5)

    def encode(model):
        with torch.no_grad():
            model.encode(torch.randn(5, 4))

    (found,) = evaluations(Encoder(SILENT["the module's mode"]), encode)
    assert found.why == "left_out"
    assert "encode" not in found.module
