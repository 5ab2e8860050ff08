"""What is drawn and picked in one precision is drawn and picked in another; products are rounded to a dtype's digits,
its range left aside."""

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.checks.numerics.precision_parity.modes import (
    LARGE,
    Choices,
    RecordChoices,
    ReplayChoices,
    Rounded,
    unit_roundoff,
)
from pytest_trainloop.runs.float64 import double_precision


@pytest.fixture
def choices():
    return Choices()


def draw():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    in_place = torch.empty(2, 2).uniform_(-1.0, 1.0)
    return [layer.weight.detach(), torch.randn(5), in_place, F.dropout(torch.ones(40), 0.5), torch.randperm(7)]


def test_float64_draws_what_float32_drew(choices):
    with RecordChoices(choices):
        single = draw()
    with double_precision(), ReplayChoices(choices, picks=False) as replaying:
        double = draw()
    assert replaying.mismatch == ""
    assert {t.dtype for t in double[:4]} == {torch.float64}
    assert all(torch.allclose(a.double(), b.double(), rtol=1e-6) for a, b in zip(single, double, strict=True))


def test_another_order_of_draws_is_a_mismatch(choices):
    with RecordChoices(choices):
        torch.randn(3)
        torch.rand(3)
    with ReplayChoices(choices, picks=False) as replaying:
        torch.rand(3)
    assert replaying.mismatch == "rand is drawn where randn was"


def test_picks_of_another_precision_are_taken_with_their_own_values(choices):
    def picked(scores):
        return *scores.topk(2, dim=-1), *scores.max(1), scores.argmax(0), scores > 0.5

    near = torch.tensor([[0.5, 0.501, 0.1], [0.2, 0.9, 0.899]], dtype=torch.float64)
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


FILLS = {
    "normal": lambda t: t.normal_(0.0, 0.02),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.exponential_(2.0),
    "whole numbers": lambda t: t.random_(0, 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_a_large_tensor_is_drawn_again(fill, dtype, choices):
    low, wide = (torch.empty((3, LARGE // 2), dtype=d) for d in (dtype, torch.float64))
    with RecordChoices(choices):
        fill(low)
        after = torch.rand(3)
    before = torch.get_rng_state()
    choices.draws[0][1]()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    with double_precision(), ReplayChoices(choices, picks=False) as replaying:
        fill(wide)
        then = torch.rand(3)
    assert replaying.mismatch == ""
    assert torch.equal(wide, low.double())
    assert torch.equal(then.float(), after)


def test_a_generator_of_the_projects_own_and_parts_of_tensors_are_kept_as_they_were_drawn(choices):
    table, generator = torch.empty(4, LARGE), torch.Generator().manual_seed(5)
    with RecordChoices(choices):
        drawn = [table[:, ::2].normal_().clone(), table.normal_(generator=generator).clone(), torch.normal(table, 1.0)]
    assert all(torch.equal(again()[0], t) for (_, again), t in zip(choices.draws, drawn, strict=True))


def test_low_results_and_products_are_noted(choices):
    with RecordChoices(choices), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.Linear(4, 2)(torch.ones(3, 4))
    assert choices.low == {torch.bfloat16}
    assert [low for _, low in choices.products] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_to_nearest_within_the_range_of_float64(dtype):
    g = torch.Generator().manual_seed(0)  # torch itself rounds to float16 by way of float32, twice for one in 10^4
    a, b = (torch.randn(6, 7, dtype=torch.float64, generator=g)[:n, :m] for n, m in ((6, 5), (5, 7)))
    with Rounded(dtype, []):
        got, large = a @ b, (3e5 * a) @ (3e295 * b)
    assert torch.equal(got, (a.to(dtype).double() @ b.to(dtype).double()).to(dtype).double())
    assert bool(large.isfinite().all())


def test_only_what_was_low_is_rounded():
    x, y = torch.full((1, 1), 1 / 3, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    with Rounded(torch.bfloat16, [("mm", False), ("mm", True)]):
        first, second = x.mm(y), x.mm(y)
    assert torch.equal(first, x)
    assert not torch.equal(second, x)


def test_noise_is_of_the_same_size_repeats_and_is_no_draw_of_the_loops(choices):
    x, one = torch.ones(500, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)

    def once(seed):
        with RecordChoices(choices), Rounded(torch.bfloat16, [], noise=seed):
            return x @ one

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert float((once(1) - 1).abs().max()) <= 3.1 * unit_roundoff(torch.bfloat16)
    assert not choices.draws
