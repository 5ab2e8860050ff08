"""Rates that are written to what ``Optimizer.state_dict()`` gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import batches, net, net_and_sgd


def watched(after, steps=3):
    """The record of some steps; ``after`` is called with the optimizer after each."""
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        for x, y in batches(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            after(optimizer)
    return watch.record


def write_to_copies(optimizer):
    for group in optimizer.state_dict()["param_groups"]:
        group["lr"] = 0.05


def test_each_copy_is_noted_with_its_line_and_both_rates():
    found = watched(write_to_copies).copied_lrs
    assert [(c.before, c.written) for c in found] == [((0.1,), (0.05,))] * 3
    assert {c.place.code for c in found} == {'for group in optimizer.state_dict()["param_groups"]:'}
    assert {c.optimizer for c in found} == {0}


def load_it(optimizer):
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] *= 0.5
    optimizer.load_state_dict(state)


def write_both(optimizer):
    write_to_copies(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05


def load_a_copy_elsewhere(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.05
    torch.optim.SGD(net().parameters(), lr=1.0).load_state_dict(state)


def write_to_a_deep_copy(optimizer):
    copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] = 0.05


@pytest.mark.parametrize(
    "after",
    [load_it, write_both, load_a_copy_elsewhere, write_to_a_deep_copy, lambda optimizer: optimizer.state_dict()],
)
def test_what_is_loaded_or_written_to_the_optimizer_too_is_not(after):
    assert watched(after).copied_lrs == []


def test_what_state_dict_gives_is_as_without_a_watch():
    given = []
    watched(lambda optimizer: given.append(optimizer.state_dict()), steps=1)
    assert type(given[0]) is dict
    assert {type(group) for group in given[0]["param_groups"]} == {dict}


def test_copies_are_let_go_at_the_next_step():
    held = []

    class Held:
        def __del__(self):
            held.append("gone")

    def after(optimizer):
        if not held:
            optimizer.state_dict()["param_groups"][0]["mine"] = Held()

    watched(after)
    assert held
