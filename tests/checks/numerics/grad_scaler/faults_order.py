"""Gradient scalers that unscale or update at another moment than torch's examples do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.numerics.grad_scaler.faults_clips_and_updates import clip, right, scaled, tabular_net
from tests.loops import data
from tests.loops.nets import GPT, lm_loss, mlp
from tests.loops.pairs import pair

# Two networks, one scaler.


def train_gan(generator, critic, optimizers, scaler, batches, updates):
    for real in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        noise = torch.randn(len(real), 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = generator(noise)
            critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        scaler.scale(critic_loss).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generator_loss = F.softplus(-critic(fake)).mean()
        inputs = list(generator.parameters())
        scaler.scale(generator_loss).backward(inputs=inputs)
        for i, optimizer in enumerate(optimizers):
            scaler.step(optimizer)
            if updates == "each" or i == 1:
                scaler.update()


def gan(updates):
    def make():
        generator, critic = mlp(4, 16, 2), mlp(2, 16, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in (critic, generator)]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return TrainLoop(
            model={"generator": generator, "critic": critic},
            optimizer=optimizers,
            scaler=scaler,
            batch=data.ring(),
            fit=lambda batches: train_gan(generator, critic, optimizers, scaler, batches, updates),
        )

    return make


pair(
    "gan_scaler_updated_between_two_steps",
    "grad_scaler",
    "update_between",
    where="scaler.update()",
    faulty=gan("each"),
    fixed=gan("last"),
)


# An optimizer for the body and one for the head, which is clipped.


class Backbone:
    def __init__(self, late):
        self.model = nn.Sequential(mlp(6, 24, 24), nn.Tanh(), nn.Linear(24, 3))
        self.body = torch.optim.AdamW(self.model[0].parameters(), lr=3e-3)
        self.head = torch.optim.SGD(self.model[2].parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.late = late

    def fit(self, batches):
        for x, y in batches:
            self.model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.head)
            nn.utils.clip_grad_norm_(self.model[2].parameters(), 1.0)
            self.scaler.step(self.body)
            if self.late:
                self.scaler.update()
                self.scaler.step(self.head)
            else:
                self.scaler.step(self.head)
            self.scaler.update()


def backbone(late):
    def make():
        trainer = Backbone(late)
        return TrainLoop(
            model=trainer.model,
            optimizer=[trainer.body, trainer.head],
            scaler=trainer.scaler,
            batch=data.labelled(),
            fit=trainer.fit,
        )

    return make


pair(
    "head_unscaled_again_after_update",
    "grad_scaler",
    "update_between",
    faulty=backbone(late=True),
    fixed=backbone(late=False),
)


# What torch refuses.


def updated_by_habit(model, optimizer, scaler):
    right(model, optimizer, scaler)
    scaler.update()


def unscaled_for_the_log(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    _norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scaler.unscale_(optimizer)
    clip(model)
    scaler.step(optimizer)
    scaler.update()


def stepped_by_hand(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip(model)
    optimizer.step()


pair(
    "mlp_scaler_updated_twice",
    "grad_scaler",
    "update_twice",
    where="scaler.update()",
    raises="No inf checks were recorded prior to update",
    faulty=scaled(updated_by_habit, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)
pair(
    "mlp_unscaled_for_the_log_and_again",
    "grad_scaler",
    "unscaled_twice",
    where="scaler.unscale_(optimizer)",
    raises="unscale_() has already been called on this optimizer since the last update()",
    faulty=scaled(unscaled_for_the_log, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)
pair(
    "mlp_unscaled_by_the_scaler_stepped_without",
    "grad_scaler",
    "update_missing",
    where="scaler.unscale_(optimizer)",
    raises="unscale_() has already been called on this optimizer since the last update()",
    faulty=scaled(stepped_by_hand, tabular_net, data.labelled),
    fixed=scaled(right, tabular_net, data.labelled),
)


# Windows.


def train_window(model, optimizer, scaler, batches, accumulate, when):
    for i, batch in enumerate(batches, start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = lm_loss(model, batch) / accumulate
        scaler.scale(loss).backward()
        position = (i - 1) % accumulate
        last = position == accumulate - 1 or i == len(batches)
        if (when == "every" or (when == "first" and position == 0)) or (when == "last" and last):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def window(when):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        batches = [data.tokens(rows=4, seed=seed) for seed in range(16)]
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=batches[0],
            batches=batches,
            fit=lambda batches: train_window(model, optimizer, scaler, batches, 2, when),
        )

    return make


pair(
    "gpt_unscaled_in_every_micro_batch",
    "grad_scaler",
    "unscaled_twice",
    where="scaler.unscale_(optimizer)",
    raises="unscale_() has already been called on this optimizer since the last update()",
    faulty=window("every"),
    fixed=window("last"),
)
pair(
    "gpt_unscaled_at_the_start_of_the_window",
    "grad_scaler",
    "unscaled_inside_window",
    where="scaler.unscale_(optimizer)",
    faulty=window("first"),
    fixed=window("last"),
)


def train_two_losses(model, optimizer, scaler, batches, late):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.tanh(model[0](x))
            losses = F.cross_entropy(model[1](hidden), y), 0.1 * F.mse_loss(model[2](hidden), x)
        scaler.scale(losses[0]).backward(retain_graph=True)
        if late:
            scaler.unscale_(optimizer)
            clip(model)
        scaler.scale(losses[1]).backward()
        if not late:
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()


def two_losses(late):
    def make():
        model = nn.ModuleList([nn.Linear(6, 24), nn.Linear(24, 3), nn.Linear(24, 6)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=data.labelled(),
            fit=lambda batches: train_two_losses(model, optimizer, scaler, batches, late),
        )

    return make


pair(
    "clipped_before_the_second_loss",
    "grad_scaler",
    "unscaled_inside_window",
    where="scaler.unscale_(optimizer)",
    faulty=two_losses(late=True),
    fixed=two_losses(late=False),
)
