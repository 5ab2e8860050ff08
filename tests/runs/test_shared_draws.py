"""Draws that are the same for every row, however a batch is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.shared_draws import first_unlike

PROBABILITIES = torch.tensor([0.1, 0.2, 0.3, 0.4])
OWN = torch.Generator()

DRAWS = {
    "randn": lambda n: torch.randn(n, 4),
    "randn_of_a_size": lambda n: torch.randn((n, 4), generator=OWN),
    "randn_like": lambda n: torch.randn_like(torch.zeros(n, 4)),
    "normal_of_tensors": lambda n: torch.normal(torch.full((n, 4), 2.0), torch.ones(n, 4)),
    "normal_of_numbers": lambda n: torch.normal(2.0, 0.5, (n, 4)),
    "normal_in_place": lambda n: torch.empty(n, 4).normal_(2.0, std=0.5),
    "normal_distribution": lambda n: torch.distributions.Normal(torch.zeros(n, 4), 1.0).rsample(),
    "rand": lambda n: torch.rand(n, 4),
    "uniform_in_place": lambda n: torch.empty(n, 4).uniform_(2.0, 3.0),
    "uniform_init": lambda n: torch.nn.init.uniform_(torch.empty(n, 4), 2.0, 3.0),
    "randint_high": lambda n: torch.randint(10, (n, 4)),
    "randint_low_high": lambda n: torch.randint(5, 9, (n, 4)),
    "randint_by_name": lambda n: torch.randint(low=5, high=9, size=(n, 4)),
    "randint_like": lambda n: torch.randint_like(torch.zeros(n, 4), 5, 9),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 4), 0.5)),
    "bernoulli_method": lambda n: torch.zeros(n, 4).bernoulli(0.5),
    "bernoulli_in_place": lambda n: torch.empty(n, 4).bernoulli_(0.5),
    "exponential": lambda n: torch.empty(n, 4).exponential_(2.0),
    "multinomial": lambda n: torch.multinomial(PROBABILITIES.expand(n, 4), 2),
    "multinomial_replaced": lambda n: torch.multinomial(PROBABILITIES.expand(n, 4), 6, replacement=True),
    "categorical": lambda n: torch.distributions.Categorical(PROBABILITIES.expand(n, 4)).sample(),
    "gumbel_softmax": lambda n: F.gumbel_softmax(PROBABILITIES.expand(n, 4), tau=0.5),
    "gumbel_softmax_hard": lambda n: F.gumbel_softmax(PROBABILITIES.expand(n, 4), hard=True),
    "complex": lambda n: torch.randn(n, 4, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_row_is_the_same_however_many_there_are(name):
    draw = DRAWS[name]
    with NoRandomness():
        many, few = draw(20), draw(3)
    assert many.shape[1:] == few.shape[1:]
    assert torch.equal(many[:1].expand_as(many), many)
    assert torch.equal(many[:3], few)
    drawn = draw(3)
    assert (few.shape, few.dtype) == (drawn.shape, drawn.dtype)


@pytest.mark.parametrize(
    ("draw", "low", "high"),
    [
        (lambda: torch.rand(1, 1000), 0, 1),
        (lambda: torch.empty(1, 1000).uniform_(2.0, 3.0), 2, 3),
        (lambda: torch.nn.init.uniform_(torch.empty(1, 1000), 2.0, 3.0), 2, 3),
        (lambda: torch.randint(5, 9, (1, 1000)), 5, 8),
        (lambda: torch.randint(low=5, high=9, size=(1, 1000)), 5, 8),
        (lambda: torch.randint_like(torch.zeros(1, 1000), 9), 0, 8),
    ],
)
def test_values_stay_within_their_bounds_and_fill_them(draw, low, high):
    with NoRandomness():
        values = draw().double()
    assert low <= values.min() < low + 0.05
    assert high - 0.05 < values.max() <= high


def test_values_follow_their_distribution():
    with NoRandomness():
        normal = torch.empty(1, 4000).normal_(2.0, 0.5)
        coins = torch.bernoulli(torch.full((1, 4000), 0.3))
        waits = torch.empty(1, 4000).exponential_(2.0)
        drawn = torch.multinomial(PROBABILITIES, 4000, replacement=True)
    assert normal.mean() == pytest.approx(2.0, abs=0.05)
    assert normal.std() == pytest.approx(0.5, abs=0.05)
    assert coins.mean() == pytest.approx(0.3, abs=0.05)
    assert waits.mean() == pytest.approx(0.5, abs=0.05)
    assert torch.bincount(drawn, minlength=4) / 4000 == pytest.approx(PROBABILITIES, abs=0.05)


def test_samples_without_replacement_differ_from_each_other():
    with NoRandomness():
        drawn = torch.multinomial(PROBABILITIES.expand(5, 4), 4)
    assert drawn.sort(dim=1).values.tolist() == [[0, 1, 2, 3]] * 5


def test_an_entry_that_cannot_be_drawn_is_not():
    with NoRandomness():
        drawn = torch.multinomial(torch.tensor([0.0, 1.0, 0.0]).expand(5, 3), 1)
    assert drawn.tolist() == [[1]] * 5


def test_a_shuffle_leaves_rows_where_they_are():
    with NoRandomness():
        assert torch.randperm(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_gradients_go_through_reparameterised_draws():
    mean = torch.zeros(3, 4, requires_grad=True)
    logits = torch.zeros(3, 4, requires_grad=True)
    with NoRandomness():
        torch.distributions.Normal(mean, 1.0).rsample().sum().backward()
        (F.gumbel_softmax(logits, hard=True)[:, 0] * 2).sum().backward()
    assert mean.grad.tolist() == [[1.0] * 4] * 3
    assert logits.grad.abs().sum() > 0


def test_what_draws_nothing_is_left_alone():
    x = torch.randn(3, 4)
    with NoRandomness():
        assert torch.equal(torch.nn.functional.linear(x, x), x @ x.T)
        assert torch.rand(0, 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("longer", "shorter", "unlike"),
    [
        (("rand", (7,), (3, 7)), ("rand", (5,), (3, 5)), ""),
        (("randn_like", (7, 4), ()), ("randn_like", (5, 4), ()), ""),
        (("randn_like", (6, 4), ()), ("randn_like", (4, 4), ()), ""),
        (("randn_like", (28,), ()), ("randn_like", (20,), ()), "randn_like"),
        (("randint", (7,), (0, 9)), ("randint", (5,), (0, 9)), "randint"),
        (("uniform_", (7,), (0.0, 7.0)), ("uniform_", (5,), (0.0, 5.0)), "uniform_"),
        (("rand", (4,), (3, 4)), ("rand", (4,), (3, 4)), ""),
    ],
)
def test_draws_of_more_positions_begin_as_those_of_fewer(longer, shorter, unlike):
    assert first_unlike([longer], [shorter], [7, 5]) == unlike
    assert first_unlike([longer], [shorter], []) == ("" if longer == shorter else longer[0])
    assert first_unlike([longer, longer], [longer], [7, 5]) == longer[0]


def test_numbers_stay_where_positions_are_added():
    with NoRandomness():
        assert torch.equal(torch.randn(3, 7, 4)[:, :5], torch.randn(3, 5, 4))
        assert torch.equal(torch.rand(3, 4, 7)[..., :5], torch.rand(3, 4, 5))
