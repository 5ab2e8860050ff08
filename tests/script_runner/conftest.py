"""Scripts that are watched in this process, and what they leave is put back."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from dataclasses import dataclass

import pytest

from pytest_trainloop.frontends.script_runner.command import command

HEAD = """
import os, sys, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def rows(n=32):
    x = torch.randn(n, 4)
    return x, x.sum(1, keepdim=True)

def loader(n=32, size=8):
    return DataLoader(TensorDataset(*rows(n)), batch_size=size, shuffle=True)

def train(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
"""

TRAIN = """
def main(epochs=20):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader()
    for epoch in range(epochs):
        train(model, optimizer, data)

if __name__ == "__main__":
    main()
"""


@dataclass
class Said:
    """What the command printed, and its exit status."""

    status: int
    out: str
    err: str


def loaded(file):
    """The module in a file, under the name of the file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of the scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "orig_argv", list(sys.orig_argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def watch(folder, capsys):
    """Write a script and run the command on it: ``watch(source, *options, args=(...))``."""

    def run(source, *options, name="train.py", args=(), head=HEAD, module=""):
        if source is not None:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(head + textwrap.dedent(source), encoding="utf-8")
        status = command([*options, *(("-m", module) if module else (name,)), *args])
        printed = capsys.readouterr()
        return Said(status, printed.out, printed.err)

    return run
