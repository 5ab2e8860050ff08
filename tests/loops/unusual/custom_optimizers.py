"""Optimizers of a project's own, unusual groups, and steps that happen inside backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - b1).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - b2)


@odd(notes="an Optimizer of the project's own whose update depends on the gradient's sign only")
def lion_custom_optimizer() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = Lion(model.parameters(), lr=3e-3, weight_decay=0.01)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


def train_all(model, optimizers, batches):
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@odd(notes="two optimizers for decayed and undecayed parameters, given as a dict")
def decay_and_no_decay_optimizers() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizers = {
        "decay": torch.optim.AdamW(decay, lr=5e-3, weight_decay=0.1, foreach=True),
        "plain": torch.optim.AdamW(plain, lr=5e-3, weight_decay=0.0, fused=True),
    }
    return TrainLoop(
        model=model,
        optimizer=optimizers,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_all(model, list(optimizers.values()), batches),
    )


@odd(notes="the trunk stands in a group of rate 0: it gets gradients and never moves, as configured")
def group_of_rate_zero() -> TrainLoop:
    model = nn.ModuleDict({"trunk": relu_mlp(8, 16, 16), "head": nn.Linear(16, 4)})
    groups = [{"params": model["trunk"].parameters(), "lr": 0.0}, {"params": model["head"].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.2)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model["head"](model["trunk"](x).relu()), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


def attach_fused_steps(model, lr):
    """One optimizer per parameter, stepped as soon as its gradient is complete (PyTorch's own tutorial)."""
    per_parameter = {p: torch.optim.Adam([p], lr=lr, foreach=False) for p in model.parameters()}

    def step_now(parameter):
        per_parameter[parameter].step()
        per_parameter[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    return per_parameter


@odd(notes="no step() and no zero_grad() in the loop: both run in hooks during backward, one optimizer per parameter")
def step_fused_into_backward() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    per_parameter = attach_fused_steps(model, lr=5e-3)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()

    return TrainLoop(
        model=model, optimizer=list(per_parameter.values()), batch=points(), batches=fresh(points), fit=fit
    )


class LOMO:
    """Low-memory optimisation: the update is the hook, the gradient is gone after it."""

    def __init__(self, model, lr):
        self.model, self.lr = model, lr
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        p.add_(p.grad, alpha=-self.lr)
        p.grad = None

    def fused_backward(self, loss):
        loss.backward()


@odd(notes="no optimizer object at all: hooks move the weights while backward is still running (LOMO)")
def update_in_hook_without_optimizer() -> TrainLoop:
    model = mlp(8, 16, 1, activation=nn.Tanh)
    lomo = LOMO(model, lr=0.05)

    def fit(batches):
        for x, y in batches:
            lomo.fused_backward(F.mse_loss(model(x), y))

    return TrainLoop(model=model, batch=curves(), fit=fit)


class GaLore(torch.optim.Optimizer):
    """Adam in a low-rank space of each matrix gradient, the space renewed now and then."""

    def __init__(self, params, lr=1e-2, rank=2, renew=10):
        super().__init__(params, {"lr": lr, "rank": rank, "renew": renew})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[p], p.grad
                step = state["step"] = state.get("step", 0) + 1
                if p.ndim == 2:
                    if step % group["renew"] == 1:
                        state["basis"] = torch.linalg.svd(gradient, full_matrices=False)[0][:, : group["rank"]]
                    gradient = state["basis"].T @ gradient
                m = state.setdefault("m", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
                v = state.setdefault("v", torch.zeros_like(gradient)).lerp_(gradient.square(), 0.01)
                update = (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
                p.add_(state["basis"] @ update if p.ndim == 2 else update, alpha=-group["lr"])


@odd(notes="the gradient is projected to rank two before it is used, so most of it is never consumed (GaLore)")
def galore_low_rank_gradient() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = GaLore(model.parameters())
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train(model, optimizer, batches),
    )


class WithGradientFilter(torch.optim.SGD):
    """Only the larger half of each gradient's entries is used (top-k sparsified, with error feedback)."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                error = self.state[p].setdefault("error", torch.zeros_like(p))
                p.grad.add_(error)
                limit = p.grad.abs().flatten().median()
                error.copy_(torch.where(p.grad.abs() < limit, p.grad, torch.zeros_like(p.grad)))
                p.grad.sub_(error)
        return super().step(closure)


@odd(
    notes="half of every gradient is held back and comes with a later step (error feedback): what is consumed "
    "is not what came"
)
def top_k_gradient_with_error_feedback() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = WithGradientFilter(model.parameters(), lr=0.1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, batches),
    )


class CompositeLoss(nn.Module):
    """Task losses weighted by learned uncertainties (Kendall et al.)."""

    def __init__(self, tasks):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        return sum((-s).exp() * loss + s for s, loss in zip(self.log_vars, losses, strict=True))


def train_uncertainty(model, criterion, optimizer, batches):
    for x, y, aim in batches:
        out = model(x)
        losses = [F.cross_entropy(out[:, :4], y), F.mse_loss(out[:, 4:], aim)]
        optimizer.zero_grad()
        criterion(losses).backward()
        optimizer.step()


@odd(notes="the criterion has parameters of its own, in the same optimizer as the model's; the loss goes below 0")
def learned_loss_weights_in_criterion() -> TrainLoop:
    model, criterion = relu_mlp(8, 16, 5), CompositeLoss(2)
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)
    x, y = points()
    return TrainLoop(
        model=[model, criterion],
        optimizer=optimizer,
        batch=(x, y, x[:, :1] - x[:, 1:2]),
        fit=lambda batches: train_uncertainty(model, criterion, optimizer, batches),
    )


@odd(notes="as learned_loss_weights_in_criterion, but only the model was declared: the optimizer holds one tensor more")
def learned_loss_weights_not_declared() -> TrainLoop:
    model, criterion = relu_mlp(8, 16, 5), CompositeLoss(2)
    optimizer = torch.optim.Adam(
        [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 1e-3}], lr=1e-2
    )
    x, y = points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(x, y, x[:, :1] - x[:, 1:2]),
        fit=lambda batches: train_uncertainty(model, criterion, optimizer, batches),
    )


def train_center_loss(model, centers, opt_model, opt_centers, batches, weight=0.1):
    for x, y in batches:
        features = model[0](x)
        loss = F.cross_entropy(model[1](features.relu()), y)
        loss = loss + weight * (features - centers[y]).square().sum(1).mean()
        opt_model.zero_grad()
        opt_centers.zero_grad()
        loss.backward()
        opt_model.step()
        centers.grad.div_(weight)
        opt_centers.step()


@odd(notes="the loss's weight is divided out of one gradient by hand before its optimizer steps (center loss)")
def center_loss_two_optimizers() -> TrainLoop:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    centers = nn.Parameter(torch.randn(4, 12))
    opt_model = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt_centers = torch.optim.SGD([centers], lr=0.5)
    return TrainLoop(
        model=model,
        optimizer=[opt_model, opt_centers],
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_center_loss(model, centers, opt_model, opt_centers, batches),
    )
