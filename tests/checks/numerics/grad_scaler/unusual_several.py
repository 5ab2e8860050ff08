"""Gradient scalers among several models, and those of one's own; scales that go on elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.unusual_scales import classifier, loss_of, train_plainly
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def train_alternating(generator, critic, optimizers, scaler, batches):
    for x, _ in batches:
        noise = torch.randn(len(x), 4)
        fake = generator(noise)
        optimizers[0].zero_grad()
        scaler.scale(F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].zero_grad()
        scaler.scale(F.softplus(-critic(fake)).mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()


@odd(
    notes="two networks in turn: backward, step and update for each, all through one scaler; the second backward "
    "leaves gradients on the critic that are wiped"
)
def gan_with_an_update_for_each() -> TrainLoop:
    generator, critic = relu_mlp(4, 16, 8), relu_mlp(8, 16, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (critic, generator)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1)
    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=optimizers,
        scaler=scaler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_alternating(generator, critic, optimizers, scaler, batches),
    )


def train_apart(models, optimizers, scalers, batches):
    for x, y in batches:
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()


@odd(notes="three models side by side, each with a scaler of its own that grows at its own pace")
def a_scaler_for_each_model() -> TrainLoop:
    models = [relu_mlp(8, 16, 4) for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + i), growth_interval=1 + i) for i in range(3)]
    return TrainLoop(
        model={f"model{i}": m for i, m in enumerate(models)},
        optimizer=optimizers,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_apart(models, optimizers, scalers, batches),
    )


def train_one_scaled_one_not(models, optimizers, scaler, batches):
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss_of(models[0], x, y)).backward()
        F.cross_entropy(models[1](x), y).backward()
        scaler.step(optimizers[0])
        optimizers[1].step()
        scaler.update()


@odd(notes="one model trains in mixed precision through the scaler, the other in full precision past it")
def a_model_past_the_scaler() -> TrainLoop:
    models = [relu_mlp(8, 16, 4) for _ in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=5e-3) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return TrainLoop(
        model={"half": models[0], "full": models[1]},
        optimizer=optimizers,
        scaler=scaler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_one_scaled_one_not(models, optimizers, scaler, batches),
    )


def train_ramped(model, optimizer, scaler, batches, warmup=8):
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = 4.0 ** min(0, i - warmup) * loss_of(model, x, y, torch.float16, "sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@odd(notes="the loss is ramped up from 1/65536, so that a scale that fitted overflows later, more than ten times over")
def scale_that_falls_as_the_loss_is_ramped_up() -> TrainLoop:
    return classifier(train_ramped, lambda p: torch.optim.Adam(p, lr=1e-2), init_scale=2.0**26)


@odd(notes="the scaler's state is loaded before the first step: it goes on where it was saved")
def scaler_that_is_resumed() -> TrainLoop:
    def train(model, optimizer, scaler, batches):
        saved = {**scaler.state_dict(), "scale": 2.0**9, "_growth_tracker": 3}
        scaler.load_state_dict(saved)
        train_plainly(model, optimizer, scaler, batches)

    return classifier(train, init_scale=2.0**16)


class OwnScale:
    """A dynamic loss scale of one's own, without torch's."""

    def __init__(self, scale=2.0**15):
        self.scale = scale

    def step(self, model, optimizer, loss):
        (loss * self.scale).backward()
        grads = [p.grad for p in model.parameters()]
        if not all(torch.isfinite(g).all() for g in grads):
            self.scale /= 2
            return
        torch._foreach_div_(grads, self.scale)
        optimizer.step()


def train_own_scale(model, optimizer, scaler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.step(model, optimizer, loss_of(model, x, y, torch.float16, "sum"))


@odd(notes="a dynamic loss scale written by hand: it is divided out, or the step is left out")
def dynamic_scale_by_hand() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_own_scale(model, optimizer, OwnScale(), batches),
    )


def train_sharpened(model, optimizer, scaler, batches, radius=0.02):
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            shifts = [radius * p.grad / (norm + 1e-12) for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), shifts)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), shifts)
        scaler.step(optimizer)
        scaler.update()


@odd(notes="sharpness-aware: the first of two backward passes is scaled, normalised by hand, and never unscaled")
def sharpness_aware_under_a_scaler() -> TrainLoop:
    return classifier(train_sharpened)


def train_half_weights(model, optimizer, scaler, batches):
    masters = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
    optimizer.param_groups[0]["params"] = masters
    for x, y in batches:
        scaler.scale(F.cross_entropy(model(x.to(torch.bfloat16)).float(), y)).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


@odd(notes="bf16 weights with fp32 copies, whose gradients are put there by hand while they are scaled")
def masters_under_a_scaler() -> TrainLoop:
    model = relu_mlp(8, 16, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_half_weights(model, optimizer, scaler, batches),
    )
