"""The trajectory of a loop: what is in it, that it is the same when it is made again, and its way through a file."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.baselines.as_json import text_of, trajectory_of
from pytest_trainloop.baselines.capture import captured, course
from pytest_trainloop.baselines.repeat import first_difference
from pytest_trainloop.baselines.thinned import thinned
from pytest_trainloop.errors import CannotDecide, UsageError
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


def plain(train, model=None):
    """A loop of one linear layer that ``train`` trains."""

    def make():
        net = nn.Linear(4, 1) if model is None else model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
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


def test_steps_are_recorded_in_full_and_then_thinned(trajectory):
    steps = trajectory.double.steps
    assert [step.number for step in steps] == list(range(1, 25))
    assert [step.number for step in steps if step.weights] == [*range(1, 13), 16, 20, 24]
    assert [step.number for step in steps if step.calls is not None] == list(range(1, 13))
    assert all(len(step.losses) == 1 for step in steps)
    assert [step.rates[1] for step in steps] == pytest.approx([0.01 / number for number in range(1, 25)])


def test_a_step_has_what_the_optimizer_read_and_what_it_made_of_it(trajectory):
    step = trajectory.double.steps[0]
    assert set(step.gradients) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert sum(digest.squares for digest in step.gradients.values()) == pytest.approx(1.0, rel=1e-5)  # clipped
    assert step.clips[0] > 1.0
    assert step.updates["0.bias"] == 0.0
    assert step.updates["0.weight"] > 0.0
    assert step.weights["0.bias"] == trajectory.double.tensors["0.bias"].start
    assert step.weights["1.num_batches_tracked"].total == 1.0


def test_calls_of_modules_are_in_the_order_in_which_they_came_back(trajectory):
    calls = trajectory.double.steps[0].calls
    assert [call.path for call in calls] == ["0", "1", "2", "3", "Sequential"]
    assert calls[0].gave == calls[1].given
    assert calls[-1].given == calls[0].given == trajectory.double.batches[0][0].values
    assert {call.dtype for call in calls} == {"float64"}
    assert {call.dtype for call in trajectory.own.steps[0].calls} == {"float32"}


def test_events_are_words_without_lines(trajectory):
    step = trajectory.double.steps[1]
    assert [event.what for event in step.events] == [
        *("LambdaLR.step()", "zero_grad", "forward of Sequential", "mse_loss(mean)", "backward"),
        *("clip_grad_norm_(1)", "step"),
    ]
    assert step.events[-1].where.endswith("optimizer.step()")


def test_facts_are_those_of_the_loop_and_not_of_float64(trajectory):
    weight = trajectory.double.tensors["0.weight"]
    assert (weight.shape, weight.dtype, weight.module, weight.owner) == ((6, 4), "float32", "Linear", "0")
    assert trajectory.double.buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    groups = trajectory.double.optimizers[0].groups
    assert [group.options["weight_decay"] for group in groups] == ["0.1", "0.0"]
    assert groups[1].parameters == ("1.weight", "1.bias", "3.bias", "0.bias")
    (scheduler,) = trajectory.own.schedulers
    assert "py" not in str(scheduler.settings)  # no line, and no identity of an object


def test_it_is_the_same_when_it_is_made_again(evidence, trajectory):
    assert captured(evidence, trajectory.made) == trajectory


def test_a_file_gives_back_what_it_keeps(trajectory):
    kept = thinned(trajectory)
    text = text_of(kept)
    again = trajectory_of(text, "a.json", "record it anew")
    assert text_of(again) == text
    assert text_of(thinned(again)) == text
    assert without_lines(again.double) == without_lines(kept.double)
    assert without_lines(again.own) == without_lines(kept.own)
    assert len(text) < 40_000
    assert max(map(len, text.splitlines())) <= 500
    assert "py:" not in text


def without_lines(course):
    """A course without the lines of code, which no file keeps."""
    return dataclasses.replace(
        course,
        steps=tuple(
            dataclasses.replace(
                step,
                where="",
                events=None
                if step.events is None
                else tuple(dataclasses.replace(event, where="") for event in step.events),
            )
            for step in course.steps
        ),
    )


def test_a_nudge_moves_each_weight_by_one_rounding(evidence, trajectory):
    moved = course(evidence, trajectory.made, double=True, nudge=1)
    pairs = [(t.start.norm, moved.tensors[name].start.norm) for name, t in trajectory.double.parameters.items()]
    assert all(a == pytest.approx(b, rel=1e-15) for a, b in pairs)
    assert first_difference(trajectory.double, moved)
    assert not first_difference(trajectory.double, moved, rounded=1e-6)
    far = course(evidence, trajectory.made, double=True, nudge={"3.weight": 0.1})
    assert first_difference(trajectory.double, far, rounded=1e-6) == "the initial 3.weight"


def test_other_draws_are_a_difference(trajectory):
    other = captured(Evidence(make, seed=1))
    assert first_difference(trajectory.double, other.double, rounded=1e-6) == "the initial 0.weight"


def test_tied_weights_have_all_their_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x)).sum(1, keepdim=True)

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    found = captured(Evidence(plain(train, Tied)))
    assert found.own.tensors["first.weight"].also == ("second.weight",)


def test_a_closure_that_is_called_again_does_not_replace_the_first_gradient():
    def make():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def fit(batches):
            for x, y in batches:

                def closure(x=x, y=y):
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 4), torch.randn(8, 1)), fit=fit)

    step = captured(Evidence(make)).double.steps[0]
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
    def train(model, optimizer, batches):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if number == 3:
                raise KeyError("loss")

    with pytest.raises(CannotDecide, match="fit raises KeyError: 'loss'"):
        captured(Evidence(plain(train)))


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
        trajectory_of(change(text), "tests/a.json", "restore it, or record it anew: pytest --trainloop-update")
    assert sentence in str(raised.value)
    assert "record it anew: pytest --trainloop-update" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_numbers_that_are_not_finite_are_text_in_the_file(trajectory):
    step = dataclasses.replace(trajectory.own.steps[0], losses=(float("nan"), float("-inf")))
    own = dataclasses.replace(trajectory.own, steps=(step, *trajectory.own.steps[1:]))
    text = text_of(thinned(dataclasses.replace(trajectory, own=own)))
    assert json.loads(text)["own"]["steps"][0]["losses"] == ["nan", "-inf"]
    assert trajectory_of(text, "", "").own.steps[0].losses[1] == float("-inf")
