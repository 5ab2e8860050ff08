"""Evaluations that ``fit`` itself calls and that change what training goes on with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp, relu_mlp
from tests.loops.pairs import pair
from tests.loops.random_data import fresh

CHECK = "evaluation_is_pure"


@torch.no_grad()
def validate(model, held_out):
    model.eval()
    loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
    model.train()
    return loss


def epochs(model, held_out, *, after=lambda: None, validating=validate):
    """Three epochs, each followed by an evaluation: by a function, or written out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        model.train()
        for _ in range(3):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                after()
            if validating is not None:
                validating(model, held_out)
                continue
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(held_out[0]), held_out[1]).item()
            model.train()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


# A validation every few micro-batches frees memory by clearing the gradients: by the optimizer, and one by one.


def in_windows(free, knob=None):
    def make(accumulate=4):
        model, held_out = mlp(6, 16, 3), data.labelled(seed=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            model.train()
            for number, (x, y) in enumerate(batches, 1):
                (F.cross_entropy(model(x), y) / accumulate).backward()
                if number % accumulate == 0 or number == len(batches):
                    for p in model.parameters():
                        p.grad.mul_(accumulate / (number % accumulate or accumulate))
                    optimizer.step()
                    optimizer.zero_grad()
                if number % 3 == 0:
                    score()

        def score():
            free(model, optimizer)
            return validate(model, held_out)

        batches = fresh(lambda: data.labelled(seed=int(torch.randint(1000, ()))))
        return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)

    return make if knob is None else lambda accumulate=knob: make(accumulate)


def cleared(_model, optimizer):
    optimizer.zero_grad(set_to_none=True)


def dropped(model, _optimizer):
    for p in model.parameters():
        p.grad = None


pair(
    "validation_clears_the_window",
    CHECK,
    "window_cleared",
    where="optimizer.zero_grad(set_to_none=True)",
    faulty=in_windows(cleared, knob=1),
    fixed=in_windows(lambda *_: None, knob=1),
)

pair(
    "validation_drops_gradients",
    CHECK,
    "window_cleared",
    where="p.grad = None",
    faulty=in_windows(dropped),
    fixed=in_windows(lambda *_: None),
    quick=True,
)


# An average of the weights is validated at the end of each epoch, and stays in the model.


class Average:
    def __init__(self, model):
        self.model, self.shadow = model, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for mine, p in zip(self.shadow, self.model.parameters(), strict=True):
            mine.lerp_(p, 0.3)

    @torch.no_grad()
    def copy_to(self, values):
        for p, value in zip(self.model.parameters(), values, strict=True):
            p.copy_(value)


def averaged(restoring):
    def make():
        model = relu_mlp(6, 16, 3)
        average = Average(model)

        def validating(model, held_out):
            kept = [p.detach().clone() for p in model.parameters()]
            average.copy_to(average.shadow)
            loss = validate(model, held_out)
            if restoring:
                average.copy_to(kept)
            return loss

        return epochs(model, data.labelled(seed=5), after=average.update, validating=validating)

    return make


pair(
    "average_validated_inside_fit",
    CHECK,
    "weights_left",
    culprits=("model.0.weight",),
    where="p.copy_(value)",
    faulty=averaged(restoring=False),
    fixed=averaged(restoring=True),
)


# Experts whose load is counted in each forward pass, and lowers their score.


class Experts(nn.Module):
    def __init__(self, asking):
        super().__init__()
        self.route, self.head, self.asking = nn.Linear(6, 4), nn.Linear(6, 3), asking
        self.experts = nn.Parameter(0.4 * torch.randn(4, 6, 6))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x):
        gate = (self.route(x) - self.load).softmax(-1)
        if self.training or not self.asking:
            self.load.lerp_(gate.detach().mean(0), 0.1)
        return self.head(torch.einsum("bd,edf,be->bf", x, self.experts, gate))


def counting(asking, validating):
    return lambda: epochs(Experts(asking), data.labelled(seed=5), validating=validating)


for name, validating in (("load_counted_in_validation", validate), ("load_counted_in_a_written_out_validation", None)):
    pair(
        name,
        CHECK,
        "buffers_moved_by_evaluation",
        culprits=("model.load",),
        where="self.load.lerp_(",
        faulty=counting(False, validating),
        fixed=counting(True, validating),
    )
