"""``trainer.evaluate()`` and ``trainer.validate()``, judged by ``evaluation_is_pure``."""

from __future__ import annotations

import pytest

from pytest_trainloop import check_loop
from tests.integrations.one_a_library import one_a_library

loops = pytest.importorskip("tests.integrations.evaluating_loops")

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def judged(make):
    (result,) = check_loop(make, only=["evaluation_is_pure"], raises=False).results
    assert result.outcome in ("passed", "failed"), (result.outcome, result.reason, result.error)
    return result


@one_a_library(loops.FAULTY)
def test_what_evaluation_leaves_behind_is_named(name):
    make, cause, culprit = loops.FAULTY[name]
    (fault,) = judged(make).faults
    assert fault.cause == cause
    assert culprit in f"{fault.summary} {' '.join(fault.culprits)}"


@one_a_library(loops.RIGHT)
def test_a_right_evaluation_is_silent(name):
    assert [(f.level, f.cause, f.summary) for f in judged(loops.RIGHT[name]).findings] == []


@one_a_library(loops.ADVISED)
def test_what_matters_to_nothing_yet_is_advice(name):
    make, cause = loops.ADVISED[name]
    assert [(f.level, f.cause) for f in judged(make).findings] == [("advice", cause)]
