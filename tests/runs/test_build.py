"""A fresh loop under a seed, and what is refused as one."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.errors import UsageError, UserCodeError
from pytest_trainloop.runs.build import build, require_fresh


def loop(**given):
    given.setdefault("model", nn.Linear(2, 1))
    given.setdefault("batch", torch.ones(3, 2))
    given.setdefault("fit", print)
    return TrainLoop(**given)


def made(make, **knobs):
    return build(make, knobs, seed=0)


def refusal(make):
    """The sentence, without the line that it ends with."""
    with pytest.raises(UsageError) as refused:
        made(make)
    return str(refused.value).removesuffix(f" ({refused.value.place})")


def test_the_same_seed_gives_the_same_loop():
    def make():
        model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(random.random()))
        return loop(model=model, batch=torch.from_numpy(np.random.rand(3, 2)))

    first, second, other = build(make, {}, 3), build(make, {}, 3), build(make, {}, 4)
    assert torch.equal(first.model[0].weight, second.model[0].weight)
    assert first.model[1].p == second.model[1].p
    assert torch.equal(first.batch, second.batch)
    assert not torch.equal(first.model[0].weight, other.model[0].weight)
    assert first.model[1].p != other.model[1].p
    assert not torch.equal(first.batch, other.batch)


def test_knobs_are_passed_on():
    def make(accumulate=1, width=3):
        return loop(model=nn.Linear(width, accumulate))

    assert made(make, accumulate=4).model.weight.shape == (4, 3)
    assert made(make).model.weight.shape == (1, 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (nn.Linear(2, 1), "a model (Linear)"),
        ((1, 2), "a tuple of 2"),
        ({"model": 1}, "a dict of 1"),
        (torch.ones(1), "a float32 tensor of shape (1,)"),
        (len, "the function len"),
        (object(), "an object without tensors"),
        (TrainLoop, "the class TrainLoop"),
        (3, "3"),
    ],
)
def test_what_is_no_loop_is_refused(value, words):
    def make():
        return value

    assert refusal(make) == f"{make.__qualname__} returned {words}; it must return a TrainLoop"


def test_the_function_is_named_behind_a_partial_too():
    def make(model):
        return None

    name = make.__qualname__
    assert refusal(functools.partial(make, 1)).startswith(f"{name} returned None")


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(2), StopIteration(), MemoryError()], ids=repr)
def test_an_exception_while_building_is_the_users_own(error):
    def make():
        raise error

    with pytest.raises(UserCodeError) as raised:
        made(make)
    told = raised.value.error
    assert told.stage == "building the loop"
    assert told.summary.startswith(type(error).__name__)
    assert "raise error" in told.traceback
    assert "evidence" + "/build.py" not in told.traceback


def test_a_usage_error_of_our_own_passes():
    assert refusal(lambda: loop(fit=3)) == "TrainLoop.fit is an int; a function is needed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.skip.Exception("no data")], ids=repr)
def test_what_is_for_the_session_passes(error):
    def make():
        raise error

    with pytest.raises(type(error)):
        made(make)


def test_a_model_must_hold_something_to_train():
    assert refusal(lambda: loop(model=nn.ReLU())).startswith("TrainLoop.model (ReLU) has no parameters")
    assert refusal(lambda: loop(model=[nn.ReLU(), nn.Tanh()])).startswith("TrainLoop.model (ReLU, Tanh) has no")


def test_parameters_in_a_plain_list_are_for_a_check_to_tell():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [nn.Linear(2, 2)]

    assert made(lambda: loop(model=Blocks()))


def test_one_of_several_modules_may_be_without_parameters():
    assert made(lambda: loop(model={"net": nn.Linear(2, 1), "act": nn.ReLU()}))


@pytest.mark.parametrize("frozen", [("0.",), ["1.weight"], {"0"}, (), None], ids=repr)
def test_prefixes_that_match_are_fine(frozen):
    assert made(lambda: loop(model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), frozen=frozen))


def test_every_prefix_must_match():
    said = refusal(lambda: loop(frozen=("weight", "backbone.")))
    assert said == "TrainLoop.frozen: no parameter is 'backbone.' or lies below it; the first names are weight, bias"


def fresh(make):
    return require_fresh(make, made(make), made(make))


def test_two_fresh_loops_share_nothing():
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return loop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    fresh(make)


MODEL = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def with_a_shared_buffer():
    model = nn.BatchNorm1d(2)
    model.running_mean = MODEL[1].running_mean
    return loop(model={"net": model})


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: loop(model=MODEL), "the parameter 0.weight"),
        (lambda: loop(model={"trunk": MODEL[0], "head": nn.Linear(2, 1)}), "the parameter trunk.weight"),
        (with_a_shared_buffer, "the buffer net.running_mean"),
        (lambda: loop(optimizer=OPTIMIZER), "the optimizer SGD"),
        (lambda: loop(optimizer=[OPTIMIZER]), "the optimizer SGD"),
    ],
    ids=["model", "part", "buffer", "optimizer", "optimizers"],
)
def test_what_two_loops_share_is_named(make, what):
    with pytest.raises(UsageError, match=f"^two calls of the function share {what}; build the model and the optimizer"):
        fresh(make)


def test_a_shared_dataset_is_no_trouble():
    data = torch.ones(3, 2)
    fresh(lambda: loop(batch=data, batches=[data]))
