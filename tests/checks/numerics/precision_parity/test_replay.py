"""What is drawn and picked in one precision is drawn and picked in another."""

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.checks.numerics.precision_parity.replay import (
    LARGE,
    Choices,
    RecordChoices,
    Redraw,
    ReplayChoices,
)
from pytest_trainloop.runs.float64 import double_precision


def draw():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    noise = torch.randn(5)
    in_place = torch.empty(2, 2).uniform_(-1.0, 1.0)
    dropped = F.dropout(torch.ones(40), 0.5)
    return [layer.weight.detach(), noise, in_place, dropped, torch.randperm(7)]


def test_float64_draws_what_float32_drew():
    choices = Choices()
    with RecordChoices(choices):
        single = draw()
    with double_precision(), ReplayChoices(choices, picks=False) as replaying:
        double = draw()
    assert replaying.mismatch == ""
    assert {t.dtype for t in double[:4]} == {torch.float64}
    assert all(torch.allclose(a.double(), b.double(), rtol=1e-6) for a, b in zip(single, double, strict=True))


def test_another_order_of_draws_is_a_mismatch():
    choices = Choices()
    with RecordChoices(choices):
        torch.randn(3)
        torch.rand(3)
    with ReplayChoices(choices, picks=False) as replaying:
        torch.rand(3)
    assert replaying.mismatch == "rand is drawn where randn was"


def picked(scores):
    values, places = scores.topk(2, dim=-1)
    highest, at = scores.max(1)
    return values, places, highest, at, scores.argmax(0), scores > 0.5


def test_picks_of_another_precision_are_taken_with_their_own_values():
    near = torch.tensor([[0.5, 0.501, 0.1], [0.2, 0.9, 0.899]], dtype=torch.float64)
    choices = Choices()
    with RecordChoices(choices):
        low = picked(near.bfloat16())
    with ReplayChoices(choices, picks=True) as replaying:
        values, places, highest, at, column, above = picked(near)
    assert replaying.picked_otherwise
    assert torch.equal(places, low[1])
    assert torch.equal(values, near.gather(1, places))
    assert torch.equal(highest, near.gather(1, at[:, None])[:, 0])
    assert torch.equal(column, low[4])
    assert torch.equal(above, low[5])


def test_low_results_and_products_are_noted():
    choices = Choices()
    with RecordChoices(choices), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.Linear(4, 2)(torch.ones(3, 4))
    assert list(choices.low) == [torch.bfloat16]
    assert [low for _, low in choices.products] == [True]


FILLS = {
    "normal": lambda t: t.normal_(0.0, 0.02),
    "uniform": lambda t: t.uniform_(-1.0, 1.0),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(2.0),
    "whole numbers": lambda t: t.random_(0, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_a_large_tensor_is_drawn_again_and_not_kept(fill, dtype):
    choices, shape = Choices(), (3, LARGE // 2)
    low, wide = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=torch.float64)
    with RecordChoices(choices):
        fill(low)
        after = torch.rand(3)
    torch.manual_seed(3)
    with double_precision(), ReplayChoices(choices, picks=False) as replaying:
        fill(wide)
        then = torch.rand(3)
    assert isinstance(choices.draws[0][1], Redraw)
    assert replaying.mismatch == ""
    assert torch.equal(wide, low.double())
    assert torch.equal(then.float(), after)


def test_a_generator_of_the_projects_own_and_parts_of_tensors_are_kept_as_they_were_drawn():
    choices, table = Choices(), torch.empty(4, LARGE)
    with RecordChoices(choices):
        table[:, ::2].normal_()
        table.normal_(generator=torch.Generator().manual_seed(5))
        torch.normal(table, 1.0)
    assert not any(isinstance(drawn, Redraw) for _, drawn in choices.draws)
    assert len(choices.draws) == 3


def test_a_redraw_leaves_the_generator_as_it_is():
    choices = Choices()
    with RecordChoices(choices):
        torch.empty(LARGE).normal_()
    before = torch.get_rng_state()
    choices.draws[0][1].again()
    assert torch.equal(torch.get_rng_state(), before)
