"""Names, copies and steps that are others once the model is compiled."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


class Encoder(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(9, 16)
        self.pos_embed = nn.Parameter(torch.randn(16) * 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x) + self.pos_embed
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def images(rows: int = 8, classes: int = 4):
    return torch.randn(rows, 9), torch.randint(classes, (rows,))


def epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault(
    "copies",
    "a copy is compiled and called, and the optimizer steps the model that it was copied from",
    thread="deepmodeling/deepmd-kit#5818",
    check="compile_parity",
    place="copy.deepcopy(model)",
)
def compiled_copy(compile=False):
    model = Encoder(classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_model = torch.compile(copy.deepcopy(model), backend="aot_eager") if compile else model
    return TrainLoop(
        model=model, optimizer=optimizer, batch=images(8, 3), fit=lambda bs: epoch(step_model, optimizer, bs)
    )


class SegmentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.ReLU())
        self.main, self.aux = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor):
        h = self.body(x)
        return self.main(h), self.aux(h)


def plain_loss(outputs, y):
    return F.cross_entropy(outputs[0], y)


def auxiliary_loss(outputs, y):
    return F.cross_entropy(outputs[0], y) + 0.4 * F.cross_entropy(outputs[1], y)


LOSSES = {SegmentNet: auxiliary_loss}


@fault(
    "copies",
    "the loss is chosen by the model's type, which is another one for the compiled model",
    thread="skorch-dev/skorch#1058",
    check="compile_parity",
    place="LOSSES.get(type(model), plain_loss)",
)
def loss_by_type(compile=False):
    model = SegmentNet()
    if compile:
        model = torch.compile(model, backend="aot_eager")
    criterion = LOSSES.get(type(model), plain_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@fault(
    "copies",
    "the checkpoint has the compiled model's keys and is loaded without strict into the raw one: weights begin anew",
    thread="FareedKhan-dev/train-llm-from-scratch#37",
    check="compile_parity",
    place="strict=False",
)
def resumed_without_strict(compile=False):
    raw = Encoder()
    model = torch.compile(raw, backend="aot_eager") if compile else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)

    def save_checkpoint(path):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load_checkpoint(path):
        state = torch.load(path)
        raw.load_state_dict({k.replace("module.", ""): v for k, v in state["model"].items()}, strict=False)
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=raw,
        optimizer=optimizer,
        batch=images(),
        fit=lambda bs: epoch(model, optimizer, bs),
        save=save_checkpoint,
        load=load_checkpoint,
    )
