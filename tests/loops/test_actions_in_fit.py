"""Nothing of the plugin changes a loop that runs: what ``fit`` may do gives the same with it as without, under every
check."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core import registry
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.process_state import preserved, seed_all
from tests.loops.actions_in_fit import ACTIONS, LENGTH, ROWS, TOKENS, Net, Project

GROUPS = sorted({action.group for action in ACTIONS.values()})
SLOW = {"export", "export_strict", "make_fx"}
"""Actions that take a second each time: in the plain run, and under all checks with ``-m corpus``."""


@dataclass
class Log:
    """What a run of the loop did."""

    values: list[Any] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)


def loop_of(names, log):
    """A function that makes the loop which does these things before its first step and after it."""

    def make():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        ids = torch.randint(0, TOKENS, (ROWS, LENGTH + 1))

        def act(project):
            for name in names:
                log.values.append((name, ACTIONS[name].do(project)))

        def fit(batches):
            try:
                for number, (ids, labels) in enumerate(batches):
                    project = Project(model, optimizer, scheduler, ids, labels, batches)
                    if number < 2:
                        act(project)
                    optimizer.zero_grad()
                    project.loss().backward()
                    optimizer.step()
                    scheduler.step()
                    log.weights.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
            except Exception:
                log.raised.append(traceback.format_exc())
                raise

        return TrainLoop(model=model, optimizer=optimizer, batch=(ids[:, :-1].clone(), ids[:, 1:].clone()), fit=fit)

    return make


def bare(names):
    """The loop without the plugin."""
    log = Log()
    with preserved():
        seed_all(0)
        loop = loop_of(names, log)()
        seed_all(0)
        loop.fit([tuple(t.clone() for t in loop.batch) for _ in range(4)])
    return log


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("name", ACTIONS)
def test_the_watched_run_does_what_the_bare_one_does(name):
    expected, log = bare([name]), Log()
    Evidence(loop_of([name], log)).run()
    assert not log.raised, log.raised[0]
    assert equal(log.values, expected.values), (log.values, expected.values)
    assert all(map(torch.equal, expected.weights, log.weights))


@cache
def verdicts(*names, only=None):
    """By check, what came out, and why; and what ``fit`` raised."""
    log = Log()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_loop(loop_of(names, log), only=only, raises=False)
    # an export or a cast in fit may be the only thing of a check's kind: it passes then, and else does not apply
    ends = {r.check: (r.outcome, r.reason) if r.applies else ("passed", "") for r in results.results}
    return ends, log.raised


def require_same_verdicts(*names, only=None):
    without, _ = verdicts(only=only)
    found, raised = verdicts(*names, only=only)
    known = [ACTIONS[name].raises for name in names if ACTIONS[name].raises]
    unknown = [text for text in raised if not any(words in text for words in known)]
    assert not unknown, unknown[0]
    for check, (outcome, reason) in found.items():
        allowed = [ACTIONS[name].skips[check] for name in names if check in ACTIONS[name].skips]
        if not any(words in reason for words in allowed):
            assert (outcome, reason) == without[check], check


def of_group(group):
    return (n for n, a in ACTIONS.items() if a.group == group and n not in SLOW and not a.skips)


@pytest.mark.parametrize("group", GROUPS)
def test_a_part_of_the_checks_decides_as_without_what_the_loop_does(group):
    require_same_verdicts(*of_group(group), only=tuple(registry.of("loop"))[GROUPS.index(group) :: len(GROUPS)])


@pytest.mark.corpus
@pytest.mark.parametrize("group", GROUPS)
def test_no_check_decides_otherwise_for_what_the_loop_does(group):
    require_same_verdicts(*of_group(group))


@pytest.mark.corpus
@pytest.mark.parametrize("name", ACTIONS)
def test_no_check_decides_otherwise_for_one_thing(name):
    require_same_verdicts(name)
