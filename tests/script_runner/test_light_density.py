"""After the steps that are watched in full a run costs what it costs alone: no function mode of ours is on."""

from __future__ import annotations

import torch
from torch import nn
from torch.overrides import _len_torch_function_stack

from pytest_trainloop import observe
from tests.script_runner.conftest import TRAIN

STACK = """
from torch.overrides import _len_torch_function_stack
modes = []
torch.optim.Optimizer.zero_grad = lambda self, _original=torch.optim.Optimizer.zero_grad: (
    modes.append(_len_torch_function_stack()), _original(self)
)
"""


def test_no_mode_is_on_once_enough_was_seen(watch, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", torch.optim.Optimizer.zero_grad)  # put back afterwards
    said = watch(STACK + TRAIN + "    assert modes[0] and not any(modes[13:]), modes\n", "--steps=0")
    assert said.status == 0, said


def dropout_is_on_after(steps, model, evaluate):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(model, optimizer) as record:
        for _ in range(steps):
            model.train()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluate(model)
        assert _len_torch_function_stack() == 0 or not model.training
    return record.check("train_mode", raises=False)


class Forgotten(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(nn.functional.dropout(x * 2.0, 0.5))


def evaluated(model):
    model.eval()
    with torch.device("cpu"), torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3))
    with torch.device("cpu"):
        model.train()
    assert _len_torch_function_stack() == 0


def test_dropout_in_a_late_evaluation_is_seen():
    report = dropout_is_on_after(20, Forgotten(), evaluated)
    assert [f.cause for r in report.results for f in r.faults] == ["dropout_stays_on"]


def test_a_mode_of_the_users_stays_the_innermost():
    def within(model):
        with torch.device("meta"):
            model.eval()
            assert torch.ones(1).is_meta
        assert not torch.ones(1).is_meta

    assert dropout_is_on_after(14, nn.Linear(3, 1), within).ok
