"""A fresh loop under a seed, and what is refused as one."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from pytest_trainloop import TrainLoop, UsageError
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


def test_the_function_is_named_behind_a_partial_too():
    def make(model):
        return None

    name = make.__qualname__
    assert refusal(functools.partial(make, 1)).startswith(f"{name} returned None")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.skip.Exception("no data")], ids=repr)
def test_what_is_for_the_session_passes(error):
    def make():
        raise error

    with pytest.raises(type(error)):
        made(make)


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
