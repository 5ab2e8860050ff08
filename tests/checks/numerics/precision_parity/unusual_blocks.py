"""Updates inside an autocast block that read no cast from before."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.odd import odd


def mlp():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


@odd(notes="each iteration, its step too, stands in a block of its own")
def step_inside_a_block_of_its_own() -> TrainLoop:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="one block spans all steps, and keeps no casts")
def one_block_without_a_cache() -> TrainLoop:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def fit(batches):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a block spans all steps, and the model's weights are in bfloat16 themselves: nothing is cast")
def one_block_around_low_precision_weights() -> TrainLoop:
    model = mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fit(batches):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x.bfloat16()).float(), y).backward()
                optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a teacher is averaged inside the block: frozen weights are cast at each use")
def teacher_averaged_inside_the_block() -> TrainLoop:
    student, teacher = mlp(), mlp().requires_grad_(False)
    teacher.load_state_dict(copy.deepcopy(student.state_dict()))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with torch.no_grad():
                    soft = teacher(x).softmax(-1)
                scores = student(x)
                loss = F.cross_entropy(scores, y) + 0.1 * F.cross_entropy(scores, soft)
                with torch.no_grad():
                    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"student": student, "teacher": teacher}, optimizer=optimizer, batch=data.labelled(), fit=fit
    )


class SineNet(nn.Module):
    """Sines of a layer's large outputs, and of exact multiples of the inputs, all in low precision."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(44, 3)

    def forward(self, x):
        octaves = torch.cat([(256.0 * x).sin(), (256.0 * x).cos()], dim=-1)
        return self.last(torch.cat([(30.0 * self.first(x)).sin(), octaves.to(x.dtype)], dim=-1))


@odd(notes="sines of large angles: those of a layer are rounded like any product, those of the inputs are exact")
def sines_of_large_angles() -> TrainLoop:
    model = SineNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = data.labelled()
    batch = (x.bfloat16().float(), y)

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)
