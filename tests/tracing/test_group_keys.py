"""Keys of groups that note who looks them up, and leave groups as they are otherwise."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch

from pytest_trainloop.instruments.tracing.group_keys import GroupKeys


@pytest.fixture
def watched():
    """The keys, and an optimizer whose second group has one."""
    keys = GroupKeys({"lr_scale"})
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(2)], "lr_scale": 0.5, "name": "head"}]
    with keys._watching():
        yield keys, torch.optim.SGD(groups, lr=0.1), groups


LOOK_UPS = {
    "subscript": lambda group: group["lr_scale"],
    "get": lambda group: group.get("lr_scale"),
    "in": lambda group: "lr_scale" in group,
    "pop": lambda group: group.pop("lr_scale"),
    "in a copy": lambda group: dict(group)["lr_scale"],
    "in a deep copy": lambda group: copy.deepcopy(group)["lr_scale"],
    "among the items": lambda group: [v for k, v in group.items() if k == "lr_scale"],
    "as a keyword": lambda group: (lambda lr_scale, **_rest: lr_scale)(**group),
    "by the standard library": lambda group: copy.copy(group).setdefault("lr_scale", 1),
}


@pytest.mark.parametrize("how", LOOK_UPS)
def test_a_look_up_is_noted(watched, how):
    keys, optimizer, _ = watched
    LOOK_UPS[how](optimizer.param_groups[1])
    assert keys.read == {"lr_scale"}


NO_LOOK_UPS = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "step": lambda optimizer: optimizer.step(),
    "all items": lambda optimizer: [f"{k}: {v}" for k, v in optimizer.param_groups[1].items()],
    "another key": lambda optimizer: optimizer.param_groups[1]["lr"],
    "write": lambda optimizer: optimizer.param_groups[1].__class__ and _write(optimizer.param_groups[1]),
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9).step(),
    "repr": repr,
}


def _write(group):
    group["lr_scale"] = 0.25


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("how", NO_LOOK_UPS)
def test_what_looks_up_no_such_key_is_not_noted(watched, how):
    keys, optimizer, _ = watched
    NO_LOOK_UPS[how](optimizer)
    assert keys.read == set()


def test_the_groups_stay_the_dicts_that_were_given(watched):
    _, optimizer, groups = watched
    assert optimizer.param_groups[1] is groups[1]
    assert list(groups[1])[:3] == ["params", "lr_scale", "name"]


def test_pickles_and_json_have_plain_keys(watched):
    _, optimizer, _ = watched
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for made in (torch.load(file), pickle.loads(pickle.dumps(optimizer.state_dict()))):
        assert {type(key) for key in made["param_groups"][1]} == {str}
    assert json.loads(json.dumps(optimizer.state_dict()["param_groups"][1]))["lr_scale"] == 0.5
