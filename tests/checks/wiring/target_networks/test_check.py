"""What counts as a use of an average, and which writes have an effect."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from pytest_trainloop.frontends.api import check_loop
from tests.checks.wiring.target_networks.faults import dqn
from tests.helpers.findings import described, named


@torch.no_grad()
def halves(target, online):
    return {name: 0.5 * slow + 0.5 * online.state_dict()[name] for name, slow in target.state_dict().items()}


def saved(target, online):
    torch.save(halves(target, online), io.BytesIO())


def pickled(target, online):
    pickle.dumps(halves(target, online))


def read_as_numbers(target, online):
    assert all(float(average.sum()) < 100.0 for average in halves(target, online).values())


def made_parameters(target, online):
    for name, average in halves(target, online).items():
        layer, kind = name.split(".")
        setattr(target[int(layer)], kind, nn.Parameter(average))


def put_into_data(target, online):
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.data = 0.9 * slow.data + 0.1 * fast.data


def averaged_in_lists(target, online):
    slow, fast = list(target.parameters()), list(online.parameters())
    with torch.no_grad():
        torch._foreach_mul_(slow, 0.9)
        torch._foreach_add_(slow, fast, alpha=0.1)


@pytest.mark.parametrize("follow", [saved, pickled, read_as_numbers, made_parameters, put_into_data, averaged_in_lists])
def test_an_average_that_is_used_is_none_that_is_dropped(follow):
    report = check_loop(dqn(copy.deepcopy, follow), only=["target_networks"], raises=False)
    assert not described(report)


def interpolated(target, online):
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), target.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


def averaged_again(target, online):
    slow, fast = list(target.parameters()), list(target.parameters())
    with torch.no_grad():
        torch._foreach_lerp_(slow, fast, 0.1)


@pytest.mark.parametrize("follow", [interpolated, averaged_again])
def test_an_average_of_a_network_with_itself(follow):
    report = check_loop(dqn(copy.deepcopy, follow), only=["target_networks"], raises=False)
    named(report, "target_networks", "copied_into_itself", "fault")
