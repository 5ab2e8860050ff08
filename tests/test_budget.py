"""The time of all checks of a loop: what is worth most goes first, and what is left out is told."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, UsageError, check_loop
from pytest_trainloop.core.errors import OutOfBudget
from pytest_trainloop.core.registry import of
from pytest_trainloop.core.report.section import section
from pytest_trainloop.judging.battery import Settings, Subject
from pytest_trainloop.runs import budget, guard
from pytest_trainloop.runs.budget import Budget
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.guard import Guard
from tests.helpers.plugin_sessions import HEAD, builds

ONE = textwrap.dedent(HEAD) + builds("return loop()")

NEED_ONE_RUN = ("gradient_reaches_every_param", "train_mode", "finite", "schedule", "frozen_stays_frozen")
"""Checks that decide about the loop below from the watched run alone."""


class SlowLoop:
    """``make`` for a loop whose steps take so many seconds of a clock of its own."""

    def __init__(self, seconds, *, zeroing=True):
        self.now, self.share = 0.0, 1.0
        self._seconds, self._zeroing = seconds, zeroing

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.now * self.share

    def __call__(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                if self._zeroing:
                    optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                self.now += self._seconds

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(torch.randn(8, 6), torch.arange(8).remainder(3)), fit=fit
        )


@pytest.fixture
def slow(monkeypatch):
    def of_seconds(seconds, **given):
        loop = SlowLoop(seconds, **given)
        monkeypatch.setattr(budget, "time", loop)
        return loop

    return of_seconds


def results_of(make, **given):
    return {r.check: r for r in check_loop(make, raises=False, **given).results}


def test_two_seconds_a_step(slow):
    """Of a loop of 2 s a step, what the watched run shows is decided within two minutes; the rest is listed."""
    report = check_loop(slow(2.0), raises=False)
    results = {result.check: result for result in report.results}
    left_out = [name for name, result in results.items() if not result.looked_at]
    assert all(results[name].outcome == "passed" or not results[name].applies for name in NEED_ONE_RUN)
    assert "overfit_one_batch" in left_out
    assert {results[name].outcome for name in left_out} == {"skipped"}
    (reason,) = {results[name].reason for name in left_out}
    assert reason.startswith("the 120 s that the checks of one loop may take were over; --trainloop-budget=")
    lines = [line.text for line in section(report.entries)]
    assert f"{len(left_out)} not looked at" in lines[0]
    assert f"  not looked at  {', '.join(left_out)}: {reason}" in lines


@pytest.mark.corpus
@pytest.mark.parametrize("zeroing", [True, False])
def test_a_budget_changes_no_verdict_but_to_a_skip(slow, zeroing):
    some, enough = (results_of(slow(2.0, zeroing=zeroing), budget=seconds) for seconds in (120.0, float("inf")))
    assert all(result.looked_at for result in enough.values())
    for name, result in some.items():
        if result.looked_at:
            assert (result.outcome, result.findings) == (enough[name].outcome, enough[name].findings)


def test_what_is_worth_most_finds_its_fault_within_the_budget(slow):
    results = results_of(slow(2.0, zeroing=False))
    assert [f.cause for f in results["step_order"].faults] == ["not_zeroed"]
    assert not results["overfit_one_batch"].looked_at


def test_the_order_in_which_checks_are_asked_for_is_not_that_in_which_time_is_spent(slow):
    """What costs most is asked for first, as in a random order, and leaves time to what is worth more."""
    subject = Subject("loop", slow(2.0), settings=Settings())
    known = of("loop")
    subject.announce(dict.fromkeys(known))
    assert subject.seconds_left == float("inf")
    asked = sorted(known, key=lambda name: known[name].worth)
    results = {name: subject.run_check(name) for name in asked}
    assert all(results[name].outcome == "passed" or not results[name].applies for name in NEED_ONE_RUN)
    assert not results["overfit_one_batch"].looked_at
    assert subject.seconds_left <= 120.0


def test_without_want_of_time_nothing_is_judged_ahead(slow):
    subject = Subject("loop", slow(0.0), settings=Settings())
    subject.announce(dict.fromkeys(["step_order", "overfit_one_batch"]))
    assert subject.run_check("overfit_one_batch").steps > 0
    assert subject.run_check("step_order").looked_at


def test_the_budget_follows_the_time_of_a_run():
    assert Settings().loop_seconds == 120.0
    assert Settings(timeout=5.0).loop_seconds == 120.0
    assert Settings(timeout=600.0).loop_seconds == 600.0
    assert Settings(timeout=600.0, budget=30.0).loop_seconds == 30.0


@pytest.mark.parametrize("given", [0, -1.0, float("nan"), "ten", True])
def test_what_is_no_budget(given):
    with pytest.raises(UsageError, match=r"the budget is .*; a number of seconds above 0 is needed"):
        check_loop(SlowLoop(0.0), budget=given)


def test_a_loop_whose_run_is_ended_early_is_not_blamed_for_it(monkeypatch):
    """One that has had the end of its batches may come back in its own time, which it was not given."""
    monkeypatch.setattr(guard, "GRACE", 0.02)

    def never():
        while True:
            pass

    with pytest.raises(UsageError, match="did not come back"):
        Guard(0.02).call(never, lambda: 2, lambda: 1)
    with pytest.raises(guard.TimeRanOut):
        Guard(60, left=0.02).call(never, lambda: 2, lambda: 1)


def test_a_run_that_the_budget_ended_says_so(monkeypatch):
    """The timer of a run rings a little before the budget is spent: what is short is the budget, not a run's time."""
    budget = Budget(100.0)
    evidence = Evidence(SlowLoop(0.0), budget=budget)
    evidence.run()
    monkeypatch.setattr(Budget, "left", 0.02)

    def never(loop):
        return lambda batches: [None for batch in iter(int, 1)]

    assert budget.spent < 100.0
    with pytest.raises(OutOfBudget, match="the 100 s that the checks of one loop may take were over"):
        evidence.rerun(fit=never)


