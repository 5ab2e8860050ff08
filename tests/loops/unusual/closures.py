"""Steps that are more than one step: closures, two-phase optimizers, wrappers around optimizers."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train_lbfgs(model, optimizer, batches):
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@odd(notes="several backwards per step, some of them only for the line search")
def lbfgs_with_line_search() -> TrainLoop:
    model = mlp(8, 12, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        loss=lambda m, b: F.mse_loss(m(b[0]), b[1]),
        fit=lambda batches: train_lbfgs(model, optimizer, batches),
    )


@odd(notes="LBFGS with a fixed rate: the first inner iteration scales the step by the gradient's norm")
def lbfgs_fixed_rate() -> TrainLoop:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=2, history_size=4)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_lbfgs(model, optimizer, batches),
    )


class ClosureModule(nn.Module):
    """The shape that Lightning gives to a step: training_step, and a closure that the optimizer calls."""

    def __init__(self):
        super().__init__()
        self.net = relu_mlp(8, 16, 4)

    def training_step(self, batch):
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y)}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def closure_for(module, optimizer, batch):
    def closure():
        output = module.training_step(batch)
        optimizer.zero_grad()
        output["loss"].backward()
        return output["loss"]

    return closure


@odd(notes="Adam calls a closure that does forward, zeroing and backward inside step()")
def adam_with_closure() -> TrainLoop:
    module = ClosureModule()
    optimizer = module.configure_optimizers()

    def fit(batches):
        for batch in batches:
            optimizer.step(closure=closure_for(module, optimizer, batch))

    return TrainLoop(model=module, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, in the form that most projects copy."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def train_sam_two_steps(model, optimizer, batches):
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)


@odd(
    notes="the first gradient moves the weights up and is wiped; "
    "the optimizer in the user's hand never gets step() (SAM)"
)
def sam_first_and_second_step() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_sam_two_steps(model, optimizer, batches),
    )


def train_sam_closure(model, optimizer, batches):
    for x, y in batches:

        def closure(x=x, y=y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()


@odd(notes="a step inside a step; the gradient of the first backward is read by no torch optimizer (SAM with closure)")
def sam_step_with_closure() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = SAM(model.parameters(), torch.optim.Adam, lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_sam_closure(model, optimizer, batches),
    )


class NoamOpt:
    """Rate and optimizer in one object, as in The Annotated Transformer."""

    def __init__(self, model_size, factor, warmup, optimizer):
        self.optimizer, self.warmup, self.factor, self.model_size = optimizer, warmup, factor, model_size
        self._step = 0

    def rate(self):
        return self.factor * self.model_size**-0.5 * min(self._step**-0.5, self._step * self.warmup**-1.5)

    def step(self):
        self._step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()


def train_noam(model, noam, batches):
    for x, y in batches:
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        noam.step()
        noam.optimizer.zero_grad()


@odd(notes="a wrapper without zero_grad or param_groups; the inner optimizer was built with rate 0")
def noam_wrapper_over_rate_zero() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    noam = NoamOpt(16, 0.3, 10, torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9))
    return TrainLoop(
        model=model,
        optimizer=noam,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_noam(model, noam, batches),
    )


class MultipleOptimizer:
    """Several optimizers behind one face, none of them the model's only one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        self.state = defaultdict(dict)

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class TaggerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=True)
        self.body = relu_mlp(8, 16, 16)

    def forward(self, ids):
        return self.body(self.embed(ids))


def train_tagger(model, optimizer, batches):
    for (ids,) in batches:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@odd(notes="sparse gradients for the embedding through SparseAdam, dense ones through AdamW, behind one wrapper")
def sparse_and_dense_behind_one_wrapper() -> TrainLoop:
    model = TaggerNet()
    optimizer = MultipleOptimizer(
        torch.optim.SparseAdam(model.embed.parameters(), lr=1e-2),
        torch.optim.AdamW(model.body.parameters(), lr=1e-2, weight_decay=0.0),
    )
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(torch.arange(6).view(6, 1) + torch.arange(8),),
        fit=lambda batches: train_tagger(model, optimizer, batches),
    )
