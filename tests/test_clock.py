"""No verdict depends on the clock: not on one that jumps, nor on how little time a run of ``fit`` may take."""

from __future__ import annotations

import ast
import math
import random
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pytest_trainloop
from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.runs import guard
from pytest_trainloop.runs.run import RunPlan, run
from tests.loops.corpus import ODD, PAIRS

ROOT = Path(pytest_trainloop.__file__).parent

READERS = {
    "frontends.api": "how long an observed block took, for the report",
    "frontends.plugin.deaths": "the names of signals only",
    "frontends.plugin.progress": "when a line of progress is due",
    "runs.budget": "what the checks of a loop took, for the report; where it is too much, the rest is not looked at",
    "runs.threads": "the time of the first steps and of an operation: how many threads torch takes, and no verdict",
    "judging.script": "the time that a script may take; then its checks are skipped",
    "runs.guard": "a timer ends the time of fit, and the check is skipped",
    "checks.state.determinism.repeat": "so does a wait for a child",
    "runs.ranks.launch": "the time that all ranks may take, and the check is skipped",
    "runs.ranks.children": "so do the waits for processes, and signals end them",
    "runs.ranks.collectives": "what torch is told not to wait for: the parent ends the wait",
    "runs.ranks.peers": "rank 0 ends the ranks that wait for ever; no verdict follows from how long it took",
    "runs.ranks.child": "at a signal it writes down where its threads are",
    "runs.timing.step_times": "the times of steps are what a benchmark is of; no check asks for them",
    "frontends.script_runner.stopping": "how long the threads of a stopped script may take to leave",
    "runs.reachable_state.value_kinds": "the types of dates only, which are plain values",
}
"""Modules that may read a clock or set a timer, and what for."""

CLOCKS = {"time", "datetime", "signal", "select", "sched", "timeit"}

LEARNING = ("update_ratio", "overfit_one_batch")

FAULTY = (
    "adam_at_a_rate_of_gradient_descent",
    "rate_a_million_times_too_low",
    "schedule_gives_the_rate_where_a_factor_is_meant",
    "eps_of_1e8",
    "clip_far_below_the_gradient",
    "plateau_of_saturated_layers",
    "words_averaged_over_the_rows",
)
CORRECT = ("noam_wrapper_over_rate_zero", "evolution_strategies", "hypergradient_learning_rate", "federated_averaging")

TIMEOUTS = (0.002, 0.05, 0.3)


def verdicts(make, **more):
    """Outcome, findings and reason of each check."""
    report = check_loop(make, raises=False, **more)
    return {r.check: (r.outcome, tuple((f.cause, f.level) for f in r.findings), r.reason) for r in report.results}


def jumping(clock):
    """The same clock, and at each reading up to a quarter of an hour has gone by."""
    rng, gone = random.Random(0), 0.0

    def read():
        nonlocal gone
        gone += rng.uniform(0, 900)
        return clock() + gone

    return read


@pytest.fixture
def clock_jumps(monkeypatch):
    def start():
        for name in ("time", "monotonic", "perf_counter", "process_time"):
            monkeypatch.setattr(time, name, jumping(getattr(time, name)))

    return start


def loop_of(name):
    return PAIRS[name].faulty if name in PAIRS else ODD[name].make


@pytest.mark.parametrize("name", FAULTY[:1])
def test_a_clock_that_jumps(clock_jumps, name):
    assert_same_under_jumps(clock_jumps, name, LEARNING)


@pytest.mark.corpus
@pytest.mark.parametrize("name", [*FAULTY[1:], *CORRECT])
def test_a_clock_that_jumps_under_every_check(clock_jumps, name):
    assert_same_under_jumps(clock_jumps, name, None)


def assert_same_under_jumps(clock_jumps, name, only):
    plain = verdicts(loop_of(name), only=only, budget=math.inf)
    clock_jumps()
    assert verdicts(loop_of(name), only=only, budget=math.inf) == plain


def test_little_time_changes_no_verdict_but_to_a_skip():
    assert_only_skipped("eps_of_1e8", LEARNING, TIMEOUTS[1:])


@pytest.mark.corpus
@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize("name", [*FAULTY[:2], *FAULTY[3:6], *CORRECT[:2]])
def test_little_time_changes_no_verdict_but_to_a_skip_in_every_check(name, timeout):
    assert_only_skipped(name, None, [timeout])


def assert_only_skipped(name, only, timeouts):
    enough = verdicts(loop_of(name), only=only, timeout=3600)
    for timeout in timeouts:
        little = verdicts(loop_of(name), only=only, timeout=timeout)
        changed = {check: said for check, said in little.items() if said != enough[check]}
        assert [
            said for said in changed.values() if said[0] != "skipped" or not said[2].startswith("time ran out")
        ] == []


def test_what_a_loop_does_that_swallows_its_end_is_not_recorded(monkeypatch):
    """A timer ends such a loop, and how far it comes until then is chance."""

    def make():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            x, y = batches[0]
            while True:
                try:
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                except BaseException:
                    continue

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(8, 3), torch.randn(8, 1)), fit=fit)

    def events():
        return [type(event).__name__ for event in run(make, RunPlan()).events]

    soon = events()
    monkeypatch.setattr(guard, "PRESS", 0.2)
    assert events() == soon


def test_who_reads_a_clock():
    reading = set()
    for file in ROOT.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if CLOCKS & {n.partition(".")[0] for n in names}:
                reading.add(name)
    assert reading == set(READERS)
