"""Evaluations of larger projects: adapters merged and taken out again, statistics estimated anew, shared routines."""

from __future__ import annotations

import collections
import copy
import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def accuracy(model, held_out):
    x, y = held_out
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def classifier(model, evaluate, *, optimizer=None, after=lambda: None, loss_of=None, **fields):
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def fit(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            (loss_of(x, y) if loss_of else F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            after()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=points(12), batches=fresh(lambda: points(12)), fit=fit,
        evaluate=evaluate, **fields,
    )  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer with a low-rank update that can be merged into it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.merged = False

    @torch.no_grad()
    def merge(self, on):
        if on != self.merged:
            self.base.weight.add_(self.up @ self.down, alpha=1 if on else -1)
            self.merged = on

    def forward(self, x):
        out = self.base(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


@odd(notes="low-rank updates are merged for evaluation and subtracted again: the frozen weights come back to rounding")
def evaluating_merged_adapters():
    model, held_out = nn.Sequential(Adapted(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4)), points(16)

    def evaluate():
        model[0].merge(True)
        score = accuracy(model, held_out)
        model[0].merge(False)
        return score

    return classifier(model, evaluate)


@odd(notes="statistics of the norms are estimated anew over training batches before each evaluation, on purpose")
def evaluating_with_precise_statistics():
    model, held_out = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)), points(16)
    seen = [points(12)[0] for _ in range(3)]

    @torch.no_grad()
    def evaluate():
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        momenta = [m.momentum for m in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        model.train()
        for x in seen:
            model(x)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
        score = accuracy(model, held_out)
        model.train()
        return score

    return classifier(model, evaluate)


@odd(notes="a plateau scheduler is stepped on the score inside evaluation: feedback is what it is for")
def evaluating_steers_the_rate():
    model, (x, y) = relu_mlp(8, 16, 4), points(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)

    def evaluate():
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y).item()
        plateau.step(loss)
        return loss

    return classifier(model, evaluate, optimizer=optimizer, scheduler=plateau)


@odd(notes="restoring the best weights comes with the second evaluation, where the score has fallen")
def evaluating_restores_from_the_second_call_on():
    model, held_out = relu_mlp(8, 16, 4), points(16)
    best = {}

    def evaluate():
        score = accuracy(model, held_out)
        if not best or score > best["score"]:
            best.update(score=score, weights=copy.deepcopy(model.state_dict()))
        elif best["score"] - score > 0.5:
            model.load_state_dict(best["weights"])
        return score

    return classifier(model, evaluate)


@dataclass
class Meter:
    values: list = field(default_factory=list)
    best: float = float("inf")
    confusion: torch.Tensor = field(default_factory=lambda: torch.zeros(4, 4))

    def update(self, predicted, y):
        for p, t in zip(predicted.tolist(), y.tolist(), strict=True):
            self.confusion[t, p] += 1
        self.values.append((predicted == y).float().mean().item())


class WithMeter(nn.Module):
    """Keeps its metric as a module with buffers of its own, as metric libraries do."""

    def __init__(self):
        super().__init__()
        self.net = relu_mlp(8, 16, 4)
        self.metric = nn.Module()
        self.metric.register_buffer("hits", torch.zeros(()), persistent=False)
        self.metric.register_buffer("total", torch.zeros((), dtype=torch.long), persistent=False)
        self.meter = Meter()

    def forward(self, x):
        return self.net(x)


@odd(notes="metrics of all evaluations pile up in buffers of the model; training never reads them")
def evaluating_counts_in_buffers():
    model, (x, y) = WithMeter(), points(16)

    @torch.no_grad()
    def evaluate():
        predicted = model(x).argmax(1)
        model.metric.hits += (predicted == y).sum()
        model.metric.total += len(y)
        model.meter.update(predicted, y)
        return (predicted == y).float().mean().item()

    return classifier(model, evaluate)


