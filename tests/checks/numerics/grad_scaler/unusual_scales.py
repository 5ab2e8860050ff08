"""Gradient scalers in the hands of people who know them: other scales, other orders, a part of it done by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def loss_of(model, x, y, dtype=torch.bfloat16, reduction="mean"):
    with torch.autocast("cpu", dtype=dtype):
        return F.cross_entropy(model(x), y, reduction=reduction)


def classifier(train, make_optimizer=None, **how):
    """A small classifier under a scaler of these arguments; ``train`` is given model, optimizer, scaler, batches."""
    model = relu_mlp(8, 16, 4)
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **how})
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train(model, optimizer, scaler, batches),
    )


def train_plainly(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y, torch.float16, "sum")).backward()
        scaler.step(optimizer)
        scaler.update()


@odd(notes="the scale starts at 2^24: a dozen steps are skipped before one fits")
def scale_from_2_24() -> TrainLoop:
    return classifier(train_plainly, init_scale=2.0**24)


@odd(notes="the scale is tried twice as high after every two steps, and falls back each time it overflows")
def scale_that_saws() -> TrainLoop:
    return classifier(train_plainly, init_scale=2.0**14, growth_interval=2)


@odd(notes="growth and backoff are no powers of two, nor is the scale")
def scale_of_odd_numbers() -> TrainLoop:
    return classifier(train_plainly, init_scale=3000.0, growth_factor=1.7, backoff_factor=0.6, growth_interval=3)


@odd(notes="a fused optimizer takes the scale off inside its own step: what it reads is scaled")
def fused_adam_under_a_scaler() -> TrainLoop:
    return classifier(train_plainly, lambda p: torch.optim.Adam(p, lr=5e-3, fused=True), init_scale=2.0**12)


def train_set_by_hand(model, optimizer, scaler, batches):
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update(2.0 ** (8 + i % 4))


@odd(notes="the scale is set to another number at every update")
def scale_set_at_every_update() -> TrainLoop:
    return classifier(train_set_by_hand)


def train_guarded(model, optimizer, scaler, batches):
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm) and i % 5 != 3:
            scaler.step(optimizer)
        scaler.update()


@odd(notes="the step is left out, and the scaler updated, where the norm is not finite or a batch is held to be bad")
def bad_batches_left_out_before_the_step() -> TrainLoop:
    return classifier(train_guarded)


def train_unscaled_then_plain_step(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        scaler.update()


@odd(
    notes="the scaler unscales and keeps the scale; infinities are looked for by hand, and the step is the optimizer's"
)
def plain_step_after_unscale() -> TrainLoop:
    return classifier(train_unscaled_then_plain_step)


def train_divided_by_hand(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scale = scaler.get_scale()
        for p in model.parameters():
            p.grad.div_(scale)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@odd(notes="gradients are divided by get_scale() by hand, and the scaler neither steps nor updates")
def divided_by_get_scale() -> TrainLoop:
    return classifier(train_divided_by_hand)


def train_divided_rate(model, optimizer, scaler, batches, rate=0.1):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate / scaler.get_scale()
        optimizer.step()


@odd(notes="the scale is taken off the learning rate in place of the gradients")
def scale_taken_off_the_rate() -> TrainLoop:
    return classifier(train_divided_rate)


def train_hooked(model, optimizer, scaler, batches):
    def unscale(optimizer, _args, _kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(scaler.get_scale())

    handle = optimizer.register_step_pre_hook(unscale)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        optimizer.step()
    handle.remove()


@odd(notes="a hook on the optimizer takes the scale off right before its step")
def unscaled_in_a_step_hook() -> TrainLoop:
    return classifier(train_hooked)


def train_clipped_at_scale(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


@odd(notes="gradients are clipped while scaled, at a limit that is scaled as well")
def clipped_at_a_scaled_limit() -> TrainLoop:
    return classifier(train_clipped_at_scale)


def train_regularised_late(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        (1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        scaler.step(optimizer)
        scaler.update()


@odd(notes="a penalty in full precision is backpropagated unscaled, after the gradients have been unscaled")
def penalty_added_after_unscale() -> TrainLoop:
    return classifier(train_regularised_late)


def train_listed(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(x)
            losses = [F.cross_entropy(scores, y), 0.01 * scores.square().mean()]
        first, second = scaler.scale(losses)
        first.backward(retain_graph=True)
        second.backward()
        scaler.step(optimizer)
        scaler.update()


@odd(notes="two losses are scaled by one call, and backpropagated one after the other")
def two_losses_scaled_as_a_list() -> TrainLoop:
    return classifier(train_listed)


def train_windows(model, optimizer, scaler, batches, accumulate):
    for i, (x, y) in enumerate(batches, start=1):
        scaler.scale(loss_of(model, x, y) / accumulate).backward()
        if i % accumulate == 0 or i == len(batches):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@odd(notes="a window of micro-batches, with a scale that grows at every update")
def windows_with_a_growing_scale(accumulate=1) -> TrainLoop:
    return classifier(
        lambda model, optimizer, scaler, batches: train_windows(model, optimizer, scaler, batches, accumulate),
        init_scale=2.0**4,
        growth_interval=1,
    )


@odd(notes="a gradient's norm, divided by the scale, weighs a second loss; a scaler each for two nets of one loss")
def balance_by_unscaled_norms() -> TrainLoop:
    body, head = nn.Linear(8, 24), nn.Linear(24, 4)
    optimizers = [torch.optim.Adam(m.parameters(), lr=5e-3) for m in (body, head)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=512.0) for _ in optimizers]

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = torch.tanh(body(x))
                loss = F.cross_entropy(head(hidden), y)
                smooth = hidden.float().square().mean()
            (slope,) = torch.autograd.grad(scalers[0].scale(loss), hidden, retain_graph=True)
            weight = 0.1 * (slope / scalers[0].get_scale()).float().norm()
            for number, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                scalers[number].scale(loss + weight * smooth).backward(retain_graph=number == 0, inputs=_of(optimizer))
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()

    return TrainLoop(model={"body": body, "head": head}, optimizer=optimizers, batch=points(), fit=fit)


def _of(optimizer):
    return optimizer.param_groups[0]["params"]
