"""Autocast blocks that begin and end in odd places, and what low precision loses without harm."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import points

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def block(precision):
    return torch.autocast("cpu", dtype=DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES)


def net(*widths):
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def classifier(step, model=None, **fields):
    model = model or net(8, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            step(model, x, y)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit, **fields)


@odd(notes="the whole step stands inside one autocast block, backward too, and everything runs in low precision anyway")
def whole_step_inside_the_block(precision="bf16") -> TrainLoop:
    def step(model, x, y):
        with block(precision):
            F.cross_entropy(model(x), y).backward()

    return classifier(step)


@odd(notes="a gradient penalty is differentiated outside of the block, and computed inside of a second one")
def gradient_penalty_between_two_blocks(precision="bf16") -> TrainLoop:
    def step(model, x, y):
        x = x.detach().requires_grad_()
        with block(precision):
            loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with block(precision):
            loss = loss + 0.1 * slope.square().sum(1).mean()
        loss.backward()

    return classifier(step)


@odd(notes="blocks are recomputed inside of the block they were made in, which checkpoint() sees to")
def recomputed_blocks_in_low_precision(precision="bf16") -> TrainLoop:
    model = net(8, 32, 32, 4)

    def step(model, x, y):
        with block(precision):
            h = checkpoint(model[:4], x, use_reentrant=False)
            loss = F.cross_entropy(model[4:](h), y)
        loss.backward()

    return classifier(step, model)


@odd(notes="a reduction in bfloat16 over eight entries: it loses a digit, as any product of that size does")
def short_sums_in_bfloat16(precision="bf16") -> TrainLoop:
    def step(model, x, y):
        with block(precision):
            scores = model(x)
            penalty = scores.to(torch.bfloat16).square().mean() if precision == "bf16" else scores.square().mean()
            loss = F.cross_entropy(scores, y) + 0.01 * penalty.to(x.dtype)
        loss.backward()

    return classifier(step)


@odd(notes="a loss of 1e-3 in float16 without a scaler: gradients of 1e-5 are far above what float16 holds")
def small_loss_in_float16_that_float16_holds(precision="fp16") -> TrainLoop:
    def step(model, x, y):
        with block(precision):
            loss = 0.05 * F.cross_entropy(model(x), y)
        loss.backward()

    return classifier(step)


@odd(notes="a mask of zeros and small probabilities that underflow in half precision, and take no part in the sum")
def probabilities_that_vanish_in_float16(precision="fp16") -> TrainLoop:
    def step(model, x, y):
        with block(precision):
            scores = model(x)
        gate = torch.softmax(20 * scores.detach(), -1)
        (F.cross_entropy(scores.to(x.dtype), y, reduction="none") * (1 + gate.amax(-1))).mean().backward()

    return classifier(step)


@odd(notes="a loop in float32 with probabilities of 1e-9 in its loss, which no low precision would hold")
def tiny_probabilities_in_float32() -> TrainLoop:
    def step(model, x, y):
        p = model(x).softmax(-1)
        loss = -(p.gather(1, y[:, None]) + 1e-9).log().mean() + 1e-4 * (p + 1e-9).log().square().mean()
        loss.backward()

    return classifier(step)
