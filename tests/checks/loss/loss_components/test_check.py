"""What ``loss_components`` says of parts that it cannot judge, and what it gives the card."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError
from pytest_trainloop.checks.loss.loss_components.weights import terms
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.frontends.api import check_loop
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.plain import loop


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def size(model, batch):
    return model(batch[0]).square().mean()


def maker(parts, loss=None, **fields):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for batch in batches:
                optimizer.zero_grad()
                (loss or (lambda m, b: ce(m, b) + 0.1 * size(m, b)))(model, batch).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=parts, **fields)

    return make


def judged(parts, loss=None, **fields):
    return check_loop(maker(parts, loss, **fields), only=["loss_components"], raises=False).results[0]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (lambda m, b: ce(m, b), "TrainLoop.parts returned a tensor of shape (); a mapping"),
        (lambda _m, _b: {}, "TrainLoop.parts returned an empty mapping; a mapping of each term's name"),
        (lambda _m, _b: None, "TrainLoop.parts returned None; a mapping"),
        (lambda m, b: {"ce": m(b[0])}, "TrainLoop.parts gives 'ce' as a tensor of shape (16, 3); one number"),
        (lambda _m, _b: {"ce": "low"}, "TrainLoop.parts gives 'ce' as the string 'low'; a number or a tensor"),
        (lambda m, b: {"ce": (1.0, ce(m, b), 2)}, "TrainLoop.parts gives 'ce' as a tuple"),
    ],
)
def test_what_is_no_mapping_of_terms_is_refused_with_its_line(parts, said):
    with pytest.raises(UsageError, match=r"test_check\.py:\d+") as refused:
        judged(parts)
    assert str(refused.value).startswith(said)


def test_an_exception_of_parts_is_an_error_of_this_check_alone():
    result = judged(lambda m, b: {"ce": m(b["x"])})
    assert result.outcome == "error"
    assert "TrainLoop.parts raised TypeError" in result.reason


@pytest.mark.parametrize(
    ("parts", "loss", "said"),
    [
        (
            lambda m, b: {"total": ce(m, b) + 0.1 * size(m, b), "ce": ce(m, b), "size": 0.1 * size(m, b)},
            None,
            "total of parts= is itself a sum of ce and size",
        ),
        (
            lambda m, b: {"ce": F.cross_entropy(m(b[0] + torch.randn_like(b[0])), b[1])},
            None,
            "parts draws other random numbers than the loop",
        ),
        (
            lambda m, b: {"ce": ce(m, b), "nan": torch.tensor(math.nan)},
            None,
            "nan of parts= is nan at some step (see finite)",
        ),
        (
            lambda m, b: {"ce": ce(m, b).item()},
            None,
            "the parts are numbers without a history, and no constant weights of them give the loss",
        ),
        (
            lambda m, b: {"ce": ce(m, b)},
            lambda m, b: F.cross_entropy(m(b[0] * (1 + numpy.random.rand())), b[1]),
            "the loop draws random numbers outside of torch",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_skip_that_says_why(parts, loss, said):
    result = judged(parts, loss)
    assert (result.outcome, result.reason[: len(said)]) == ("skipped", said)


def test_a_loop_that_makes_its_own_data_is_asked_for_them():
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inside = data.labelled(seed=5)
        return loop(
            model, data.labelled(), lambda model, _: ce(model, inside), optimizer, parts=lambda m, b: {"ce": ce(m, b)}
        )

    (result,) = check_loop(make, only=["loss_components"], raises=False).results
    assert (result.outcome, result.needs) == ("skipped", "batches=")


def test_without_parts_it_is_a_skip_that_names_the_field():
    result = judged(None)
    assert (result.outcome, result.reason) == ("skipped", "TrainLoop.parts is not given")
    with pytest.raises(CannotDecide):
        terms(Evidence(maker(None)))


def test_a_hidden_state_that_the_loop_carries_is_no_missing_term():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.RNNCell(6, 8), nn.Linear(8, 3)

        def forward(self, x, hidden=None):
            hidden = self.cell(x, hidden)
            return self.head(hidden), hidden

    def make():
        model = Carrying()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            hidden = None
            for x, labels in batches:
                scores, hidden = model(x, hidden)
                hidden = hidden.detach()
                optimizer.zero_grad()
                F.cross_entropy(scores, labels).backward()
                optimizer.step()

        def parts(model, batch):
            return {"ce": F.cross_entropy(model(batch[0])[0], batch[1])}

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit, parts=parts)

    (result,) = check_loop(make, only=["loss_components"], raises=False).results
    assert result.outcome == "skipped"
    assert "carries from batch to batch" in result.reason


def test_the_terms_have_the_weights_that_are_trained_and_their_shares_of_the_gradient():
    found = Evidence(maker(lambda m, b: {"ce": ce(m, b), "size": (0.1, size(m, b))})).shared(terms)
    assert [t.name for t in found.weights] == ["ce", "size"]
    assert [t.trained for t in found.weights] == pytest.approx([1.0, 0.1])
    assert sum(t.share for t in found.weights) == pytest.approx(1)
    assert found.weights[1].plain > 0.01  # without its weight
    assert found.factor == 1
    assert "backward()" in found.place


def test_the_terms_have_the_factor_of_all_and_weights_that_move():
    steps = iter(range(1000))
    parts = {"parts": lambda m, b: {"ce": ce(m, b), "size": size(m, b)}}
    halved = Evidence(maker(**parts, loss=lambda m, b: (ce(m, b) + size(m, b)) / 2)).shared(terms)
    assert halved.factor == pytest.approx(0.5)
    moving = Evidence(maker(**parts, loss=lambda m, b: ce(m, b) + next(steps) / 1000 * size(m, b))).shared(terms)
    assert [t.how for t in moving.weights] == ["agrees", "anneals"]


def test_nothing_of_the_users_is_changed_by_the_look_at_its_parts():
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    judged(lambda m, b: {"ce": ce(m.eval(), b), "size": (0.1, size(m, b))})
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_default_dtype(), torch.is_grad_enabled())
