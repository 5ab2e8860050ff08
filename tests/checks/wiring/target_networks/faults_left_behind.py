"""Target networks that become the network that trains, or that stay behind while another follows."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.target_networks.faults import Agent, transitions
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.random_data import fresh, points


class Synced(Agent):
    """A DQN whose target network is synchronised after every third batch."""

    def __init__(self, *, rebinds):
        super().__init__(copy.deepcopy, self.sync)
        self.rebinds, self.number = rebinds, 0

    def sync(self, target, online):
        self.number += 1
        if self.number % 3 == 0:
            target.load_state_dict(online.state_dict())
            if self.rebinds:
                self.target = online

    def fit(self, batches):
        for states, actions, rewards, after in batches:
            with torch.no_grad():
                goal = rewards + 0.5 * self.target(after).amax(1, keepdim=True)
            loss = F.smooth_l1_loss(self.online(states).gather(1, actions), goal)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.follow(self.target, self.online)


def synced(**how):
    def make():
        agent = Synced(**how)
        networks = {"online": agent.online, "target": agent.target}
        given = {"optimizer": agent.optimizer, "batch": transitions(), "batches": fresh(transitions)}
        return TrainLoop(model=networks, fit=agent.fit, **given)

    return make


def teacher_from(assign):
    """A student that learns from its own average after two batches with a fixed teacher."""

    def make():
        student, first = relu_mlp(8, 24, 4), relu_mlp(8, 24, 4)
        average = copy.deepcopy(student)
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

        def fit(batches):
            teacher = first
            for number, (x, y) in enumerate(batches):
                with torch.no_grad():
                    goal = teacher(x).softmax(1)
                optimizer.zero_grad()
                scores = student(x)
                (F.cross_entropy(scores, y) + F.cross_entropy(scores, goal)).backward()
                optimizer.step()
                for slow, fast in zip(average.parameters(), student.parameters(), strict=True):
                    slow.data.lerp_(fast.data, 0.1)
                if number == 1 and assign:
                    teacher = student
                elif number == 1:
                    teacher = average  # an average moves: this is what is meant

        models = {"student": student, "teacher": first, "average": average}
        return TrainLoop(model=models, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(12, 24, 1)

    def forward(self, states, actions):
        return self.net(torch.cat([states, actions], 1))


class ActorCritic:
    """DDPG with two critics; ``every`` names each network whose target follows, and after how many batches."""

    def __init__(self, **every):
        self.nets = {"actor": relu_mlp(8, 24, 4), "first": Critic(), "second": Critic()}
        self.targets = {name: copy.deepcopy(net) for name, net in self.nets.items()}
        self.every, self.number = every, 0
        self.optimizers = {n: torch.optim.Adam(net.parameters(), lr=1e-3) for n, net in self.nets.items()}

    def update(self, name, loss):
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()

    def fit(self, batches):
        for states, _, rewards, after in batches:
            self.number += 1
            actions = torch.rand(len(states), 4) * 2 - 1
            with torch.no_grad():
                best = torch.tanh(self.targets["actor"](after))
                values = [self.targets[name](after, best) for name in ("first", "second")]
                goal = rewards + 0.5 * torch.min(*values)
            self.update("first", F.mse_loss(self.nets["first"](states, actions), goal))
            self.update("second", F.mse_loss(self.nets["second"](states, actions), goal))
            self.update("actor", -self.nets["first"](states, torch.tanh(self.nets["actor"](states))).mean())
            for name in self.every:
                if self.number % self.every[name] == 0:
                    for slow, fast in zip(self.targets[name].parameters(), self.nets[name].parameters(), strict=True):
                        slow.data.mul_(0.95).add_(0.05 * fast.data)


def actor_critic(**every):
    def make():
        agent = ActorCritic(**every)
        networks = agent.nets | {f"target_{name}": net for name, net in agent.targets.items()}
        given = {"optimizer": list(agent.optimizers.values()), "batch": transitions(), "batches": fresh(transitions)}
        return TrainLoop(model=networks, fit=agent.fit, **given)

    return make


pair(
    "target_becomes_the_online_network",
    "target_networks",
    "target_rebound",
    culprits=("target.0.weight",),
    change="self.target = online",
    faulty=synced(rebinds=True),
    fixed=synced(rebinds=False),
)
pair(
    "teacher_becomes_the_student",
    "target_networks",
    "target_rebound",
    culprits=("teacher.0.weight",),
    where="goal = teacher(x).softmax(1)",
    quick=True,
    faulty=teacher_from(assign=True),
    fixed=teacher_from(assign=False),
)
pair(
    "target_actor_is_left_behind",
    "target_networks",
    "target_left_behind",
    culprits=("target_actor.0.weight",),
    change="slow.data.mul_(0.95)",
    quick=True,
    faulty=actor_critic(first=1, second=1),
    fixed=actor_critic(actor=1, first=1, second=1),
)
pair(
    "target_of_the_second_critic_is_left_behind",
    "target_networks",
    "target_left_behind",
    culprits=("target_second.net.0.weight",),
    change="slow.data.mul_(0.95)",
    faulty=actor_critic(actor=1, first=1),
    fixed=actor_critic(actor=1, first=1, second=1),
)
