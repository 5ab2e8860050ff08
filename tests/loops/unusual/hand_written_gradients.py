"""Gradients and updates written by hand: what the step reads is not what a backward left."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import cross_entropy, loop
from tests.loops.random_data import curves, fresh, points


def train_without_optimizer(model, batches, lr=0.2):
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
                p.grad = None


@odd(notes="gradient descent in two lines and no optimizer object")
def sgd_without_optimizer() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    return TrainLoop(
        model=model,
        batch=points(),
        batches=fresh(points),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        fit=lambda batches: train_without_optimizer(model, batches),
    )


def train_momentum_in_grad(model, optimizer, batches, momentum=0.8):
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.mul_(momentum)


@odd(notes="gradients are never zeroed: they are scaled after each step, so p.grad is the momentum buffer")
def momentum_kept_in_grad() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_momentum_in_grad(model, optimizer, batches),
    )


def train_autograd_grad(model, optimizer, batches):
    weights = list(model.parameters())
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        for p, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            p.grad = g
        optimizer.step()


@odd(notes="backward() is never called: autograd.grad gives the gradients, assigned to p.grad; nothing is ever zeroed")
def gradients_by_autograd_grad() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_autograd_grad(model, optimizer, batches),
    )


class PrivateSGD:
    """DP-SGD with per-example gradients by vmap: clip each, add noise, average."""

    def __init__(self, model, optimizer, bound=1.0, noise=0.1):
        self.model, self.optimizer, self.bound, self.noise = model, optimizer, bound, noise
        self.per_example = vmap(grad(self.loss_of_one), in_dims=(None, 0, 0))

    def loss_of_one(self, weights, x, y):
        return F.cross_entropy(functional_call(self.model, weights, (x[None],)), y[None])

    def fit(self, batches):
        for x, y in batches:
            weights = {n: p.detach() for n, p in self.model.named_parameters()}
            gradients = self.per_example(weights, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factor = (self.bound / (norms + 1e-6)).clamp(max=1.0)
            for n, p in self.model.named_parameters():
                total = torch.einsum("i,i...->...", factor, gradients[n])
                p.grad = (total + self.noise * self.bound * torch.randn_like(p)) / len(x)
            self.optimizer.step()


@odd(notes="per-example gradients through vmap over detached weights: no backward ever touches the parameters (DP-SGD)")
def dp_sgd_vmap() -> TrainLoop:
    model = mlp(8, 16, 4, activation=nn.Tanh)
    private = PrivateSGD(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return TrainLoop(model=model, optimizer=private.optimizer, batch=points(), batches=fresh(points), fit=private.fit)


def train_dp_by_rows(model, optimizer, batches, bound=1.0, noise=0.1):
    for x, y in batches:
        summed = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(len(x)):
            optimizer.zero_grad()
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), bound)
            assert torch.isfinite(norm)
            for s, p in zip(summed, model.parameters(), strict=True):
                s.add_(p.grad)
        for s, p in zip(summed, model.parameters(), strict=True):
            p.grad = (s + noise * bound * torch.randn_like(s)) / len(x)
        optimizer.step()


@odd(
    notes="one backward per row, zeroed before the next; "
    "what the step reads was put there by hand (DP-SGD by microbatches)"
)
def dp_sgd_one_row_at_a_time() -> TrainLoop:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(rows=4),
        fit=lambda batches: train_dp_by_rows(model, optimizer, batches),
    )


class TwoTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.classify = nn.Linear(16, 4)
        self.regress = nn.Linear(16, 1)

    def losses(self, x, y, aim):
        h = self.trunk(x)
        return F.cross_entropy(self.classify(h), y), F.mse_loss(self.regress(h), aim)


def two_task_batch():
    x, y = points()
    return x, y, x[:, :1] - x[:, 1:2]


def train_pcgrad(model, optimizer, batches):
    shared = list(model.trunk.parameters())
    for x, y, aim in batches:
        losses = model.losses(x, y, aim)
        kept = []
        for loss in losses:
            optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            kept.append([p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()])
        flat = [torch.cat([g.flatten() for g in gradients[: len(shared)]]) for gradients in kept]
        mended = list(flat)
        for i, j in ((0, 1), (1, 0)):
            dot = torch.dot(mended[i], flat[j])
            if dot < 0:
                mended[i] = mended[i] - dot / flat[j].square().sum() * flat[j]
        joint = (mended[0] + mended[1]).split([p.numel() for p in shared])
        for p, g in zip(shared, joint, strict=True):
            p.grad = g.view_as(p)
        for p, a, b in list(zip(model.parameters(), *kept, strict=True))[len(shared) :]:
            p.grad = a + b
        optimizer.step()


@odd(
    notes="one backward per task, each wiped; conflicting parts are projected away before the sum is assigned (PCGrad)"
)
def pcgrad_two_tasks() -> TrainLoop:
    model = TwoTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=two_task_batch(),
        batches=fresh(two_task_batch),
        fit=lambda batches: train_pcgrad(model, optimizer, batches),
    )


class GradNorm:
    """Task weights trained so that all tasks pull on the shared layer at a similar speed."""

    def __init__(self, model, lr=5e-3, alpha=1.0):
        self.model, self.alpha, self.first = model, alpha, None
        self.weights = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.opt_weights = torch.optim.Adam([self.weights], lr=lr)

    def fit(self, batches):
        shared = self.model.trunk[0].weight
        for batch in batches:
            losses = torch.stack(self.model.losses(*batch))
            self.first = losses.detach() if self.first is None else self.first
            self.optimizer.zero_grad()
            (self.weights.detach() * losses).sum().backward(retain_graph=True)
            pulls = torch.stack(
                [
                    torch.autograd.grad(weight * loss, shared, retain_graph=True, create_graph=True)[0].norm()
                    for weight, loss in zip(self.weights, losses, strict=True)
                ]
            )
            ratio = losses.detach() / self.first
            aim = (pulls.mean() * (ratio / ratio.mean()) ** self.alpha).detach()
            self.weights.grad = torch.autograd.grad((pulls - aim).abs().sum(), self.weights)[0]
            self.optimizer.step()
            self.opt_weights.step()
            with torch.no_grad():
                self.weights.mul_(2 / self.weights.sum())


@odd(notes="task weights outside the model, detached in the loss, trained by the gradient of gradient norms (GradNorm)")
def gradnorm_task_weights() -> TrainLoop:
    model = TwoTask()
    method = GradNorm(model)
    return TrainLoop(
        model=model,
        optimizer=[method.optimizer, method.opt_weights],
        batch=two_task_batch(),
        fit=method.fit,
    )


def train_adahessian(model, batches, lr=0.05, betas=(0.9, 0.99)):
    weights = list(model.parameters())
    m, v = [torch.zeros_like(p) for p in weights], [torch.zeros_like(p) for p in weights]
    for step, (x, y) in enumerate(batches, 1):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
        signs = [torch.randint_like(g, 2) * 2 - 1 for g in gradients]
        curvature = torch.autograd.grad(gradients, weights, grad_outputs=signs)
        with torch.no_grad():
            for p, g, h, z, mi, vi in zip(weights, gradients, curvature, signs, m, v, strict=True):
                mi.lerp_(g, 1 - betas[0])
                vi.lerp_((h * z).square(), 1 - betas[1])
                scale = (vi / (1 - betas[1] ** step)).sqrt() + 0.1
                p.sub_(lr * mi / (1 - betas[0] ** step) / scale)


@odd(notes="second derivatives, no optimizer, p.grad stays None for ever (AdaHessian by hand)")
def adahessian_by_hand() -> TrainLoop:
    model = mlp(8, 12, 4, activation=nn.Tanh)
    return TrainLoop(model=model, batch=points(), fit=lambda batches: train_adahessian(model, batches))


def train_gradient_noise(model, optimizer, batches, eta=0.01, gamma=0.55):
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        std = (eta / (1 + step) ** gamma) ** 0.5
        for p in model.parameters():
            p.grad += std * torch.randn_like(p.grad)
        optimizer.step()


@odd(notes="annealed noise is added to every gradient between backward and step")
def gradient_noise() -> TrainLoop:
    model = relu_mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        fit=lambda batches: train_gradient_noise(model, optimizer, batches),
    )


def centralise(gradient):
    return gradient - gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True) if gradient.ndim > 1 else gradient


@odd(notes="tensor hooks change every gradient before it is accumulated: rows are centred (gradient centralisation)")
def gradient_centralisation_by_hooks() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    for p in model.parameters():
        p.register_hook(centralise)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return loop(model, points(), cross_entropy, optimizer, batches=fresh(points))


class Grokfast:
    """Slow components of the gradient are amplified."""

    def __init__(self, model, alpha=0.9, strength=1.0):
        self.model, self.alpha, self.strength = model, alpha, strength
        self.slow = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def __call__(self):
        for n, p in self.model.named_parameters():
            self.slow[n].lerp_(p.grad, 1 - self.alpha)
            p.grad = p.grad + self.strength * self.slow[n]


@odd(notes="p.grad is replaced by itself plus a moving average of earlier gradients (Grokfast)")
def grokfast_filtered_gradients() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    amplify = Grokfast(model)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            amplify()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)
