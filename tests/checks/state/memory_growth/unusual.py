"""Loops that keep graphs, outputs or losses for a while, and are right."""

from __future__ import annotations

import collections
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import CharLSTM, ConvNet, mlp
from tests.loops.odd import odd


@odd(notes="a window of the last four losses, as a deque")
def memory_window():
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recent = collections.deque(maxlen=4)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            recent.append(loss)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="backpropagation through time, two windows at once: the state is detached every second step")
def memory_two_windows_of_time():
    class Net(CharLSTM):
        def forward(self, ids, state):
            hidden, state = self.lstm(self.embed(ids), state)
            return self.head(hidden), state

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        state, losses = None, []
        for step, (ids, targets) in enumerate(batches, start=1):
            scores, state = model(ids, state)
            losses.append(F.cross_entropy(scores.transpose(1, 2), targets))
            if step % 2 == 0:
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                losses.clear()
                state = tuple(s.detach() for s in state)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.tokens(), fit=fit)


@odd(notes="the log-probabilities of an episode wait for its return, then all are backpropagated at once")
def memory_episodes():
    policy = mlp(4, 16, 3)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

    def fit(batches):
        waiting = []
        for states, actions, returns in batches:
            chosen = policy(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
            waiting.append((chosen, returns))
            if len(waiting) == 3:
                optimizer.zero_grad()
                sum(-(c * r).mean() for c, r in waiting).backward()
                optimizer.step()
                waiting = []

    return TrainLoop(model=policy, optimizer=optimizer, batch=data.episode(), fit=fit)


@odd(notes="L-BFGS keeps the differences of its last gradients, and calls the closure several times a step")
def memory_lbfgs():
    model = mlp(6, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=20)

    def fit(batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="second derivatives: the penalty on the gradient is made with create_graph, and gradients are set to None")
def memory_gradient_penalty():
    critic = mlp(2, 16, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def fit(batches):
        for points in batches:
            x = points.clone().requires_grad_()
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (score.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()

    return TrainLoop(model=critic, optimizer=optimizer, batch=data.ring(), fit=fit)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.out = x.exp()
        return ctx.out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.out


@odd(notes="a function keeps its output on ctx: a cycle of references, which the collector gets")
def memory_cycles():
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(Kept.apply(model(x).clamp(max=1)), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="snapshots of the weights and all detached losses are kept, for an average and a plot")
def memory_detached_history():
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history, snapshots, outputs = [], [], []

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
            history.append(loss.detach())
            outputs.append(scores.detach())
            snapshots.append(copy.deepcopy(model.state_dict()))

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="a hook overwrites one slot with the last activation, graph and all")
def memory_one_slot():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    last = {}
    model.features.register_forward_hook(lambda _module, _inputs, out: last.update(features=out))

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 1e-4 * last["features"].square().mean()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=fit)


@odd(notes="two losses over one encoder: the first pass retains the graph for the second")
def memory_retained_once():
    encoder, first, second = mlp(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)
    model = nn.ModuleDict({"encoder": encoder, "first": first, "second": second})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            hidden = torch.tanh(encoder(x))
            F.cross_entropy(first(hidden), y).backward(retain_graph=True)
            second(hidden).square().mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="one graph over the weights of a fixed table is made once and backpropagated at every step")
def memory_static_graph():
    scale = nn.Parameter(torch.ones(6))
    model = mlp(6, 16, 1)
    model.scale = scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fit(batches):
        penalty = (scale * torch.linspace(0, 1, 6)).sum()  # linear: no step changes what its graph needs
        for x, y in batches:
            optimizer.zero_grad()
            (F.mse_loss(model(x * scale), y) + 1e-3 * penalty).backward(retain_graph=True)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=data.table(), fit=fit)


@odd(notes="activation checkpointing, both kinds, and a replay of detached outputs below its capacity")
def memory_checkpointed_with_replay():
    body, head = mlp(6, 16, 16), nn.Linear(16, 3)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    replay = collections.deque(maxlen=10_000)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            hidden = checkpoint(body, x, use_reentrant=False)
            out = checkpoint(head, hidden, use_reentrant=True)
            F.cross_entropy(out, y).backward()
            optimizer.step()
            replay.extend(zip(x, out.detach(), strict=True))

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)


@odd(notes="actor and critic: the critic's value of the next batch is taken without a gradient, both optimizers step")
def memory_two_optimizers():
    actor, critic = mlp(4, 16, 3), mlp(4, 16, 1)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def fit(batches):
        values = []
        for states, actions, returns in batches:
            value = critic(states)[:, 0]
            advantage = returns - value
            chosen = actor(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
            of_critic.zero_grad()
            advantage.square().mean().backward()
            of_critic.step()
            of_actor.zero_grad()
            (-(chosen * advantage.detach()).mean()).backward()
            of_actor.step()
            values = [*values[-3:], value]

    return TrainLoop(
        model={"actor": actor, "critic": critic}, optimizer=[of_actor, of_critic], batch=data.episode(), fit=fit
    )


@odd(notes="an exponential average of the weights, and per-example losses kept for the next draw of examples")
def memory_averages():
    model = mlp(6, 16, 3)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept = {}

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            each = F.cross_entropy(model(x), y, reduction="none")
            each.mean().backward()
            optimizer.step()
            kept[step] = each.detach()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)
