"""Rows made alike where data comes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.learning.swapped_rows import OtherRows, all_the_first
from pytest_trainloop.runs.run import RunPlan, run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)
        self.outputs = []

    def forward(self, ids, labels):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        out = self.head(x.mean(1))
        self.outputs.append(out.detach())
        return F.cross_entropy(out, labels)


def alike(model, batch, rows):
    def make():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for one in batches:
                optimizer.zero_grad()
                model(*one).sum().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    found = OtherRows(rows, all_the_first)
    run(make, RunPlan(contexts=found.contexts, count=1, enough=lambda r: r.rounds >= 1))
    return found


def test_inputs_are_alike_and_labels_are_not():
    model = Net()
    found = alike(model, (torch.arange(15).reshape(3, 5) % 9, torch.arange(3)), 3)
    assert found.made
    assert torch.equal(model.outputs[0][0], model.outputs[0][1])
    assert torch.equal(model.outputs[0][0], model.outputs[0][2])


def test_rows_that_are_alike_already_change_nothing():
    assert not alike(Net(), (torch.ones(3, 5, dtype=torch.long), torch.arange(3)), 3).made


def test_rows_in_the_second_axis():
    found = alike(Sums(), (torch.randn(5, 4, 3),), 4)
    assert found.made


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2)

    def forward(self, x):
        return self.lstm(x)[0].square().mean()


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x):
        return self.line(x.flatten(0, 1)).square().mean()


def test_rows_that_cannot_be_told_are_told():
    found = alike(Flat(), (torch.randn(4, 5, 3),), 4)
    assert found.passed_on
    assert not found.made
