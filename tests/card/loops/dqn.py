"""Deep Q-learning with a duelling head, a target network that is copied every four steps, and replayed transitions."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop


class Duelling(nn.Module):
    def __init__(self, observations=6, actions=4, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, actions)

    def forward(self, x):
        x = self.body(x)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


class Agent:
    def __init__(self, discount=0.97, copy_every=4):
        self.q = Duelling()
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = torch.optim.RMSprop(self.q.parameters(), lr=1e-3)
        self.discount, self.copy_every, self.steps = discount, copy_every, 0

    def learn(self, batch):
        chosen = self.q(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = self.q(batch["next"]).argmax(1, keepdim=True)
            following = self.target(batch["next"]).gather(1, best).squeeze(1)
            wanted = batch["reward"] + self.discount * following * ~batch["done"]
        loss = F.smooth_l1_loss(chosen, wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.value.parameters(), 10.0)
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.copy_every == 0:
            self.target.load_state_dict(self.q.state_dict())


def replayed(rows=32):
    return {
        "observation": torch.randn(rows, 6),
        "action": torch.randint(4, (rows,)),
        "reward": torch.randn(rows),
        "next": torch.randn(rows, 6),
        "done": torch.rand(rows) < 0.1,
    }


def make():
    agent = Agent()
    return TrainLoop(
        model={"q": agent.q, "target": agent.target},
        optimizer=agent.optimizer,
        batch=replayed(),
        batches=lambda n: [replayed() for _ in range(n)],
        step=agent.learn,
        frozen=("target.",),
    )
