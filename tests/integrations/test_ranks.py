"""Trainers of frameworks on several ranks: right ones pass, and what a project gets wrong there is named."""

from __future__ import annotations

import pytest

from pytest_trainloop.frontends.api import check_loop
from tests.integrations.loops_of_ranks import FAULTY, RIGHT
from tests.integrations.one_a_library import one_a_library

pytestmark = pytest.mark.integration

IMPORTED = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}


def judged(name, make):
    pytest.importorskip(IMPORTED[name.partition("-")[0]])
    if "adapters" in name:
        pytest.importorskip("peft")
    (result,) = check_loop(make, only=["distributed_equivalence"], raises=False).results
    return result


@one_a_library(RIGHT)
def test_a_right_loop_passes(name):
    result = judged(name, RIGHT[name])
    assert (result.outcome, result.findings) == ("passed", ()), result.reason


@one_a_library(FAULTY)
def test_a_fault_is_named(name):
    make, cause = FAULTY[name]
    assert [fault.cause for fault in judged(name, make).faults] == [cause]