@pytest.mark.parametrize(("share", "spent"), [(1.0, 100.0), (0.5, 50.0), (0.0, 25.0), (8.0, 100.0)])
def test_what_others_take_of_the_machine_is_not_spent(slow, share, spent):
    loop, limit = slow(0.0), Budget(120.0)
    loop.share = share
    with limit.counted():
        loop.now += 100.0
    assert limit.spent == spent
    assert limit.left == pytest.approx((120.0 - spent) * 100.0 / spent)


def test_an_infinite_time_sets_no_timer_that_cannot_be_set():
    assert Guard(float("inf")).call(lambda: None, lambda: 0) is None


def test_a_session_lists_what_it_did_not_look_at(pytester):
    pytester.makepyfile(test_a=ONE)
    result = pytester.runpytest_inprocess("--trainloop", "--trainloop-budget=0.001", "--trainloop-json=out.json")
    result.stdout.fnmatch_lines(["*not looked at  *overfit_one_batch*: the 0.001 s that the checks of one loop may*"])
    (loop,) = json.loads((pytester.path / "out.json").read_text())["loops"]
    looked_at = {check["check"]: check["looked_at"] for check in loop["checks"]}
    assert looked_at["finite"]
    assert not looked_at["overfit_one_batch"]
    assert result.ret == 0


def test_the_ini_file_gives_a_budget(pytester):
    pytester.makepyfile(test_a=ONE)
    pytester.makeini("[pytest]\ntrainloop_budget = 0.5\ntrainloop_only = finite")
    result = pytester.runpytest_inprocess("--trainloop")
    result.stdout.fnmatch_lines(["trainloop: seed 0, device auto, at most 120 s a run of fit and 0.5 s a loop"])


def test_no_budget_is_refused_in_one_sentence(pytester):
    pytester.makepyfile(test_a=ONE)
    result = pytester.runpytest_inprocess("--trainloop", "--trainloop-budget=0")
    result.stderr.fnmatch_lines(["ERROR: --trainloop-budget is 0; a number of seconds above 0 is needed"])
