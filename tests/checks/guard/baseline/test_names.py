"""Which tensor is which, from four numbers of each."""

from __future__ import annotations

import pytest
import torch

from pytest_trainloop.baselines.digests import Digests
from pytest_trainloop.baselines.trajectory import Course, Digest, Step, Tensor
from pytest_trainloop.checks.guard.baseline.bounds import ROUNDING, Bounds, Nudged, distance
from pytest_trainloop.checks.guard.baseline.names import Match, names_of, renames
from pytest_trainloop.checks.guard.baseline.start import begun

EPS = ROUNDING * 2**-52


def digest(values):
    found = []
    digests = Digests()
    digests.take([values], found.append)
    digests.resolve()
    return found[0]


def course(slopes=(), **tensors):
    named = {name.replace("__", "."): values for name, values in tensors.items()}
    kept = {
        name: Tensor(shape=tuple(v.shape), dtype="float64", start=digest(v), owner=name.rpartition(".")[0])
        for name, v in named.items()
    }
    gradients = {name.replace("__", "."): digest(values) for name, values in dict(slopes).items()}
    step = Step(number=1, optimizer=0, batches=1, losses=(1.0,), rates=(0.1,), gradients=gradients)
    return Course(precision="float64", tensors=kept, optimizers=(), schedulers=(), batches=(), steps=(step,))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(old, new):
    names = names_of(old, new, EPS)
    return names, list(renames(names))


def test_a_name_with_its_values_is_the_same():
    names, says = told(course(a__weight=drawn(3, 4)), course(a__weight=drawn(3, 4)))
    assert names.matches == [Match(("a.weight",), ("a.weight",))]
    assert says == []


def test_other_values_under_one_name_are_that_tensor():
    names, _ = told(course(a__weight=drawn(3, 4)), course(a__weight=drawn(3, 4, seed=1)))
    assert names.matches == [Match(("a.weight",), ("a.weight",))]


def test_values_under_another_name_are_the_tensor():
    _, says = told(course(a__weight=drawn(3, 4)), course(b__c__weight=drawn(3, 4)))
    assert says == ["a is now b.c"]


def test_a_module_that_keeps_some_of_its_tensors_did_not_move():
    up, norm = drawn(3, 4), drawn(4, seed=1)
    _, says = told(course(a__up__weight=up, a__norm__weight=norm), course(a__mlp__up__weight=up, a__norm__weight=norm))
    assert says == ["a.up is now a.mlp.up"]


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_add_up_to_the_whole(axis):
    parts = [drawn(4, 4, seed=seed) for seed in range(3)]
    bias = drawn(4, seed=9)
    old = course(q__weight=parts[0], q__bias=bias, k__weight=parts[1], v__weight=parts[2])
    names, says = told(old, course(qkv__weight=torch.cat(parts, axis), q__bias=bias))
    assert says == ["q.weight, k.weight, v.weight are joined in qkv.weight"]
    assert not names.gone
    assert not names.came


def test_a_transposed_tensor_is_laid_out_otherwise():
    names, says = told(course(a__weight=drawn(3, 4)), course(a__weight=drawn(3, 4).T))
    assert says == ["a.weight is laid out otherwise as a.weight"]
    assert not names.matches[0].ordered


def test_constants_go_by_their_gradient():
    ones = torch.ones(4, dtype=torch.float64)
    first, second = drawn(4, seed=1), drawn(4, seed=2)
    old = course({"a__gain": first, "b__gain": second}, a__gain=ones, b__gain=ones)
    new = course({"x__scale": second, "y__scale": first}, x__scale=ones, y__scale=ones)
    assert told(old, new)[1] == ["a.gain is now y.scale", "b.gain is now x.scale"]


def test_swapped_values_are_no_rename_where_the_gradients_stay():
    a, b = drawn(4, 4, seed=1), drawn(4, 4, seed=2)
    slopes = {"a__weight": drawn(4, 4, seed=3), "b__weight": drawn(4, 4, seed=4)}
    swapped = {"a__weight": slopes["b__weight"], "b__weight": slopes["a__weight"]}
    old = course(slopes, a__weight=a, b__weight=b)
    assert told(old, course(slopes, a__weight=b, b__weight=a))[1] == []
    assert told(old, course(swapped, a__weight=b, b__weight=a))[1] == ["a is now b", "b is now a"]


def test_distance_is_relative_and_sees_order():
    values = drawn(6, 5)
    near = values * (1 + 1e-6)
    assert distance(digest(values), digest(values)) == 0.0
    assert 1e-7 < distance(digest(values), digest(near)) < 1e-5
    assert distance(digest(values), digest(values.flip(1))) > 1e-3
    assert distance(Digest(squares=float("nan")), Digest(squares=1.0)) == float("inf")


def test_a_bound_grows_with_what_a_last_digit_makes_and_opens_where_it_throws():
    slope = drawn(4, seed=1)
    mine = course({"a": slope, "b": slope}, a=slope, b=slope)
    nudged = course({"a": slope * (1 + 1e-14), "b": -slope}, a=slope, b=slope)
    bounds = Bounds(mine, lambda: [Nudged(nudged)])
    assert bounds.exceeded(1e-10, ("gradient", "a"), 1)
    assert not bounds.exceeded(5e-12, ("gradient", "a"), 1)
    assert not bounds.exceeded(1.0, ("gradient", "b"), 1)
    later = Bounds(mine, lambda: [Nudged(nudged, later=1)])
    assert later.exceeded(1.0, ("gradient", "b"), 1)
    assert not later.exceeded(1.0, ("gradient", "b"), 2)


def test_nothing_is_run_again_where_numbers_agree():
    bounds = Bounds(course(a=drawn(3)), lambda: pytest.fail("asked"))
    assert not bounds.exceeded(1e-13, ("gradient", "a"), 1)


@pytest.mark.parametrize(
    ("before", "now", "drawn_alike"),
    [
        ([0.2], [-0.3], True),
        ([0.0], [-0.3], False),
        ([0.2, -0.1], [50.0, 7.0], True),
        (torch.linspace(-1, 1, 100).tolist(), torch.linspace(-0.8, 0.8, 100).tolist(), True),
        (torch.linspace(-1, 1, 100).tolist(), torch.linspace(-3, 3, 100).tolist(), False),
        (torch.linspace(-1, 1, 100).tolist(), torch.linspace(0, 2, 100).tolist(), False),
        ([0.0, 0.0], [0.3, -0.1], False),
    ],
)
def test_few_entries_tell_less_of_the_distribution_that_they_are_drawn_from(before, now, drawn_alike):
    old, new = (course(a__weight=torch.tensor(values, dtype=torch.float64)) for values in (before, now))
    started = begun(old, new, names_of(old, new, 1e-12))
    assert started is not None
    assert (started.drawn if drawn_alike else started.scaled) == ("a.weight",)
