"""What becomes of the copies of groups that a rate was written to."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from pytest_trainloop.checks.learning.schedule.copied_groups import CopiedGroups


def followed(use):
    found = CopiedGroups()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    kept = []
    with found._noting():
        use(optimizer, kept)
    return found.written


def write(groups):
    for group in groups:
        group["lr"] = 0.05


def test_a_write_to_the_groups_alone():
    (written,) = followed(lambda optimizer, kept: write(optimizer.state_dict()["param_groups"]))
    assert written.alone
    assert not written.used
    assert 'group["lr"] = 0.05' in written.line


def test_a_write_while_the_state_dict_is_held():
    def use(optimizer, kept):
        state = optimizer.state_dict()
        state["param_groups"][0].update(lr=0.05)

    (written,) = followed(use)
    assert not written.alone
    assert not written.used


USES = {
    "saved": lambda state, kept: torch.save(state, io.BytesIO()),
    "kept": lambda state, kept: kept.append(state),
    "copied": lambda state, kept: copy.deepcopy(state),
    "read": lambda state, kept: state["param_groups"][0]["lr"],
}


@pytest.mark.parametrize("how", USES)
def test_a_copy_that_is_used_after_the_write(how):
    def use(optimizer, kept):
        state = optimizer.state_dict()
        write(state["param_groups"])
        USES[how](state, kept)

    assert [w.used for w in followed(use)] == [True]


def test_what_is_saved_is_plain_and_loads():
    def use(optimizer, kept):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        kept.append(torch.load(file))
        assert {type(kept[0]), type(kept[0]["param_groups"][0])} == {dict}
        optimizer.load_state_dict(optimizer.state_dict())

    assert followed(use) == []
