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
    """Three epochs, each followed by an evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        model.train()
        for _ in range(3):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                after()
            validating(model, held_out)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


# Validation every few micro-batches frees memory by clearing the gradients.


class Trainer:
    def __init__(self, accumulate, clearing):
        self.model, self.accumulate, self.clearing = mlp(6, 16, 3), accumulate, clearing
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.held_out, self.seen = data.labelled(seed=5), 0

    def validate(self):
        if self.clearing:
            self.optimizer.zero_grad(set_to_none=True)
        return validate(self.model, self.held_out)

    def fit(self, batches):
        self.model.train()
        in_window = 0
        for x, y in batches:
            (F.cross_entropy(self.model(x), y) / self.accumulate).backward()
            in_window += 1
            if in_window == self.accumulate:
                self.optimizer.step()
                self.optimizer.zero_grad()
                in_window = 0
            self.seen += 1
            if self.seen % 3 == 0:
                self.validate()
        if in_window:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.accumulate / in_window)
            self.optimizer.step()
            self.optimizer.zero_grad()


def with_a_knob(clearing):
    def make(accumulate=1):
        trainer = Trainer(accumulate, clearing)
        batches = fresh(lambda: data.labelled(seed=int(torch.randint(1000, ()))))
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=batches, fit=trainer.fit)

    return make


pair(
    "validation_clears_the_window",
    CHECK,
    "window_cleared",
    where="self.optimizer.zero_grad(set_to_none=True)",
    faulty=with_a_knob(clearing=True),
    fixed=with_a_knob(clearing=False),
)


# The same with one fixed window: a score at every sixth micro-batch frees the gradients.


def of_one_window(clearing):
    def make():
        model, held_out = mlp(6, 16, 3), data.labelled(seed=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def score():
            model.eval()
            with torch.inference_mode():
                right = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
            if clearing:
                for p in model.parameters():
                    p.grad = None
            model.train()
            return right

        def fit(batches):
            model.train()
            for number, (x, y) in enumerate(batches, 1):
                (F.cross_entropy(model(x), y) / 4).backward()
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if number % 6 == 0:
                    score()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "gradients_freed_by_a_score",
    CHECK,
    "window_cleared",
    where="p.grad = None",
    faulty=of_one_window(clearing=True),
    fixed=of_one_window(clearing=False),
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
    mentions=("average.shadow",),
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


def counting(asking):
    return lambda: epochs(Experts(asking), data.labelled(seed=5))


pair(
    "load_counted_in_validation",
    CHECK,
    "buffers_moved_by_evaluation",
    culprits=("model.load",),
    where="self.load.lerp_(",
    faulty=counting(asking=False),
    fixed=counting(asking=True),
)


# A recurrent model whose state goes on from batch to batch, and through a validation in the middle of an epoch.


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head, self.hidden = nn.GRUCell(6, 12), nn.Linear(12, 3), None

    def forward(self, x):
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(hidden)


def carried(restoring):
    def make():
        model, held_out = Carrying(), data.labelled(seed=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def evaluate():
            hidden = model.hidden
            loss = validate(model, held_out)
            if restoring:
                model.hidden = hidden
            return loss

        def fit(batches):
            model.train()
            model.hidden = None
            for number, (x, y) in enumerate(batches, 1):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if number % 2 == 0:
                    evaluate()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "hidden_state_of_validation_inside_fit",
    CHECK,
    "state_left",
    culprits=("model.hidden",),
    where="self.hidden = hidden.detach()",
    faulty=carried(restoring=False),
    fixed=carried(restoring=True),
)
