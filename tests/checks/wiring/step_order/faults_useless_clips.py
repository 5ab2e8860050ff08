"""Clips that find nothing, and clips of other tensors than those that train."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, AutoEncoder, CharLSTM, lm_loss, mlp
from tests.loops.pairs import pair

# A character LSTM whose clip came along with zero_grad() when the loop was tidied up.


def train_lstm(model, optimizer, batches, *, clip_early=False):
    for ids, targets in batches:
        optimizer.zero_grad()
        if clip_early:
            clip_grad_norm_(model.parameters(), 1.0)
        loss = F.cross_entropy(model(ids).transpose(1, 2), targets)
        loss.backward()
        if not clip_early:
            clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()


def lstm(**how):
    def make():
        model = CharLSTM()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            fit=lambda batches: train_lstm(model, optimizer, batches, **how),
        )

    return make


pair(
    "lstm_clipped_before_backward",
    "step_order",
    "clips_nothing",
    where="clip_grad_norm_(model.parameters(), 1.0)",
    culprits=("clip_grad_norm_",),
    quick=True,
    faulty=lstm(clip_early=True),
    fixed=lstm(),
)


# A trainer that keeps its parameters in an attribute: a filter, which building the optimizer uses up.


class Trainer:
    def __init__(self, model, params):
        self.model = model
        self.params = params
        self.optimizer = torch.optim.Adam(self.params, lr=3e-3)

    def parameters_to_clip(self):
        return self.params

    def fit(self, batches):
        for x, _ in batches:
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), x).backward()
            clip_grad_norm_(self.parameters_to_clip(), 0.5)
            self.optimizer.step()


class TrainerClippingStateDict(Trainer):
    def parameters_to_clip(self):
        return self.model.state_dict().values()


def autoencoder(trainer_class, params):
    def make():
        model = AutoEncoder()
        trainer = trainer_class(model, params(model))
        return TrainLoop(model=model, optimizer=trainer.optimizer, batch=data.table(), fit=trainer.fit)

    return make


def trained(model):
    return filter(lambda p: p.requires_grad, model.parameters())


def as_list(model):
    return list(trained(model))


pair(
    "autoencoder_clip_handed_a_used_up_filter",
    "step_order",
    "clips_nothing",
    where="clip_grad_norm_(self.parameters_to_clip(), 0.5)",
    faulty=autoencoder(Trainer, trained),
    fixed=autoencoder(Trainer, as_list),
)


pair(
    "autoencoder_clip_handed_the_state_dict",
    "step_order",
    "clips_nothing",
    where="clip_grad_norm_(self.parameters_to_clip(), 0.5)",
    faulty=autoencoder(TrainerClippingStateDict, as_list),
    fixed=autoencoder(Trainer, as_list),
)


# A GPT whose clip stands at the end of the iteration: only those with a gradient are handed over, and none has one.


def train_gpt(model, optimizer, batches, *, clip_last=False):
    def clip():
        clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)

    for batch in batches:
        lm_loss(model, batch).backward()
        if not clip_last:
            clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clip_last:
            clip()


def gpt(train=train_gpt, groups=lambda model: model.parameters(), **how):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(rows=8),
            fit=lambda batches: train(model, optimizer, batches, **how),
        )

    return make


# A GAN whose generator step was copied from the discriminator's, with its clip.


def train_gan(generator, discriminator, g_optimizer, d_optimizer, batches, *, copied):
    for real in batches:
        noise = torch.randn(len(real), 4)
        d_optimizer.zero_grad()
        fooled = discriminator(generator(noise).detach())
        (F.softplus(-discriminator(real)).mean() + F.softplus(fooled).mean()).backward()
        clip_grad_norm_(discriminator.parameters(), 1.0)
        d_optimizer.step()

        g_optimizer.zero_grad()
        F.softplus(-discriminator(generator(noise))).mean().backward()
        clipped = discriminator if copied else generator
        clip_grad_norm_(clipped.parameters(), max_norm=1.0)
        g_optimizer.step()


def gan(**how):
    def make():
        generator, discriminator = mlp(4, 16, 2), mlp(2, 16, 1)
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3)
        d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3)
        return TrainLoop(
            model={"generator": generator, "discriminator": discriminator},
            optimizer=[g_optimizer, d_optimizer],
            batch=data.ring(),
            fit=lambda batches: train_gan(generator, discriminator, g_optimizer, d_optimizer, batches, **how),
        )

    return make


pair(
    "gan_generator_step_clips_discriminator",
    "step_order",
    "clips_another",
    where="clip_grad_norm_(clipped.parameters(), max_norm=1.0)",
    culprits=("clip_grad_norm_", "generator.0.weight"),
    faulty=gan(copied=True),
    fixed=gan(copied=False),
)


# A DQN that clips its target network, which has no gradients.


class DQN:
    def __init__(self, clip_target):
        self.policy_net = mlp(4, 16, 3)
        self.target_net = copy.deepcopy(self.policy_net)
        self.clipped = self.target_net if clip_target else self.policy_net
        self.optimizer = torch.optim.Adam(self.policy_net.parameters(), lr=3e-3)

    def fit(self, batches):
        for states, actions, returns in batches:
            with torch.no_grad():
                goal = returns + 0.5 * self.target_net(states.roll(1, 0)).amax(1)
            chosen = self.policy_net(states).gather(1, actions[:, None]).squeeze(1)
            self.optimizer.zero_grad()
            F.smooth_l1_loss(chosen, goal).backward()
            clip_grad_norm_(self.clipped.parameters(), 0.5)
            self.optimizer.step()


def dqn(**how):
    def make():
        agent = DQN(**how)
        return TrainLoop(
            model={"policy": agent.policy_net, "target": agent.target_net},
            optimizer=agent.optimizer,
            batch=data.episode(),
            frozen=("target",),
            fit=agent.fit,
        )

    return make


pair(
    "dqn_clips_target_network",
    "step_order",
    "clips_another",
    where="clip_grad_norm_(self.clipped.parameters(), 0.5)",
    culprits=("clip_grad_norm_", "policy.0.weight"),
    quick=True,
    faulty=dqn(clip_target=True),
    fixed=dqn(clip_target=False),
)


# A GPT with groups by weight decay, of which the clip is handed the first.


def by_decay(model):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def train_gpt_by_groups(model, optimizer, batches, *, all_groups):
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        lm_loss(model, batch).backward()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(params if all_groups else optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()


pair(
    "gpt_clips_first_group",
    "step_order",
    "clips_one_group",
    where='clip_grad_norm_(params if all_groups else optimizer.param_groups[0]["params"], 1.0)',
    quick=True,
    faulty=gpt(train_gpt_by_groups, by_decay, all_groups=False),
    fixed=gpt(train_gpt_by_groups, by_decay, all_groups=True),
)


# A classifier with a learned prototype loss: the optimizer holds both, the clip takes the model only.


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 8))

    def forward(self, features, y):
        return F.cross_entropy(-torch.cdist(features, self.centres), y)


def prototypes(*, clip_all):
    def make():
        model, criterion = mlp(6, 16, 8), Prototypes()
        both = nn.ModuleList([model, criterion])
        optimizer = torch.optim.AdamW(both.parameters(), lr=3e-3)

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                clip_grad_norm_((both if clip_all else model).parameters(), 1.0)
                optimizer.step()

        return TrainLoop(
            model={"model": model, "criterion": criterion}, optimizer=optimizer, batch=data.labelled(), fit=fit
        )

    return make


pair(
    "clip_without_criterion",
    "step_order",
    "clip_leaves_out",
    level="advice",
    where="clip_grad_norm_((both if clip_all else model).parameters(), 1.0)",
    culprits=("clip_grad_norm_", "criterion.centres"),
    quick=True,
    faulty=prototypes(clip_all=False),
    fixed=prototypes(clip_all=True),
)


# Windows of three micro-batches, clipped with each.


def windows_of_three(*, clip_each):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def fit(batches):
            for i, (x, y) in enumerate(batches, start=1):
                (F.cross_entropy(model(x), y) / 3).backward()
                if clip_each or i % 3 == 0 or i == len(batches):
                    clip_grad_norm_(model.parameters(), 0.05)
                if i % 3 == 0 or i == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "clipped_with_each_of_three_micro_batches",
    "step_order",
    "clip_inside_window",
    level="advice",
    where="clip_grad_norm_(model.parameters(), 0.05)",
    quick=True,
    faulty=windows_of_three(clip_each=True),
    fixed=windows_of_three(clip_each=False),
)
