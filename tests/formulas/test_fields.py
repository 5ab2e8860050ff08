"""The bases of forms against the definitions that torch has of the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Laplace, Normal, Poisson, kl_divergence

from pytest_trainloop.instruments.formulas import contrastive, likelihoods, policies

SAME = {"rtol": 1e-12, "atol": 1e-12}


def weighted(parts, weights, constant=0.0):
    return sum(weights[name] * part for name, part in parts.items() if name in weights) + constant


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("logs", "times"), [(True, 1.0), (True, 2.0), (True, -1.0), (False, 1.0), (False, 2.0)])
def test_a_normal_density_is_read_whichever_way_its_spread_is_given(logs, times):
    mean, target, spread = torch.randn(5), torch.randn(5), torch.rand(5) + 0.5
    log_variance = times * (spread if logs else spread.log())
    parts = likelihoods._gaussian(mean, spread, target, logs=logs, times=times)
    made = weighted(parts, {"logarithm": 0.5 * times, "squares": 0.5}, 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(made, -Normal(mean, (0.5 * log_variance).exp()).log_prob(target), **SAME)
    reading = likelihoods._read_gaussian({"logarithm": 0.5 * times, "squares": 0.5, "1": 0.0}, times=times)
    assert reading.mistake is None
    assert likelihoods._read_gaussian({"logarithm": -times, "squares": 1.0, "1": 0.0}, times=times).mistake is not None


def test_laplace_and_poisson():
    mean, target, scale = torch.randn(5), torch.randn(5), torch.rand(5) + 0.5
    parts = likelihoods._laplace(mean, scale, target, logs=False)
    made = weighted(parts, {"logarithm": 1.0, "distances": 1.0}, math.log(2))
    torch.testing.assert_close(made, -Laplace(mean, scale).log_prob(target), **SAME)
    counts = torch.poisson(scale * 3)
    parts = likelihoods._poisson(scale, counts, logs=False, eps=0.0)
    made = weighted(parts, {"rate": 1.0, "product": -1.0, "of counts": 1.0})
    torch.testing.assert_close(made, -Poisson(scale).log_prob(counts), **SAME)


@pytest.mark.parametrize("prior", [1.0, 0.5, 3.0])
def test_a_divergence_from_a_normal_prior_is_no_mistake(prior):
    mean, log_variance = torch.randn(5), torch.randn(5)
    parts = likelihoods._divergence(mean, log_variance, logs=True, times=1.0)
    weights = {"mean": 0.5 / prior, "variance": 0.5 / prior, "logarithm": -0.5}
    constant = 0.5 * (math.log(prior) - 1)
    expected = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, math.sqrt(prior)))
    torch.testing.assert_close(weighted(parts, weights, constant), expected, **SAME)
    assert likelihoods._read_divergence({**weights, "1": constant}, times=1.0).mistake is None


def test_the_constant_of_the_standard_normal_beside_another_ratio_is_one():
    found = {"mean": 1.0, "variance": 1.0, "logarithm": -1.0, "1": -0.5}
    assert likelihoods._read_divergence(found, times=2.0).mistake.cause == "factor_missing"


def test_the_clipped_objective():
    new, old, advantage = torch.randn(6), torch.randn(6), torch.randn(6)
    ratio = (new - old).exp()
    expected = torch.stack([ratio * advantage, ratio.clamp(0.8, 1.2) * advantage]).amin(0)
    torch.testing.assert_close(policies._clipped(new, old, advantage, low=0.8, high=1.2), expected, **SAME)


def test_the_penalty_has_one_norm_for_each_row():
    gradient = torch.randn(3, 2, 4)
    expected = torch.stack([(row.flatten().norm() - 1) ** 2 for row in gradient])
    torch.testing.assert_close(contrastive._penalty(gradient, by_rows=True, eps=0.0), expected, **SAME)
