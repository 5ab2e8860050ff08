"""An exception that leaves ``fit`` in a run of the plugin only is never taken for nothing to judge."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop, check_loop
from pytest_trainloop.core.errors import BrokenRun, CannotDecide
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass
from pytest_trainloop.recording.forward import Modules
from pytest_trainloop.runs.evidence import Evidence


class Net(nn.Module):
    def __init__(self, over_rows=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)
        self._over_rows = over_rows
        self.first = self.a.weight.detach().clone()

    def forward(self, x):
        return self.b(F.normalize(self.a(x), dim=0 if self._over_rows else 1))


class Trainer:
    """Keeps an average of its model, as a callback does when training begins."""

    def __init__(self, model, optimizer, act):
        self.model, self.optimizer, self._act = model, optimizer, act
        self.average = copy.deepcopy(model)

    def fit(self, batches):
        for x, y in batches:
            self._act(self.model, x)
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def loop(act=lambda model, x: None, *, over_rows=False):
    def make():
        model = Net(over_rows)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(torch.randn(8, 6), torch.randint(0, 4, (8,))),
            fit=lambda batches: Trainer(model, optimizer, act).fit(batches),
        )

    return make


def judged(make, *checks):
    report = check_loop(make, only=checks, raises=False)
    return {r.check: r for r in report.results}


def test_an_average_that_fit_copies_hides_no_fault():
    results = judged(loop(over_rows=True), "batch_independence")
    assert [f.cause for f in results["batch_independence"].findings] == ["normalised_over_rows"]


def breaks(self, value):
    raise TypeError("cannot pickle '_thread.RLock' object")


@pytest.mark.parametrize("check", ["batch_independence", "causality"])
def test_what_the_plugin_makes_fit_raise_is_named_and_reported(check, monkeypatch):
    monkeypatch.setattr(ForwardPass, "_opened", breaks)
    results = judged(loop(over_rows=True), check)
    reason = results[check].reason
    assert results[check].outcome == "error"
    assert "fit raised TypeError: cannot pickle '_thread.RLock' object" in reason
    assert "in a run of this check only; please report it" in reason


def test_what_only_the_watch_makes_fit_raise_is_no_error_of_the_loop(monkeypatch):
    def enter(self, module, args):
        raise TypeError("of a hook")

    monkeypatch.setattr(Modules, "_enter", enter)
    results = judged(loop(), "step_order", "finite")
    for result in results.values():
        assert result.outcome == "error"
        assert "fit raised TypeError: of a hook" in result.reason
        assert "only while the run was watched; please report it" in result.reason


def few_rows(model, x):
    if len(x) != 8:
        raise ValueError("8 rows are needed")


def initial_weights(model, x):
    first, model.first = model.first, None
    if first is not None and not torch.equal(model.a.weight, first):
        raise ValueError("a checkpoint of its own is needed")


def test_weights_that_the_loop_refuses_are_a_skip_that_says_so():
    results = judged(loop(initial_weights), "batch_independence", "causality", "input_dependence")
    for result in results.values():
        assert result.outcome == "skipped"
        assert "fit raised ValueError: a checkpoint of its own is needed" in result.reason
        assert "with moved weights, and not in the watched run" in result.reason


def test_rows_that_the_loop_refuses_are_left_as_they_are():
    results = judged(loop(few_rows), "batch_independence")
    assert results["batch_independence"].outcome == "passed"


def only_in_training(model, x):
    def refuse(module, args):
        if not module.training:
            raise ValueError("no evaluation here")

    model.register_forward_pre_hook(refuse)


def test_a_mode_that_the_loop_refuses_is_a_skip_that_says_so():
    results = judged(loop(only_in_training), "batch_independence")
    assert "fit raised ValueError: no evaluation here in evaluation mode" in results["batch_independence"].reason


def at_random():
    calls = []

    def act(model, x):
        calls.append(1)
        if len(calls) == 20:  # in the second run
            raise ValueError("once")

    return act


def test_a_loop_that_raises_once_is_not_the_same_twice():
    results = judged(loop(at_random()), "determinism")
    assert "whether fit raises (ValueError: once)" in str(results["determinism"].findings)


def test_a_longer_run_may_end_as_it_likes():
    steps = []

    def act(model, x):
        steps.append(1)
        if len(steps) > 40:
            raise StopAsyncIteration("the schedule has ended")

    evidence = Evidence(loop(act))
    evidence.run()
    steps.clear()
    record = evidence.rerun(count=60, enough=lambda record: record.rounds >= 60)
    assert record.raised is not None
    assert record.rounds == 40


def test_a_check_may_judge_an_exception_itself():
    evidence = Evidence(loop(few_rows))
    evidence.run()
    three = lambda made: iter([(torch.randn(3, 6), torch.zeros(3).long())] * 20)  # noqa: E731
    assert evidence.rerun(stream=three, may_raise=True).raised is not None
    with pytest.raises(CannotDecide, match="on batches of this check"):
        evidence.rerun(stream=three)
    with pytest.raises(CannotDecide, match="with three rows"):
        evidence.rerun(stream=three, varied="with three rows")


def test_what_is_put_around_a_run_is_told_from_what_it_is_given():
    evidence = Evidence(loop())
    evidence.run()

    def before_item(number, item):
        raise KeyError("mine")

    with pytest.raises(BrokenRun, match=r"fit raised KeyError: 'mine'.* in a run of this check only"):
        evidence.rerun(before_item=before_item)
