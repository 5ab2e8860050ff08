"""Questions that a record answers."""

from __future__ import annotations

import pytest

from pytest_trainloop.recording.record import Record
from tests.helpers.records import parameter

NAMES = ("Model.weight", "net.body.weight", "net.body_of_another.weight", "critic.weight")


@pytest.mark.parametrize(
    ("root", "owner", "below"),
    [
        ("net", "net", True),
        ("net", "net.body", True),
        ("net.body", "net.body_of_another", False),
        ("net", "critic", False),
        ("critic", "net.body", False),
        ("Trainer", "net.body", True),
    ],
    ids=["itself", "a part", "a like name", "another", "another's part", "a whole model goes by its class"],
)
def test_what_lies_below_a_module(root, owner, below):
    made = Record(parameters=[parameter(i, name) for i, name in enumerate(NAMES)])
    assert made.below(root, owner) is below
