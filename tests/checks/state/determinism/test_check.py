"""What ``determinism`` says of two runs that differ."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.state.determinism.check import determinism
from pytest_trainloop.checks.state.determinism.repeat import Difference, Repetition, repetition
from pytest_trainloop.core.errors import CannotDecide
from tests.helpers.records import FakeEvidence, parameter, record


def test_without_child_processes_it_cannot_decide():
    made = record([parameter(0, "weight")], held=[0], gradients={})
    differ = Repetition(Difference("the loss (1, then 2)", "loss", 3, "train.py:7"))
    with pytest.raises(CannotDecide, match="no process can be forked"):
        list(determinism(FakeEvidence(made, shared={repetition: differ})))
