"""What ``evaluation_is_pure`` says of a run that is observed once, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_trainloop import observe
from pytest_trainloop.checks.state.evaluation_is_pure.judgement import Judgement
from pytest_trainloop.runs.evidence import Evidence
from tests.loops.plain import loop


def train(*, seeds, steps=9):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(8, 4)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 3 == 2:
            model.eval()
            if seeds:
                torch.manual_seed(0)
            with torch.no_grad():
                model(x + torch.randn(8, 4))
            model.train()


@pytest.mark.parametrize("seeds", [True, False])
def test_a_run_that_is_observed_once(seeds):
    state = torch.get_rng_state()
    try:
        with observe() as record:
            train(seeds=seeds)
    finally:
        torch.set_rng_state(state)
    (result,) = record.check("evaluation_is_pure", raises=False).results
    assert [(f.cause, f.level) for f in result.findings] == ([("reseeds", "fault")] if seeds else [])
    assert (result.outcome, result.needs) == (("failed", "") if seeds else ("skipped", "evaluate="))
    assert result.reason.startswith("" if seeds else "watching once does not offer evaluate: an evaluation inside fit")


def looped(evaluate_of, fit_of=lambda fit: fit):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        made = loop(model, torch.randn(6, 4), lambda model, x: model(x).square().mean(), evaluate=evaluate_of(model))
        made.fit = fit_of(made.fit)
        return made

    return make


def test_a_right_evaluation_takes_fifteen_steps():
    evidence = Evidence(looped(lambda model: lambda: model(torch.ones(2, 4)).sum().item()))
    evidence.run()
    before = evidence.own_steps
    made = Judgement.of(evidence)
    assert (made.findings, made.unresolved) == ([], "")
    assert evidence.own_steps - before == 15


def test_a_loop_that_trains_once_is_judged_between_two_of_its_steps():
    def once(fit):
        calls = []

        def only(batches):
            calls.append(1)
            if len(calls) == 1:
                fit(batches)

        return only

    def scaling(model):
        def evaluate():
            with torch.no_grad():
                model[0].weight.mul_(0.5)

        return evaluate

    (finding,) = Judgement.of(Evidence(looped(scaling, once))).findings
    assert (finding.cause, finding.level, finding.culprits) == ("weights_left", "fault", ("model.0.weight",))


def test_the_grad_mode_is_put_back_for_who_runs_the_check():
    assert torch.is_grad_enabled()
    Judgement.of(Evidence(looped(lambda model: lambda: torch.set_grad_enabled(False))))
    assert torch.is_grad_enabled()
