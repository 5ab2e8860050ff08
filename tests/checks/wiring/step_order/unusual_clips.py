"""Clips that look wrong and are right: of one network for two steps, of a part, of nothing in some turns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, CharLSTM, lm_loss, mlp
from tests.loops.odd import odd


def gan(clip, **fields):
    generator, discriminator = mlp(4, 16, 2), mlp(2, 16, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3)

    def fit(batches):
        for real in batches:
            noise = torch.randn(len(real), 4)
            d_optimizer.zero_grad()
            fooled = discriminator(generator(noise).detach())
            (F.softplus(-discriminator(real)).mean() + F.softplus(fooled).mean()).backward()
            clip("discriminator", generator, discriminator)
            d_optimizer.step()
            g_optimizer.zero_grad()
            F.softplus(-discriminator(generator(noise))).mean().backward()
            clip("generator", generator, discriminator)
            g_optimizer.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batch=data.ring(),
        fit=fit,
        **fields,
    )


@odd(notes="both nets are clipped before both steps, one of them in vain each time")
def both_nets_clipped_before_both_steps() -> TrainLoop:
    def clip(turn, generator, discriminator):
        clip_grad_norm_(generator.parameters(), 1.0)
        clip_grad_norm_(discriminator.parameters(), 1.0)

    return gan(clip)


@odd(notes="the whole of both nets is clipped by one norm before each of the two steps")
def both_nets_clipped_as_one() -> TrainLoop:
    def clip(turn, generator, discriminator):
        clip_grad_norm_([*generator.parameters(), *discriminator.parameters()], 1.0)

    return gan(clip)


@odd(notes="the discriminator alone is clipped, in its own turn; the generator is not, on purpose")
def only_the_discriminator_is_clipped() -> TrainLoop:
    def clip(turn, generator, discriminator):
        if turn == "discriminator":
            clip_grad_value_(discriminator.parameters(), 0.05)

    return gan(clip)


@odd(notes="the norm of the other net is logged by an infinite clip before each step")
def norm_of_the_other_net_is_logged() -> TrainLoop:
    norms = []

    def clip(turn, generator, discriminator):
        other = generator if turn == "discriminator" else discriminator
        norms.append(float(clip_grad_norm_(other.parameters(), float("inf"))))

    return gan(clip)


def classifier(train, *, optimizer=None):
    model = mlp(6, 16, 3)
    optimizer = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=data.labelled(),
        fit=lambda batches: train(model, optimizer, batches),
    )


@odd(notes="cut by value, then by norm: two clips of the same gradients before one step")
def clipped_by_value_then_by_norm() -> TrainLoop:
    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_value_(model.parameters(), 0.1)
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return classifier(train)


@odd(notes="each group of the optimizer is clipped by itself, one of the groups is empty")
def each_group_with_its_own_limit() -> TrainLoop:
    def optimizer(model):
        layers = [list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
        return torch.optim.SGD([{"params": params} for params in (*layers, [])], lr=0.1)

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for limit, group in zip((0.5, 1.0, 1.0), optimizer.param_groups, strict=True):
                clip_grad_norm_(group["params"], limit)
            optimizer.step()

    return classifier(train, optimizer=optimizer)


@odd(notes="the optimizer and each clip get a filter of their own, of which each is used up at once")
def filters_made_for_each_clip() -> TrainLoop:
    def trained(model):
        return filter(lambda p: p.requires_grad, model.parameters())

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(trained(model), 0.5)
            optimizer.step()

    return classifier(train, optimizer=lambda model: torch.optim.SGD(trained(model), lr=0.1))


@odd(notes="only the recurrent part is clipped, as its gradients alone explode")
def only_the_recurrent_part_is_clipped() -> TrainLoop:
    model = CharLSTM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    recurrent = [p for m in model.modules() if isinstance(m, nn.LSTM) for p in m.parameters()]

    def fit(batches):
        for ids, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids).transpose(1, 2), targets).backward()
            clip_grad_norm_(recurrent, 0.5)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(rows=8), fit=fit)


@odd(notes="each example's gradient is clipped and added to a buffer, which the step reads")
def gradients_of_examples_clipped_into_a_buffer() -> TrainLoop:
    def train(model, optimizer, batches):
        for x, y in batches:
            sums = [torch.zeros_like(p) for p in model.parameters()]
            for row, label in zip(x, y, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(row[None]), label[None]).backward()
                clip_grad_norm_(model.parameters(), 0.5)
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += p.grad
            for total, p in zip(sums, model.parameters(), strict=True):
                p.grad = total / len(x)
            optimizer.step()

    return classifier(train)


@odd(notes="a frozen trunk is handed to the clip as well as the head: it never has a gradient")
def a_frozen_trunk_is_clipped_apart() -> TrainLoop:
    trunk, head = mlp(6, 16, 8).requires_grad_(False), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(head(trunk(x)), y).backward()
            clip_grad_norm_(trunk.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(
        model={"trunk": trunk, "head": head},
        optimizer=optimizer,
        batch=data.labelled(),
        frozen=("trunk",),
        fit=fit,
    )


@odd(notes="the sharpness-aware ascent is along a clipped gradient, which is then zeroed")
def ascent_along_a_clipped_gradient() -> TrainLoop:
    def train(model, optimizer, batches, rho=0.05):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                kept = [(p, p.clone()) for p in model.parameters()]
                for p in model.parameters():
                    p.add_(p.grad, alpha=rho)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, value in kept:
                    p.copy_(value)
            optimizer.step()

    return classifier(train)


@odd(notes="a GPT whose decayed group is another part of the model than the other one, which is clipped alone")
def the_head_is_clipped_alone() -> TrainLoop:
    model = GPT()
    head = {id(p) for name, p in model.named_parameters() if name.startswith("head")}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in head], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) in head], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=3e-3)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            lm_loss(model, batch).backward()
            clip_grad_norm_(optimizer.param_groups[-1]["params"], 1.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(rows=8), fit=fit)


@odd(notes="windows that go on across epochs: the counter is kept by the trainer")
def windows_go_on_across_epochs(accumulate=1) -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    seen = [0]

    def fit(batches):
        for x, y in batches:
            seen[0] += 1
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if seen[0] % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="five batches a loader, and no window by default: whether others leave some over is the setting's matter")
def no_window_by_default(accumulate=1) -> TrainLoop:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(*data.labelled(rows=40)), batch_size=8)

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@odd(notes="each window begins with zeroing, so what an epoch leaves over is dropped")
def each_window_begins_with_zeroing(accumulate=1) -> TrainLoop:
    def train(model, optimizer, batches):
        for i, (x, y) in enumerate(batches):
            if i % accumulate == 0:
                optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()

    return classifier(train)


@odd(
    notes="a penalty on the gradient's norm by two gradients that are added with weights, at two states of the weights"
)
def gradient_norm_penalty_by_two_passes() -> TrainLoop:
    def train(model, optimizer, batches, share=0.7, radius=0.05):
        for x, y in batches:
            optimizer.zero_grad()
            ((1 - share) * F.cross_entropy(model(x), y)).backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                moves = [radius * p.grad / (norm + 1e-12) for p in model.parameters()]
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            (share * F.cross_entropy(model(x), y)).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()

    return classifier(train)


@odd(notes="the gradient of the loss under noise on the weights, averaged over two draws of opposite sign")
def antithetic_noise_on_the_weights() -> TrainLoop:
    def train(model, optimizer, batches, spread=0.02):
        for x, y in batches:
            optimizer.zero_grad()
            noise = [spread * torch.randn_like(p) for p in model.parameters()]
            for sign in (1.0, -2.0):
                with torch.no_grad():
                    for p, n in zip(model.parameters(), noise, strict=True):
                        p.add_(n, alpha=sign)
                (F.cross_entropy(model(x), y) / 2).backward()
            with torch.no_grad():
                for p, n in zip(model.parameters(), noise, strict=True):
                    p.add_(n)
            optimizer.step()

    return classifier(train)


def moved_after_each_step(after, lr=0.1):
    def train(model, optimizer, batches):
        start = [p.detach().clone() for p in model.parameters()]
        for i, (x, y) in enumerate(batches, start=1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                after(i, list(model.parameters()), start)

    return classifier(train, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr))


@odd(notes="look-ahead: every fifth step the weights go half of the way back to the slow ones, which then follow")
def look_ahead_every_fifth_step() -> TrainLoop:
    def after(i, parameters, slow):
        if i % 5 == 0:
            for p, s in zip(parameters, slow, strict=True):
                s.lerp_(p, 0.5)
                p.copy_(s)

    return moved_after_each_step(after)


@odd(notes="Reptile with one inner step: the weights go back nine tenths of it, to where the step began")
def reptile_with_one_inner_step() -> TrainLoop:
    def after(i, parameters, begun):
        for p, b in zip(parameters, begun, strict=True):
            b.lerp_(p, 0.3)
            p.copy_(b)

    return moved_after_each_step(after, lr=0.5)


@odd(notes="a weak anchor: after each step the weights go a thousandth of the way back to where they began")
def a_weak_anchor_at_the_start() -> TrainLoop:
    def after(i, parameters, start):
        for p, s in zip(parameters, start, strict=True):
            p.lerp_(s, 1e-3)

    return moved_after_each_step(after)


@odd(notes="weight decay written by hand: a strong pull towards zero")
def strong_decay_by_hand() -> TrainLoop:
    def after(i, parameters, start):
        for p in parameters:
            p.mul_(0.97)

    return moved_after_each_step(after, lr=0.3)


@odd(notes="the weights are projected onto a ball after each step, which takes back part of it")
def projected_onto_a_ball() -> TrainLoop:
    def after(i, parameters, start):
        for p, s in zip(parameters, start, strict=True):
            p.mul_((s.norm() / p.norm().clamp(min=1e-12)).clamp(max=1.0))

    return moved_after_each_step(after)
