"""What clips cover, how often they bite and what they leave out, on hand-written records and on tiny loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from pytest_trainloop.instruments.records.clips import clip_facts
from pytest_trainloop.recording.watch import Watch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def facts(clip, *, groups=lambda net: net.parameters(), rounds=3):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(groups(net), lr=1e-3)
    with Watch({"": net}, [optimizer]) as watch:
        for _ in range(rounds):
            optimizer.zero_grad()
            (10 * net(torch.ones(5, 3)).square().sum()).backward()
            clip(net)
            optimizer.step()
    return clip_facts(watch.record)


def test_a_clip_of_all():
    (fact,) = facts(lambda net: clip_grad_norm_(net.parameters(), 0.5))
    assert (fact.covers, fact.of, fact.bites, fact.calls) == (4, 4, 3, 3)
    assert (fact.limit, fact.by, fact.apart, fact.groups_left_out) == (0.5, "clip_grad_norm_", False, ())
    assert 0 < fact.leaves < 0.1
    assert fact.uncovered == 0.0


def test_a_clip_of_one_part_says_what_is_left_out_by_group():
    def groups(net):
        return [{"params": net.body.parameters()}, {"params": net.head.parameters()}]

    (fact,) = facts(lambda net: clip_grad_norm_(net.body.parameters(), 0.5), groups=groups)
    (left,) = fact.groups_left_out
    assert (fact.covers, fact.of) == (2, 4)
    assert (left.group, left.of_groups, left.tensors, left.whole) == (1, 2, 2, True)
    assert left.names == ("head.weight", "head.bias")
    assert left.norm > 0
    assert 0 < fact.uncovered < 1


def test_two_lines_that_cover_all_together_leave_nothing_out():
    def clip(net):
        clip_grad_norm_(net.body.parameters(), 0.5)
        clip_grad_norm_(net.head.parameters(), 0.1)

    body, head = facts(clip)
    assert (body.covers, head.covers) == (2, 2)
    assert body.groups_left_out == head.groups_left_out == ()
    assert body.uncovered == 0.0


def test_a_clip_far_above_the_norm_never_bites():
    (fact,) = facts(lambda net: clip_grad_norm_(net.parameters(), 1e4))
    assert (fact.bites, fact.leaves) == (0, 1.0)


def test_a_norm_that_is_logged_covers_nothing():
    (fact,) = facts(lambda net: clip_grad_norm_(net.parameters(), math.inf))
    assert (fact.limit, fact.bites, fact.of) == (math.inf, 0, 0)
    assert math.isnan(fact.uncovered)


def test_a_clip_by_value_leaves_a_share_of_the_norm():
    (fact,) = facts(lambda net: clip_grad_value_(net.parameters(), 0.1))
    assert fact.bites == 3
    assert 0 < fact.leaves < 1


def test_parameters_clipped_one_by_one_are_one_line():
    def clip(net):
        for p in net.parameters():
            clip_grad_norm_(p, 0.5)

    (fact,) = facts(clip)
    assert (fact.covers, fact.calls, fact.apart) == (4, 3, True)


def test_a_clip_of_no_gradient_has_no_share():
    (fact,) = facts(lambda net: clip_grad_norm_([p.grad for p in net.parameters()], 0.5))
    assert (fact.covers, fact.bites, fact.calls) == (0, 0, 3)
    assert math.isnan(fact.leaves)


@pytest.mark.parametrize("limit", [0.5, 5.0])
def test_what_is_left_is_the_limit_over_the_norm(limit):
    (fact,) = facts(lambda net: clip_grad_norm_(net.parameters(), limit), rounds=1)
    (larger,) = facts(lambda net: clip_grad_norm_(net.parameters(), 2 * limit), rounds=1)
    assert larger.leaves == pytest.approx(2 * fact.leaves, rel=1e-5)
