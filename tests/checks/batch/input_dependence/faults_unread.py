"""Parts of a loss that are in the batch, and that nothing reads."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def generator():
    return torch.Generator().manual_seed(0)


class Agent:
    def __init__(self):
        self.model = mlp(5, 32, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.optimizer.step()


class Values(Agent):
    """Q-learning: the value of a terminal state is 0."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.model).requires_grad_(False)

    def goes_on(self, batch):
        return 1 - batch["done"]

    def loss(self, batch):
        value = self.model(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        later = self.target(batch["next_obs"]).amax(1)
        return F.smooth_l1_loss(value, batch["reward"] + 0.97 * self.goes_on(batch) * later)


class ValuesPastTheEnd(Values):
    def goes_on(self, batch):
        return 1.0


def transitions(rows=24):
    g = generator()
    return {
        "obs": torch.randn(rows, 5, generator=g),
        "action": torch.randint(3, (rows,), generator=g),
        "reward": torch.randn(rows, generator=g),
        "next_obs": torch.randn(rows, 5, generator=g),
        "done": (torch.rand(rows, generator=g) < 0.3).float(),
    }


def trained(agent, batch):
    def make():
        made = agent()
        return TrainLoop(model=made.model, optimizer=made.optimizer, batch=batch(), fit=made.fit)

    return make


pair(
    "nothing_reads_done",
    "input_dependence",
    "input_ignored",
    level="advice",
    faulty=trained(ValuesPastTheEnd, transitions),
    fixed=trained(Values, transitions),
)