class Runner:
    """One routine for both phases, which asks which phase it is in."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.held_out = [points(8), points(8)]
        self.history = {"train": [], "val": []}
        self.phase, self.global_step, self.last_logits = "train", 0, None

    def run(self, batches, phase):
        self.phase = phase
        self.net.train(phase == "train")
        with torch.set_grad_enabled(phase == "train"):
            for x, y in batches:
                out = self.net(x)
                loss = F.cross_entropy(out, y)
                self.last_logits = out.detach()
                if phase == "train":
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.global_step += 1
                self.history[phase].append(loss.item())
        return self.history[phase]


@odd(notes="the phase, the last logits and histories of one runner change in evaluation, and each epoch sets its phase")
def evaluating_by_a_runner_of_phases():
    runner = Runner()
    return TrainLoop(
        model=runner.net,
        optimizer=runner.optimizer,
        batch=points(12),
        fit=functools.partial(runner.run, phase="train"),
        evaluate=lambda: runner.run(runner.held_out, "val"),
    )


@odd(notes="evaluation reads an endless stream of its own, which stands elsewhere each time")
def evaluating_on_a_stream():
    model = relu_mlp(8, 16, 4)

    def endless():
        while True:
            yield points(8)

    stream = endless()
    return classifier(model, lambda: [accuracy(model, next(stream)) for _ in range(3)])


@odd(notes="a seed per epoch for the samples that are shown: training goes on from another state each time")
def evaluating_with_a_seed_per_epoch():
    model, epoch = mlp(4, 16, 2), [0]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for real in batches:
            fake = model(torch.randn(len(real), 4))
            loss = (torch.cdist(fake, real).mean() - 0.5 * torch.cdist(fake, fake).mean()).abs()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch[0] += 1

    @torch.no_grad()
    def evaluate():
        torch.manual_seed(1000 + epoch[0])
        return model(torch.randn(4, 4)).tolist()

    return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(12, 2), fit=fit, evaluate=evaluate)


@odd(notes="every step of training seeds itself by its number, so that a constant seed in evaluation changes nothing")
def evaluating_seeds_beside_seeded_steps():
    model, steps, (x, y) = relu_mlp(8, 16, 4), [0], points(16)

    def loss_of(inputs, labels):
        steps[0] += 1
        torch.manual_seed(steps[0])
        return F.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), labels)

    def evaluate():
        torch.manual_seed(0)
        return accuracy(model, (x + 0.1 * torch.randn_like(x), y))

    return classifier(model, evaluate, loss_of=loss_of)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 16, 3)
        self.log = []

    def forward(self, states):
        return torch.distributions.Categorical(logits=self.net(states))


@odd(notes="episodes are played for the score, by sampled actions, in an environment of its own")
def evaluating_episodes():
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def fit(batches):
        for states in batches:
            chosen = policy(states)
            actions = chosen.sample()
            reward = torch.sin(states.sum(1)) * actions
            loss = -(chosen.log_prob(actions) * (reward - reward.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def evaluate():
        state, total = torch.zeros(1, 4), 0.0
        for _ in range(8):
            action = policy(state).sample()
            state = torch.tanh(state + 0.3 * action - 0.2 + 0.1 * torch.randn(1, 4))
            total += state.sum().item()
        policy.log.append(total)
        return total

    return TrainLoop(model=policy, optimizer=optimizer, batch=torch.randn(16, 4), fit=fit, evaluate=evaluate)


@odd(notes="gradients of the loss towards the weights are looked at in evaluation, by torch.autograd.grad")
def evaluating_the_sharpness():
    model, (x, y) = relu_mlp(8, 16, 4), points(16)

    def evaluate():
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        return sum(slope.square().sum() for slope in slopes).sqrt().item()

    return classifier(model, evaluate)


@odd(notes="a curriculum: noise grows with each evaluation whose score is good, which training then meets")
def evaluating_raises_the_difficulty():
    model, (x, y) = relu_mlp(8, 16, 4), points(16)
    course = {"noise": 0.0}

    def loss_of(inputs, labels):
        return F.cross_entropy(model(inputs + course["noise"] * torch.randn_like(inputs)), labels)

    def evaluate():
        score = accuracy(model, (x, y))
        course["noise"] = min(1.0, course["noise"] + 0.1)
        return score

    return classifier(model, evaluate, loss_of=loss_of)


@odd(notes="classes that are recognised badly weigh more in the loss from the next evaluation on")
def evaluating_weighs_the_classes():
    model, (x, y) = relu_mlp(8, 16, 4), points(32)
    weights = {"classes": torch.ones(4)}

    def loss_of(inputs, labels):
        return F.cross_entropy(model(inputs), labels, weight=weights["classes"])

    @torch.no_grad()
    def evaluate():
        right = model(x).softmax(1).gather(1, y[:, None]).squeeze(1)
        weights["classes"] = torch.stack([2.0 - right[y == c].mean() for c in range(4)]).nan_to_num(1.0)
        return right.mean().item()

    return classifier(model, evaluate, loss_of=loss_of)


@odd(notes="evaluation returns its best score, a smoothed one, one over the last five calls and that of the next batch")
def evaluating_by_its_history():
    model, (x, y) = relu_mlp(8, 16, 4), points(24)
    best, smoothed, last, reads = [float("inf")], [], collections.deque(maxlen=5), [0]

    @torch.no_grad()
    def evaluate():
        losses = F.cross_entropy(model(x), y, reduction="none")
        start, reads[0] = reads[0] % 24, reads[0] + 8
        loss = losses.mean().item()
        best[0] = min(best[0], loss)
        smoothed[:] = [0.9 * smoothed[0] + 0.1 * loss if smoothed else loss]
        last.append(loss)
        return best[0], smoothed[0], sum(last) / len(last), losses[start : start + 8].mean().item(), len(last)

    return classifier(model, evaluate)


@odd(notes="the metric of evaluation is reset where an epoch begins")
def evaluating_into_a_metric_that_fit_resets():
    model, (x, y), metric = relu_mlp(8, 16, 4), points(24), {"total": 0.0, "rows": 0}

    @torch.no_grad()
    def evaluate():
        for rows in torch.arange(24).split(8):
            metric["total"] += F.cross_entropy(model(x[rows]), y[rows], reduction="sum").item()
            metric["rows"] += len(rows)
        return metric["total"] / metric["rows"]

    def loss_of(inputs, targets):
        metric.update(total=0.0, rows=0)
        return F.cross_entropy(model(inputs), targets)

    return classifier(model, evaluate, loss_of=loss_of)
