"""Copies of a trained network that no optimizer holds: target networks, old policies, teachers, averages.

None of them is detached or frozen, gradients arrive there and pile up, and most are brought up to date far more rarely
than any run of a test goes on.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def transitions(rows=16, width=4, actions=2):
    state, action = torch.randn(rows, width), torch.randint(actions, (rows, 1))
    reward = (action[:, 0] == (state[:, 0] > 0)).to(state.dtype)[:, None]
    return state, action, reward, state.roll(1, 1), (torch.rand(rows, 1) > 0.2).to(state.dtype)


class Qnet(nn.Module):
    """As minimalRL writes it."""

    def __init__(self, actions=2):
        super().__init__()
        self.fc1 = nn.Linear(4, 24)
        self.fc2 = nn.Linear(24, 24)
        self.fc3 = nn.Linear(24, actions)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def q_loss(q, q_target, batch, gamma=0.5):
    s, a, r, s_prime, done_mask = batch
    q_a = q(s).gather(1, a)
    max_q_prime = q_target(s_prime).max(1)[0].unsqueeze(1)
    return F.smooth_l1_loss(q_a, r + gamma * max_q_prime * done_mask)


def train_dqn(q, q_target, optimizer, batches, refresh):
    for episode, batch in enumerate(batches):
        loss = q_loss(q, q_target, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if refresh and episode % refresh == 0 and episode != 0:
            q_target.load_state_dict(q.state_dict())


def dqn(q, q_target, refresh, **declared):
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    return TrainLoop(
        **declared,
        optimizer=optimizer,
        batch=transitions(),
        batches=fresh(transitions),
        fit=lambda batches: train_dqn(q, q_target, optimizer, batches, refresh),
    )


@odd(notes="the target network gets gradients that nobody uses, and is loaded once in twenty episodes (minimalRL)")
def target_loaded_every_twenty_episodes():
    q, q_target = Qnet(), Qnet()
    q_target.load_state_dict(q.state_dict())
    return dqn(q, q_target, 20, model={"q": q, "q_target": q_target})


@odd(notes="a target network outside the declared model, refreshed after a thousand steps")
def target_copied_and_undeclared():
    q = Qnet()
    return dqn(q, copy.deepcopy(q), 1000, model=q)


@odd(notes="target weights are handed over one by one through .data, by another part of the program than fit")
def target_written_through_data():
    q, q_target = Qnet(), Qnet()
    for kept, live in zip(q_target.parameters(), q.parameters(), strict=True):
        kept.data = live.data.clone()
    return dqn(q, q_target, 0, model=[q, q_target])


class Agent(nn.Module):
    """Both networks in one module, which is never called itself."""

    def __init__(self):
        super().__init__()
        self.q = Qnet()
        self.q_target = copy.deepcopy(self.q)

    def sync(self):
        self.q_target.load_state_dict(self.q.state_dict())


@odd(notes="online and target network are parts of one module; only the online one is in the optimizer")
def target_within_the_agent():
    agent = Agent()
    return dqn(agent.q, agent.q_target, 0, model=agent)


class DuelingNet(nn.Module):
    """One forward for both, chosen by name: PyTorch's Mario tutorial."""

    def __init__(self):
        super().__init__()
        self.online = relu_mlp(4, 24, 2)
        self.target = copy.deepcopy(self.online)

    def forward(self, x, model):
        return self.online(x) if model == "online" else self.target(x)


@odd(notes="one forward calls the online or the target part, by a word (PyTorch's Mario tutorial, without its freeze)")
def target_chosen_by_a_word():
    net = DuelingNet()
    optimizer = torch.optim.Adam(net.online.parameters(), lr=5e-3)

    def fit(batches, sync_every=1000):
        for step, (s, a, r, s_prime, going_on) in enumerate(batches, 1):
            estimate = net(s, model="online").gather(1, a)
            best = net(s_prime, model="online").argmax(1, keepdim=True)
            goal = r + 0.5 * going_on * net(s_prime, model="target").gather(1, best)
            loss = F.smooth_l1_loss(estimate, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % sync_every == 0:
                net.target.load_state_dict(net.online.state_dict())

    return TrainLoop(model=net, optimizer=optimizer, batch=transitions(), batches=fresh(transitions), fit=fit)


@odd(notes="learning without forgetting: a copy of the model is made in mid-run, and called with gradients on")
def old_model_kept_from_the_first_task():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches, task_length=4):
        old = None
        for step, (x, y) in enumerate(batches):
            if step == task_length:
                old = copy.deepcopy(model)
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            if old is not None:
                loss = loss + 0.5 * F.mse_loss(scores, old(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)


@odd(notes="the reference of a policy is its copy from the start, in training mode and with gradients on")
def reference_policy_with_gradients():
    policy = relu_mlp(8, 16, 4)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            new, old = policy(x).log_softmax(1), reference(x).log_softmax(1)
            pull = F.kl_div(new, old, log_target=True, reduction="batchmean")
            loss = F.nll_loss(new, y) + 0.1 * pull
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"policy": policy, "reference": reference},
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=fit,
    )


@odd(notes="a teacher that was trained before: loaded from a state dict, in training mode, its gradients are not used")
def teacher_loaded_from_a_state_dict():
    student, teacher = relu_mlp(8, 12, 4), relu_mlp(8, 32, 4)
    teacher.load_state_dict({name: 1.5 * value for name, value in relu_mlp(8, 32, 4).state_dict().items()})
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    def fit(batches, temperature=2.0):
        for x, y in batches:
            scores = student(x)
            soft = F.softmax(teacher(x) / temperature, dim=1)
            distilled = F.kl_div(F.log_softmax(scores / temperature, dim=1), soft, reduction="batchmean")
            loss = F.cross_entropy(scores, y) + temperature**2 * distilled
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=fit,
    )


@odd(notes="weights are averaged from the fifth epoch on, and the average is declared with the model (SWA)")
def averaged_model_from_a_later_epoch():
    model = relu_mlp(8, 16, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches, epochs=8, swa_start=5):
        for epoch in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch >= swa_start:
                average.update_parameters(model)

    return TrainLoop(
        model={"model": model, "average": average},
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=fit,
    )
