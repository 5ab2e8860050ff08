"""The examples in docstrings of public objects run, with stand-ins for what a project brings."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pytest_trainloop
from pytest_trainloop import TrainLoop, strategies
from pytest_trainloop.core import registry
from pytest_trainloop.instruments.losses.table import registered

PUBLIC = {name: getattr(pytest_trainloop, name) for name in pytest_trainloop.__all__ if name != "__version__"}
PUBLIC |= {"strategies": strategies, **{name: getattr(strategies, name) for name in strategies.__all__}}
EXAMPLES = {
    name: code
    for name, each in PUBLIC.items()
    if (code := "".join(e.source for e in doctest.DocTestParser().get_examples(inspect.getdoc(each) or "")))
}


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    tiny = classmethod(lambda cls: cls())

    def forward(self, values=None, lengths=None, **batch):
        if batch:
            return SimpleNamespace(loss=(self.scale * batch["input_ids"]).mean())
        return self.scale * values.float().flatten(1).sum(1, keepdim=True)


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0):
        super().__init__()

    def forward(self, output, target):
        return F.cross_entropy(output, target)


def train(model, optimizer, batches, accumulate=1):
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()


def make_loop():
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return TrainLoop(model=model, optimizer=optimizer, batch=torch.rand(4, 3), fit=lambda b: train(model, optimizer, b))


def dice_loss(probs, mask):
    return 1 - (probs * mask).sum() / (probs + mask).sum()


def project(folder):
    loop = make_loop()
    (folder / "train.py").touch()
    return {
        **{"__name__": "test_train", "__file__": str(folder / "test_train.py")},
        **{"torch": torch, "pytest": pytest, "Path": Path, "given": hypothesis.given, "strategies": strategies},
        **{"GPT": GPT, "FocalLoss": FocalLoss, "dice_loss": dice_loss, "train": train, "make_loop": make_loop},
        **{"model": loop.model, "optimizer": loop.optimizer, "batches": [loop.batch]},
        "example_batch": lambda: loop.batch,
        "main": lambda words: loop.fit([loop.batch]),
        "batch": {"ids": torch.tensor([[3, 4, 5], [6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])},
        "loss": lambda model, batch: (batch["ids"] * batch["attention_mask"]).sum().float(),
        "ids": torch.arange(6),
        "summed_loss": lambda model, ids: ids.sum(),
        "config": SimpleNamespace(vocab_size=9, n_positions=6),
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", registry.registered())
    monkeypatch.setattr(registered, "_REGISTERED", {})
    names = PUBLIC | project(tmp_path)
    before = set(names)
    exec(EXAMPLES[name], names)
    for made in set(names) - before:
        if made == "make" or made.startswith("test_"):
            names[made]()
