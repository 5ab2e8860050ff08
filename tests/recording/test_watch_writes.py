"""Zeroing, clipping, scaling: every write to a gradient by other than backward, with the user's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop.recording.events import GradWrite
from pytest_trainloop.recording.watch import Watch
from tests.helpers.watched_runs import code, net_and_sgd, values


def writes_of(write, *, entries: int = 4):
    """The writes that ``write(model, optimizer)`` makes to gradients of ones, and the model."""
    model, optimizer = net_and_sgd()
    with Watch({"": model}, [optimizer]) as watch:
        sum(p.sum() for p in model.parameters()).backward()
        write(model, optimizer)
    return watch.record.of(GradWrite), model


def by_optimizer(model, optimizer):
    optimizer.zero_grad()


def by_optimizer_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_model(model, optimizer):
    model.zero_grad()


def by_model_in_place(model, optimizer):
    model.zero_grad(set_to_none=False)


def by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


def by_deleting(model, optimizer):
    for p in model.parameters():
        del p.grad


def by_hand_in_place(model, optimizer):
    for p in model.parameters():
        p.grad.zero_()


def by_filling(model, optimizer):
    for p in model.parameters():
        p.grad.data.fill_(0)


@pytest.mark.parametrize(
    ("write", "how", "line"),
    [
        (by_optimizer, "none", "optimizer.zero_grad()"),
        (by_optimizer_in_place, "zero", "optimizer.zero_grad(set_to_none=False)"),
        (by_model, "none", "model.zero_grad()"),
        (by_model_in_place, "zero", "model.zero_grad(set_to_none=False)"),
        (by_hand, "none", "p.grad = None"),
        (by_deleting, "none", "del p.grad"),
        (by_hand_in_place, "zero", "p.grad.zero_()"),
        (by_filling, "zero", "p.grad.data.fill_(0)"),
    ],
)
def test_every_way_to_zero_is_one_write_of_all_parameters(write, how, line):
    (event,), _ = writes_of(write)
    assert (event.how, sorted(event.parameters)) == (how, [0, 1, 2, 3])
    assert event.place.code == line
    assert (event.by == "zero_grad") == ("zero_grad" in line)


def test_zeroing_what_is_none_already_is_seen():
    def twice(model, optimizer):
        optimizer.zero_grad()
        optimizer.zero_grad()

    (first, second), _ = writes_of(twice)
    assert first.parameters == second.parameters == [0, 1, 2, 3]
    assert second.by == "zero_grad"


def test_zeroing_a_part_names_that_part():
    (event,), _ = writes_of(lambda model, optimizer: model[2].zero_grad())
    assert event.parameters == [2, 3]


def test_a_clip_by_norm_keeps_limit_and_both_sides():
    (event,), model = writes_of(lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert (event.how, event.by, event.limit) == ("clipped", "clip_grad_norm_", 1.0)
    assert sorted(event.parameters) == [0, 1, 2, 3]
    assert event.changed
    assert values(event.before[1]).tolist() == [1.0] * 4
    assert torch.equal(values(event.after[1]), model[0].bias.grad)
    assert 0 < event.after[1].peak < 0.3
    assert "clip_grad_norm_(model.parameters(), 1.0)" in event.place.code


@pytest.mark.parametrize("foreach", [True, False])
def test_a_clip_that_does_not_bite_changes_nothing(foreach):
    events, _ = writes_of(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e3, foreach=foreach))
    assert {i for e in events for i in e.parameters} == {0, 1, 2, 3}
    assert not any(e.changed for e in events)


def test_a_clip_by_value():
    events, _ = writes_of(lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.25))
    assert {e.how for e in events} == {"clipped"}
    assert {e.limit for e in events} == {0.25}
    assert events[-1].after[0].peak == 0.25


def test_a_clip_of_the_users_own():
    def clip_gradients(parameters, max_norm):
        for p in parameters:
            p.grad.mul_(max_norm)

    events, _ = writes_of(lambda model, optimizer: clip_gradients(model.parameters(), 0.5))
    assert {(e.how, e.by, e.limit) for e in events} == {("clipped", "clip_gradients", 0.5)}
    assert code(events)[0] == "p.grad.mul_(max_norm)"


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.grad.mul_(0.5),
        lambda p: p.grad.data.div_(2),
        lambda p: torch._foreach_mul_([p.grad], 0.5),
        lambda p: p.grad.add_(torch.randn_like(p)),
        lambda p: p.grad.copy_(torch.ones_like(p)),
        lambda p: p.grad.__setitem__(0, 3.0),
    ],
    ids=["mul_", "data.div_", "foreach", "noise", "copy_", "setitem"],
)
def test_writes_in_place_are_altered_gradients(write):
    (event,), _ = writes_of(lambda model, optimizer: write(model[0].bias))
    assert (event.how, event.parameters) == ("altered", [1])


def test_an_operator_in_place_is_altered_and_not_assigned():
    def halve(model, optimizer):
        model[0].bias.grad *= 0.5

    (event,), _ = writes_of(halve)
    assert (event.how, event.parameters, event.place.code) == ("altered", [1], "model[0].bias.grad *= 0.5")


def test_another_tensor_in_its_place_is_assigned():
    def momentum(model, optimizer):
        model[0].bias.grad = model[0].bias.grad * 0.9

    (event,), _ = writes_of(momentum)
    assert (event.how, event.parameters) == ("assigned", [1])


def test_reading_gradients_writes_nothing():
    def read(model, optimizer):
        norm = sum(p.grad.norm() ** 2 for p in model.parameters())
        _ = [p.grad.clone().mul_(3) for p in model.parameters()]
        return norm.sqrt()

    assert writes_of(read)[0] == []


def test_a_write_to_what_is_no_gradient_is_none_of_ours():
    def other(model, optimizer):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            torch.ones(4).zero_()

    assert writes_of(other)[0] == []


def test_what_an_optimizer_does_inside_its_step_is_not_a_write():
    def step(model, optimizer):
        optimizer.step()
        torch.optim.Adam(model.parameters(), maximize=True, weight_decay=0.1).step()

    assert writes_of(step)[0] == []
