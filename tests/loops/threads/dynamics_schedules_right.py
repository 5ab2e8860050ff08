"""Right learning rates and schedules that look odd, from public threads and training scripts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def digits(rows=96, width=16, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    return TensorDataset(centers[labels] + 0.5 * torch.randn(rows, width, generator=generator), labels)


def mlp(width=16, hidden=32, out=4):
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


@right("schedules", "SAC: three optimizers at constant rates, no schedule at all", thread="hill-a/stable-baselines#976")
def sac():
    actor, critic = mlp(4, 32, 2), mlp(5, 32, 1)
    log_alpha = nn.Parameter(torch.zeros(1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), 3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], 3e-4)
    source = torch.Generator().manual_seed(5)
    states = torch.randn(96, 4, generator=source)
    actions = torch.rand(96, 1, generator=source) * 2 - 1
    buffer = TensorDataset(states, actions, -(states[:, :1] - actions).pow(2))

    def sample(state):
        mean, log_std = actor(state).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-3, 1).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)

    def train(batches):
        for state, action, reward in batches:
            critic_loss = F.mse_loss(critic(torch.cat([state, action], 1)), reward)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            new, log_prob = sample(state)
            actor_loss = (log_alpha.exp().detach() * log_prob - critic(torch.cat([state, new], 1))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            alpha_loss = -(log_alpha * (log_prob.detach() - 1.0)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_alpha = log_alpha

    return TrainLoop(
        model={"actor": actor, "critic": critic, "alpha": Temperature()},
        optimizer=[actor_optimizer, critic_optimizer, alpha_optimizer],
        batches=DataLoader(buffer, batch_size=32, shuffle=True),
        fit=train,
    )


@right(
    "schedules",
    "from swa_start on SWALR takes over and the cosine is no longer stepped",
    thread="https://pytorch.org/docs/stable/optim.html#putting-it-all-together",
)
def swa(epochs=3, swa_start=20):
    model = mlp()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=swa_start)
    swa_scheduler = SWALR(optimizer, anneal_epochs=2, swa_lr=0.02)
    loader = DataLoader(digits(), batch_size=16, shuffle=True)
    epoch = [0]

    def main(batches):
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            epoch[0] += 1
            if epoch[0] > swa_start:
                average.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=main, epochs=30)
