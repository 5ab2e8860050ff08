"""What is drawn and picked in one precision is drawn and picked in another."""

import torch
import torch.nn.functional as F

from pytest_trainloop.checks.numerics.precision_parity.replay import Choices, RecordChoices, ReplayChoices
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
