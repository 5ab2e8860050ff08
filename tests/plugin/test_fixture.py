"""The trainloop fixture."""

from __future__ import annotations

import json

import pytest

HEAD = """
import pytest
from conftest import *
from pytest_trainloop import CheckFailed, TrainLoopError, UsageError
from pytest_trainloop.frontends import api
from pytest_trainloop.core.report import Report

"""


def test_check_returns_the_result(pytester, run, log):
    pytester.makepyfile(
        HEAD
        + """
def make(use_ckpt=False): return {}

def test_by_hand(trainloop):
    result = trainloop.check("overfit", make, options={"steps": 3}, knobs={"use_ckpt": "checkpoint"})
    assert (result.check, result.outcome) == ("overfit", "passed")
"""
    )
    run("--trainloop-seed=4").assert_outcomes(passed=1)
    assert log("subject")[0].endswith("::test_by_hand {'checkpoint': 'use_ckpt'} 4 120.0 auto")
    assert "overfit {'steps': 3}" in log("check")[0]


def test_a_fault_fails_at_the_users_line(pytester, run):
    pytester.makepyfile(
        HEAD
        + """
def test_by_hand(trainloop):
    trainloop.check("overfit", lambda: {"overfit": fault("overfit", "stuck")})
"""
    )
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            '>*trainloop.check("overfit",*',
            "E*it is wrong by 4.00",
            "E*cause      stuck: the loss stays",
            "*::test_by_hand  1 failed; 0.2 s, 4 optimizer steps",
            "FAILED *::test_by_hand - it is wrong by 4.00",
        ]
    )
    result.stdout.no_fnmatch_line("*byhand.py*")
    result.stdout.no_fnmatch_line("trainloop: NOTHING*")


def test_errors_by_hand(pytester, run):
    pytester.makepyfile(
        HEAD
        + """
def test_by_hand(trainloop):
    with pytest.raises(UsageError, match="'overfitt', which is no check; the nearest name is 'overfit'"):
        trainloop.check("overfitt", dict)
    with pytest.raises(UsageError, match="no trainloop"):
        trainloop.check("overfit", lambda: UsageError("no trainloop"))
    with pytest.raises(TrainLoopError, match="running fit raised ValueError: bad"):
        trainloop.check("overfit", lambda: raised("overfit"))
    with pytest.raises(CheckFailed) as info:
        trainloop.check("overfit", lambda: fault("overfit", "stuck"))
    assert info.value.results[0].findings[0].cause == "stuck"
"""
    )
    run().assert_outcomes(passed=1)


def test_a_test_that_decided_nothing_is_skipped(pytester, run):
    pytester.makepyfile(
        test_a=HEAD
        + """
def undecided(trainloop, name):
    assert trainloop.check(name, lambda: skipped(name)).outcome == "skipped"

def test_nothing(trainloop):
    undecided(trainloop, "overfit")
    undecided(trainloop, "step_order")

def test_something(trainloop):
    undecided(trainloop, "overfit")
    trainloop.check("step_order", dict)

def test_failing(trainloop):
    undecided(trainloop, "overfit")
    assert False
"""
    )
    result = run("-rs")
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED * test_a.py:*: overfit: TrainLoop.fit is None; step_order: TrainLoop.fit is None"]
    )


def test_check_loop_and_observe_are_forwarded(pytester, run):
    pytester.makepyfile(
        HEAD
        + """
from contextlib import contextmanager

class Observation:
    losses = [1.0]

    def judged(self, plan, raises):
        if "overfit" in plan.checks:
            found = fault("overfit", "stuck")
            raise CheckFailed("it is wrong", [found])
        return Report.of("observed", [Result(check="step_order", outcome="passed")])

@contextmanager
def observe(**settings):
    assert settings == {"density": "full"}
    yield Observation()

def check_loop(make, **choice):
    assert choice == {"seed": 9, "timeout": 120.0, "strict": False, "only": ["overfit"]}
    if make is dict:
        return Report.of("make", [Result(check="overfit", outcome="passed")])
    raise CheckFailed("two", [fault("overfit", "stuck")])

def test_by_hand(trainloop, monkeypatch):
    monkeypatch.setattr(api, "observe", observe)
    monkeypatch.setattr(api, "check_loop", check_loop)
    assert trainloop.check_loop(dict, only=["overfit"]).ok
    with pytest.raises(CheckFailed, match="two"):
        trainloop.check_loop(list, only=["overfit"])
    with trainloop.observe(density="full") as record:
        assert record.losses == [1.0]
    assert [r.check for r in record.check("step_order").results] == ["step_order"]
    with pytest.raises(CheckFailed, match="it is wrong"):
        record.check("overfit")
"""
    )
    run("--trainloop-seed=9", "--trainloop-json=out.json").assert_outcomes(passed=1)
    (loop,) = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))["loops"]
    assert sorted((c["check"], c["outcome"]) for c in loop["checks"]) == [
        ("overfit", "failed"),
        ("overfit", "failed"),
        ("overfit", "passed"),
        ("step_order", "passed"),
    ]


def test_strict_fails_advice_by_hand_too(pytester, run):
    pytester.makepyfile(
        HEAD
        + """
def test_by_hand(trainloop):
    trainloop.check("overfit", lambda: fault("overfit", "stuck", level="advice"))
"""
    )
    run().assert_outcomes(passed=1)
    run("--trainloop-strict").assert_outcomes(failed=1)


@pytest.mark.parametrize("flag", [[], ["--trainloop"]])
def test_it_works_with_and_without_the_flag(pytester, run, flag):
    pytester.makepyfile(HEAD + "def test_by_hand(trainloop): trainloop.check('overfit', dict)\n")
    run(*flag).assert_outcomes(passed=1)


def test_a_block_that_raises_is_said_to_have_checked_nothing(pytester):
    pytester.makepyfile(
        """
        def test_it(trainloop):
            with trainloop.observe() as record:
                raise RuntimeError("the script's own")
            record.check()
        """
    )
    result = pytester.runpytest_inprocess("--trainloop", "-p", "no:randomly")
    result.stdout.fnmatch_lines(["trainloop: NOTHING WAS CHECKED: the tests failed before any check ran"])
