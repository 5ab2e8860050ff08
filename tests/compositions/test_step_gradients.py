"""The gradient that the first step reads on a composition of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.compositions.composition import Composition
from pytest_trainloop.instruments.compositions.step_gradients import StepGradients, combined
from pytest_trainloop.runs.evidence import Evidence


def evidence(loss=F.cross_entropy, *, window=1, least=1, knob=True, refuses=None, **fields):
    def make(accumulate=1):
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                if len(x) < least:
                    raise ValueError(f"at least {least} rows")
                if x.dtype is refuses:
                    raise TypeError("no such kernel")
                (loss(model(x), y) / accumulate).backward()
                if i % (accumulate * window) == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(torch.randn(8, 3), torch.randint(5, (8,))), fit=fit, **fields
        )

    if knob:
        return Evidence(make, knobs={"accumulate": "accumulate"})
    return Evidence(lambda: make())


def made(**given):
    return evidence(**given).shared(StepGradients.of)


def test_micro_batches_need_the_knob():
    with pytest.raises(CannotDecide, match="accumulate"):
        made(knob=False).at(Composition((0, 1), (1, 1)))


def test_a_loop_that_takes_no_float64_is_run_in_its_own_precision():
    gradients = made(refuses=torch.float64)
    found = gradients.at(Composition((2, 3)))
    assert not found.refused
    assert gradients.bound(found) > 1e-5


def noisy(knob, draw):
    def loss(out, y):
        return ((out + draw(out)) ** 2).mean()

    return evidence(loss=loss, knob=knob)


def test_a_row_keeps_its_noise_in_every_composition():
    seen = noisy(knob=False, draw=torch.randn_like)
    gradients = seen.shared(StepGradients.of)
    whole = gradients.at(Composition((0, 1, 2)))
    made = combined(whole, gradients.parts(Composition((0, 1, 2), (1, 1, 1))), 0)
    assert made.weights == pytest.approx([1 / 3] * 3)
    assert made.residual < 1e-12
    assert gradients.differ(whole, gradients.at(Composition((2, 0, 1)))) < gradients.bound(whole)
    alike = noisy(knob=True, draw=torch.randn_like).shared(StepGradients.of).at(Composition((0, 1, 2)))
    assert gradients.differ(whole, alike) > 1e-3


@pytest.mark.parametrize(
    "draw",
    [
        lambda out: torch.randn(4, len(out), 5).mean(0),
        lambda out: torch.stack([torch.randn(5) for _ in out]),
        lambda out: torch.randn(len(out) * 2, 5)[::2],
    ],
    ids=["samples in front", "row by row", "views behind each other"],
)
def test_noise_of_other_shapes_adds_up_as_well(draw):
    gradients = noisy(knob=False, draw=draw).shared(StepGradients.of)
    made = combined(gradients.at(Composition((0, 1, 2))), gradients.parts(Composition((0, 1, 2), (1, 1, 1))), 0)
    assert made.residual < 1e-12
    assert not gradients.drawn_otherwise()


def test_a_draw_that_is_no_rows_own_is_named():
    gradients = noisy(knob=False, draw=lambda out: torch.randn(len(out) + 1, 5)[1:]).shared(StepGradients.of)
    gradients.at(Composition((0, 1, 2)))
    (named,) = gradients.drawn_otherwise()
    assert named.startswith("randn of shape (4, 5), ")


@pytest.mark.parametrize("parts", [(), (2, 2)])
def test_noise_with_rows_behind_its_first_axis_is_the_same_for_all_with_the_knob(parts):
    gradients = noisy(knob=True, draw=lambda out: torch.randn(3, len(out), 5).mean(0)).shared(StepGradients.of)
    whole = gradients.at(Composition((0, 1, 2, 3), parts))
    halves = [gradients.at(Composition((0, 1))), gradients.at(Composition((2, 3)))]
    made = combined(whole, halves, 0)
    assert made.weights == pytest.approx([0.5, 0.5])
    assert made.residual < 1e-12


def test_a_loop_that_refuses_few_rows_says_so():
    gradients = made(least=8)
    few = Composition((2, 3))
    assert "at least 8 rows" in gradients.at(few).refused
    assert gradients.differ(gradients.at(few), gradients.at(few)) == float("inf")
