"""What one run that cannot be repeated shows: ``observe()`` around training code as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import observe
from tests.helpers.findings import named
from tests.loops import data
from tests.loops.nets import CharLSTM, mlp

X, Y = data.labelled()


class Dropping(nn.Module):
    def __init__(self, share=0.3):
        super().__init__()
        self.body, self.head, self.share = nn.Linear(6, 16), nn.Linear(16, 3), share

    def forward(self, x):
        return self.head(F.dropout(torch.tanh(self.body(x)), self.share))


def step(model, optimizer):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    return loss


def trained(steps, *, keep=lambda loss: loss, after=lambda model: None, model=mlp):
    """The observed run of so many steps, each loss put into a list as ``keep`` gives it."""
    made = model(6, 16, 3) if model is mlp else model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    with observe() as record:
        losses = []
        for _ in range(steps):
            losses.append(keep(step(made, optimizer)))
            after(made)
    return record


def test_kept_graphs_are_a_fault_after_36_steps():
    report = trained(40).check("memory_growth", raises=False)
    (finding,) = named(report, "memory_growth", "kept_tensors", "fault")
    assert finding.culprits == ("losses",)
    assert "losses.append" in finding.where


def test_they_are_advice_where_the_run_ends_before():
    report = trained(20).check("memory_growth", raises=False)
    (finding,) = named(report, "memory_growth", "kept_tensors", "advice")
    assert "ended before step 36" in finding.shown_by
    assert report.ok


def test_detached_losses_pass():
    report = trained(40, keep=torch.Tensor.detach).check("memory_growth", raises=False)
    assert [r.outcome for r in report.results] == ["passed"]


def test_too_few_steps_are_a_skip():
    (result,) = trained(3).check("memory_growth", raises=False).results
    assert result.outcome == "skipped"
    assert "3 optimizer steps happened" in result.reason


def test_a_hidden_state_that_raises_is_named():
    model = CharLSTM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids, targets = data.tokens()
    with observe() as record:
        state = None
        try:
            for _ in range(3):
                hidden, state = model.lstm(model.embed(ids), state)
                optimizer.zero_grad()
                F.cross_entropy(model.head(hidden).transpose(1, 2), targets).backward()
                optimizer.step()
        except RuntimeError:
            pass  # as an outer loop that reports it would
    (finding,) = named(record.check("memory_growth", raises=False), "memory_growth", "carried_graph", "fault")
    assert finding.measured.startswith("backward() raised: Trying to backward through the graph a second time")


def validate(model):
    model.eval()
    with torch.no_grad():
        model(X).argmax(1)
    model.train()


def test_dropout_in_evaluations_is_named():
    report = trained(4, after=validate, model=Dropping).check("train_mode", raises=False)
    (finding,) = named(report, "train_mode", "dropout_stays_on", "fault")
    assert "F.dropout(torch.tanh(self.body(x)), self.share)" in finding.where


def test_dropout_is_seen_after_the_steps_that_are_watched_in_full():
    seen = []

    def validate_late(model):
        seen.append(model)
        if len(seen) > 15:
            validate(model)

    report = trained(20, after=validate_late, model=Dropping).check("train_mode", raises=False)
    assert named(report, "train_mode", "dropout_stays_on", "fault")


def test_an_observed_run_keeps_no_graph_itself():
    """Memory of what is observed does not grow by the observing."""
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with observe() as record:
        for _ in range(12):
            step(model, optimizer)
    assert record.check("memory_growth", raises=False).ok
