"""Gradients that are clipped, normalised or kept in buffers on their way to the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, points


def train_clipped(model, optimizer, batches, clip):
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


def regression_loop(clip, lr=0.05):
    model = mlp(8, 16, 1, activation=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=curves(),
        batches=fresh(curves),
        fit=lambda batches: train_clipped(model, optimizer, batches, clip),
    )


@odd(notes="every gradient entry is cut at 0.05, most of them are")
def clip_by_value() -> TrainLoop:
    return regression_loop(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05))


@odd(notes="each parameter's gradient is clipped on its own, so directions change")
def clip_per_parameter() -> TrainLoop:
    def clip(model):
        for p in model.parameters():
            torch.nn.utils.clip_grad_norm_([p], 0.1)

    return regression_loop(clip)


@odd(notes="gradients are clipped against the norm of their own weights (NFNet's adaptive clipping)")
def adaptive_gradient_clipping() -> TrainLoop:
    def clip(model, factor=0.1, eps=1e-3):
        for p in model.parameters():
            dims = tuple(range(1, p.ndim)) or (0,)
            limit = factor * p.detach().norm(dim=dims, keepdim=True).clamp(min=eps)
            norm = p.grad.norm(dim=dims, keepdim=True)
            p.grad.mul_((limit / norm.clamp(min=1e-6)).clamp(max=1.0))

    return regression_loop(clip)


@odd(notes="gradients are divided by their norm whatever it is: the step has always the same length")
def normalised_gradient_descent() -> TrainLoop:
    def normalise(model):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(0.5 / (norm + 1e-8))

    return regression_loop(normalise, lr=0.02)


class MainGrads:
    """Gradients are gathered in fp32 buffers, apart from p.grad, as Megatron does."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.buffers = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        for p, buffer in zip(self.parameters, self.buffers, strict=True):
            p.register_post_accumulate_grad_hook(self.moving_into(buffer))

    @staticmethod
    def moving_into(buffer):
        def move(p):
            buffer.add_(p.grad)
            p.grad = None

        return move

    def hand_over(self):
        for p, buffer in zip(self.parameters, self.buffers, strict=True):
            p.grad = buffer.to(p.dtype, copy=True)
            buffer.zero_()


def train_main_grads(model, optimizer, batches, accumulate):
    main = MainGrads(model)
    usable = len(batches) - len(batches) % accumulate
    for i, (x, y) in enumerate(batches):
        if i >= usable:
            break
        (F.cross_entropy(model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            main.hand_over()
            optimizer.step()
            optimizer.zero_grad()


@odd(
    notes="p.grad is emptied after every backward; the sum lives in buffers outside and is handed over before the step"
)
def accumulation_in_fp32_buffers(accumulate=1) -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_main_grads(model, optimizer, batches, accumulate),
    )
