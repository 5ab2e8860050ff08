"""What a model's calls on one line are given and return, in either mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.train_mode.line_probe import LineProbe
from pytest_trainloop.recording.events import Forward
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.runs.run import RunPlan, run


class Flagged(nn.Module):
    """Returns another structure in training mode, as detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        out = self.body(x)
        return {"loss": out.square().mean()} if self.training else out


def seen(model, look):
    """The passes at the line of ``look``, in training and in evaluation mode."""

    def make():
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        fixed = torch.randn(6, 4)

        def fit(batches):
            for x in batches:
                out = made(x)
                loss = out["loss"] if isinstance(out, dict) else out.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    look(made, x, fixed)

        return TrainLoop(model=made, optimizer=optimizer, batch=torch.randn(6, 4), fit=fit)

    made = Evidence(make)
    site = next(f.site for f in made.run().of(Forward) if not f.grad_enabled)
    both = [LineProbe(site), LineProbe(site, "evaluation mode")]
    for probe in both:
        run(make, RunPlan(contexts=probe.contexts, enough=lambda record: record.rounds >= 3))
    return both


def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def plain():
    return nn.Linear(4, 2)


def functional():
    class Net(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3, self.training)

    return Net(4, 2)


@pytest.mark.parametrize(
    ("model", "dropped", "normed"),
    [
        (dropping, True, False),
        (normed, False, True),
        (functional, True, False),
        (lambda: nn.Linear(4, 2), False, False),
    ],
)
def test_dropout_and_norms_of_torch_are_seen(model, dropped, normed):
    training, evaluating = seen(model, lambda m, _x, fixed: m(fixed))
    assert (training.dropped, training.normed) == (dropped, normed)
    assert (evaluating.dropped, evaluating.normed) == (False, False)
    assert training.same_result(evaluating) is not (dropped or normed)


def test_another_structure_is_seen():
    training, evaluating = seen(Flagged, lambda m, _x, fixed: m(fixed))
    assert training.shape != evaluating.shape
    assert not training.same_result(evaluating)


@pytest.mark.parametrize(
    ("look", "held_out", "samples"),
    [
        (lambda m, _x, fixed: m(fixed), True, False),
        (lambda m, _x, _fixed: m(torch.randn(6, 4)), False, False),
        (lambda m, _x, fixed: [m(fixed) for _ in range(3)], True, True),
        (lambda m, _x, fixed: m(fixed[:1].repeat(6, 1)), True, True),
        (lambda m, _x, fixed: [m(part) for part in fixed.split(2)], True, False),
        (lambda m, _x, fixed: m(input=fixed), True, False),
    ],
    ids=["a fixed set", "new ones", "again and again", "repeated in a batch", "a set in batches", "by keyword"],
)
def test_what_is_looked_at(look, held_out, samples):
    training, _ = seen(dropping, look)
    assert (training.held_out, training.samples) == (held_out, samples)
