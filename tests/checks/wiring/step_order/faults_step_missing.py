"""Steps that are missing, or come before the gradient is there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import CharLSTM, ConvNet, mlp
from tests.loops.pairs import pair

# Loss scaling: the scale is updated, the optimizer is not stepped.


def train_scaled_without_step(model, optimizer, scaler, batches):
    for images, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.update()


def train_scaled_stepping_first(model, optimizer, scaler, batches):
    for images, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(loss).backward()


def train_scaled(model, optimizer, scaler, batches):
    for images, labels in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_cnn(train):
    def make():
        model = ConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            batch=data.images(),
            fit=lambda batches: train(model, optimizer, scaler, batches),
        )

    return make


# torch itself complains: update() without a step() has nothing to update from.
pair(
    "scaler_never_steps",
    "step_order",
    "step_missing",
    raises="No inf checks were recorded prior to update",
    faulty=scaled_cnn(train_scaled_without_step),
    fixed=scaled_cnn(train_scaled),
    quick=True,
)
pair(
    "scaler_steps_before_backward",
    "step_order",
    "step_before_backward",
    where="scaler.step(optimizer)",
    raises="Attempted step but _scale is None",
    faulty=scaled_cnn(train_scaled_stepping_first),
    fixed=scaled_cnn(train_scaled),
)


# Actor and critic, an optimizer each.


class ActorCritic:
    def __init__(self):
        self.actor, self.critic = mlp(4, 24, 3), mlp(4, 24, 1)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=5e-3)

    def losses(self, states, actions, returns):
        values = self.critic(states).squeeze(-1)
        policy = Categorical(logits=self.actor(states))
        advantage = (returns - values).detach()
        actor_loss = -(policy.log_prob(actions) * advantage).mean() - 0.01 * policy.entropy().mean()
        return actor_loss, F.mse_loss(values, returns)

    def update(self, episode):
        actor_loss, critic_loss = self.losses(*episode)
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()


class ActorCriticWithIdleCritic(ActorCritic):
    def update(self, episode):
        actor_loss, critic_loss = self.losses(*episode)
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()


def actor_critic(agent_class):
    def make():
        agent = agent_class()
        return TrainLoop(
            model={"actor": agent.actor, "critic": agent.critic},
            optimizer=[agent.actor_optimizer, agent.critic_optimizer],
            batch=data.episode(),
            step=agent.update,
        )

    return make


pair(
    "critic_never_stepped",
    "step_order",
    "step_missing",
    where="critic_loss.backward()",
    faulty=actor_critic(ActorCriticWithIdleCritic),
    fixed=actor_critic(ActorCritic),
)


# The scheduler is stepped, its optimizer never.


class LSTMTrainer:
    def __init__(self):
        self.model = CharLSTM()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.998)

    def loss(self, batch):
        return F.cross_entropy(self.model(batch["ids"]).transpose(1, 2), batch["labels"])

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.optimizer.step()
            self.scheduler.step()


class LSTMTrainerSteppingTheScheduler(LSTMTrainer):
    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.scheduler.step()


def lstm(trainer_class):
    def make():
        trainer = trainer_class()
        ids, labels = data.tokens(rows=8)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
            batch={"ids": ids, "labels": labels},
            fit=trainer.fit,
        )

    return make


pair(
    "scheduler_stepped_instead",
    "step_order",
    "step_missing",
    faulty=lstm(LSTMTrainerSteppingTheScheduler),
    fixed=lstm(LSTMTrainer),
)
