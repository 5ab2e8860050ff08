"""The trajectory of a loop: what is in it, that it is the same when it is made again, and its way through a file."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import CannotDecide, UsageError
from pytest_trainloop.instruments.baselines.as_json import text_of, trajectory_of
from pytest_trainloop.instruments.baselines.capture import captured
from pytest_trainloop.instruments.baselines.trajectory import thinned
from pytest_trainloop.runs.evidence import Evidence


def make():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1))
    frozen = model[0].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[3].weight], "weight_decay": 0.1},
        {"params": [model[1].weight, model[1].bias, model[3].bias, frozen], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            F.mse_loss(model(batch["x"]), batch["y"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 1)}
    return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batch=batch, fit=fit)


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def plain(train, model=None, kind=torch.optim.SGD, **options):
    """A loop of one linear layer that ``train`` trains."""

    def make():
        net = nn.Linear(4, 1) if model is None else model()
        optimizer = kind(net.parameters(), lr=0.1, **options)
        batch = torch.randn(8, 4), torch.randn(8, 1)
        return TrainLoop(
            model=net, optimizer=optimizer, batch=batch, fit=lambda batches: train(net, optimizer, batches)
        )

    return make


@pytest.fixture(scope="module")
def evidence():
    return Evidence(make)


@pytest.fixture(scope="module")
def trajectory(evidence):
    return captured(evidence)


def test_it_is_the_same_when_it_is_made_again(evidence, trajectory):
    assert captured(evidence, trajectory.made) == trajectory


def test_a_file_gives_back_what_it_keeps(trajectory):
    kept = thinned(trajectory)
    text = text_of(kept)
    again = trajectory_of(text, "a.json", "record it again")
    assert text_of(again) == text
    assert text_of(thinned(again)) == text
    for mine, its in ((kept.own, again.own), (kept.double, again.double)):
        assert dataclasses.replace(mine, steps=()) == dataclasses.replace(its, steps=())
        assert [step.weights for step in mine.steps] == [step.weights for step in its.steps]
    assert len(text) < 40_000
    assert max(map(len, text.splitlines())) <= 500
    assert "py:" not in text


def test_a_closure_that_is_called_again_does_not_replace_the_first_gradient():
    def by_closures(model, optimizer, batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    step = captured(Evidence(plain(by_closures, kind=torch.optim.LBFGS, max_iter=3))).double.steps[0]
    assert len(step.losses) == 3
    assert step.losses[0] > step.losses[-1]
    assert step.gradients["weight"].squares > 0


def test_a_loop_without_steps_has_no_trajectory():
    def train(model, optimizer, batches):
        for x, y in batches:
            gradients = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient

    with pytest.raises(CannotDecide, match="no optimizer makes a step"):
        captured(Evidence(plain(train)))


def test_a_loop_that_raises_has_no_trajectory():
    def raising(model, optimizer, batches):
        train(model, optimizer, [next(iter(batches))])
        raise KeyError("loss")

    with pytest.raises(CannotDecide, match="fit raises KeyError: 'loss'"):
        captured(Evidence(plain(raising)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:200], "is no JSON"),
        (lambda text: text.replace('"steps"', '"stops"', 1), "'steps' is missing"),
        (lambda text: text.replace('"losses": [', '"losses": ["high", ', 1), "not as it was written"),
        (
            lambda text: text.replace('"format": 1', '"format": 9'),
            "has format 9, and this pytest-trainloop reads up to 1",
        ),
        (lambda text: "[]", "not as it was written"),
        (lambda text: "<<<<<<< HEAD\n" + text, "is no JSON"),
    ],
)
def test_a_file_that_is_no_baseline_is_one_sentence(trajectory, change, sentence):
    text = text_of(thinned(trajectory))
    with pytest.raises(UsageError, match=r"tests/a\.json") as raised:
        trajectory_of(change(text), "tests/a.json", "restore it, or record it again: pytest --trainloop-update")
    assert sentence in str(raised.value)
    assert "record it again: pytest --trainloop-update" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_that_are_not_finite_are_text_in_the_file(trajectory):
    step = dataclasses.replace(trajectory.own.steps[0], losses=(float("nan"), float("-inf")))
    own = dataclasses.replace(trajectory.own, steps=(step, *trajectory.own.steps[1:]))
    text = text_of(thinned(dataclasses.replace(trajectory, own=own)))
    assert json.loads(text)["own"]["steps"][0]["losses"] == ["nan", "-inf"]
    assert trajectory_of(text, "", "").own.steps[0].losses[1] == float("-inf")
