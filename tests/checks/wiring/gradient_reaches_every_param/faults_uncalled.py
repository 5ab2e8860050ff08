"""Modules that ``model=`` names and that no batch comes to."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

CHECK, CAUSE = "gradient_reaches_every_param", "module_uncalled"


class QLearning:
    """Values of actions; the goal is that of a target network, which follows slowly."""

    def __init__(self, goal_of, soft):
        self.online = mlp(4, 24, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=3e-3)
        self.goal_of, self.soft = goal_of, soft

    def update(self, batch):
        states, actions, rewards = batch
        with torch.no_grad():
            goal = rewards + 0.5 * self.goal_of(self)(states.roll(1, 0)).max(1).values
        values = self.online(states).gather(1, actions[:, None]).squeeze(1)
        self.optimizer.zero_grad()
        F.smooth_l1_loss(values, goal).backward()
        self.optimizer.step()
        if self.soft:
            for kept, live in zip(self.target.parameters(), self.online.parameters(), strict=True):
                kept.data.mul_(0.95).add_(live.data, alpha=0.05)

    def fit(self, batches):
        for number, batch in enumerate(batches):
            self.update(batch)
            if not self.soft and number % 100 == 99:
                self.target.load_state_dict(self.online.state_dict())


def agent(goal_of, *, soft):
    def make():
        learner = QLearning(goal_of, soft)
        return TrainLoop(
            model={"online": learner.online, "target": learner.target},
            optimizer=learner.optimizer,
            batch=data.episode(),
            fit=learner.fit,
        )

    return make


for title, soft in (("updated_slowly", True), ("copied_seldom", False)):
    pair(
        f"goal_without_the_target_network_{title}",
        CHECK,
        CAUSE,
        level="advice",
        culprits=("target",),
        faulty=agent(lambda learner: learner.online, soft=soft),
        fixed=agent(lambda learner: learner.target, soft=soft),
    )


# A student that is to learn from a teacher learns from the labels alone.
