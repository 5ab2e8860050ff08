"""Values that are not finite: made by an operation or a step, or there from the start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# InfoNCE over two views: one row of the projection is zero (a padded row), and its norm is divided by.


def contrast(normalise):
    def make():
        left, right = mlp(6, 16, 8), mlp(10, 16, 8)
        model = nn.ModuleDict({"left": left, "right": right})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def loss_of(batch):
            present = (torch.arange(len(batch[0])) < len(batch[0]) - 1).unsqueeze(1)
            a, b = (normalise(net(view) * present) for net, view in ((left, batch[0]), (right, batch[1])))
            return F.cross_entropy(a @ b.T / 0.05, torch.arange(len(a)))

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.views(),
            fit=lambda batches: train(optimizer, batches, loss_of),
            rows_interact=True,
        )

    return make


def divided(z):
    return z / z.norm(dim=1, keepdim=True)


pair(
    "norm_of_a_zero_row",
    "finite",
    "made_in_forward",
    culprits=("div",),
    where="z / z.norm(dim=1, keepdim=True)",
    faulty=contrast(divided),
    fixed=contrast(lambda z: F.normalize(z, dim=1)),
)


# A policy gradient over probabilities that reach zero.


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 16, 3)

    def forward(self, x):
        return 40.0 * self.body(x)


def likelihood(log_probabilities):
    def make():
        model = Policy()
        with torch.no_grad():
            model.body[2].weight.mul_(20.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def loss_of(batch):
            x, actions = batch
            chosen = log_probabilities(model(x)).gather(1, actions.unsqueeze(1)).squeeze(1)
            return -(chosen * torch.linspace(-0.5, 1.0, len(x))).mean()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "log_of_a_probability_of_zero",
    "finite",
    "made_in_backward",
    culprits=("log",),
    where="torch.log(torch.softmax(logits, dim=1))",
    faulty=likelihood(lambda logits: torch.log(torch.softmax(logits, dim=1))),
    fixed=likelihood(lambda logits: torch.log_softmax(logits, dim=1)),
)


# The distance of a pair that is one and the same: its root has no slope.


def metric(distance):
    def make():
        model = mlp(6, 16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(batch):
            x, labels = batch
            z = model(x)
            other = torch.cat([z[:1], z[1:].roll(1, 0)])
            same = labels == torch.cat([labels[:1], labels[1:].roll(1, 0)])
            apart = distance(z, other)
            return torch.where(same, apart, F.relu(1.0 - apart)).mean()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, loss_of),
            rows_interact=True,
        )

    return make


pair(
    "slope_of_a_root_at_zero",
    "finite",
    "made_in_backward",
    culprits=("sqrt",),
    where="torch.sqrt(((a - b) ** 2).sum(1))",
    faulty=metric(lambda a, b: torch.sqrt(((a - b) ** 2).sum(1))),
    fixed=metric(lambda a, b: torch.sqrt(((a - b) ** 2).sum(1) + 1e-8)),
)


# A temperature made by torch.empty, and never set.


class Tempered(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.body = mlp(6, 16, 3)
        self.temperature = nn.Parameter(start)

    def forward(self, x):
        return self.body(x) / self.temperature


def tempered(start):
    def make():
        model = Tempered(torch.full((1,), start))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, lambda b: F.cross_entropy(model(b[0]), b[1])),
        )

    return make


pair(
    "parameter_never_initialised",
    "finite",
    "nonfinite_parameter",
    culprits=("temperature",),
    faulty=tempered(float("nan")),
    fixed=tempered(1.0),
)


# A rate far too high for a quadratic loss without a clip.


def steep(clip):
    def make():
        model = mlp(6, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=4.0 if clip is None else 0.01)
        x, y = data.table()

        def fit(batches):
            for inputs, targets in batches:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(x, 10 * y), fit=fit)

    return make


pair(
    "gradients_explode",
    "finite",
    "gradients_explode",
    where="optimizer.step()",
    faulty=steep(None),
    fixed=steep(1.0),
)


# One unknown target, read as NaN from a file.


def measured(targets):
    def make():
        model = mlp(6, 16, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        x, y = data.table()
        y[3] = float("nan")
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(x, targets(y)),
            fit=lambda batches: train(optimizer, batches, lambda b: F.smooth_l1_loss(model(b[0]), b[1])),
        )

    return make


pair(
    "target_that_is_nan",
    "finite",
    "nonfinite_input",
    culprits=("smooth_l1_loss",),
    where="F.smooth_l1_loss",
    faulty=measured(lambda y: y),
    fixed=measured(lambda y: y.nan_to_num(nan=0.0)),
)


# A trust ratio of one's own divides by the norm of a gradient that is zero: rows of a table that no batch asks for.


class TrustRatio(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, eps=0.0):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm(dim=-1, keepdim=True) / (p.grad.norm(dim=-1, keepdim=True) + group["eps"])
                p.sub_(group["lr"] * ratio * p.grad)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.table(ids))


def looked_up(eps):
    def make():
        model = Lookup()
        optimizer = TrustRatio(model.parameters(), eps=eps)

        def loss_of(batch):
            ids, following = batch
            return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(optimizer, batches, loss_of),
        )

    return make


pair(
    "trust_ratio_of_a_zero_gradient",
    "finite",
    "weights_lost",
    culprits=("table.weight",),
    where="optimizer.step()",
    faulty=looked_up(0.0),
    fixed=looked_up(1e-6),
)


# Every batch whose loss is not finite is left out, and none is: nothing ever trains.


def left_out(log_of):
    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for x, y in batches:
                loss = F.nll_loss(log_of(model(x)), y)
                if not torch.isfinite(loss):
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "every_batch_left_out",
    "finite",
    "made_in_forward",
    culprits=("log",),
    faulty=left_out(lambda out: (out - out.amax(1, keepdim=True)).log()),
    fixed=left_out(lambda out: F.log_softmax(out, 1)),
)


# An Adam of the project's own that keeps its moments in float16: small squares are 0 there, and so is eps.


class CompactAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, dtype):
        super().__init__(params, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p, dtype=self.dtype))
                    state["v"] = torch.zeros_like(state["m"])
                state["step"] += 1
                grad = p.grad.to(self.dtype)
                state["m"].lerp_(grad, 0.1)
                state["v"].lerp_(grad.square(), 0.01)
                m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.99 ** state["step"])
                p.add_((m / (v.sqrt() + 1e-8)).to(p.dtype), alpha=-group["lr"])


def compact(dtype):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))
        optimizer = CompactAdam(model.parameters(), lr=5e-3, dtype=dtype)

        def fit(batches):
            for x, y in batches:
                loss = F.cross_entropy(model(x), y) / 100
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "moments_in_float16_of_an_own_adam",
    "finite",
    "weights_lost",
    culprits=("0.weight",),
    where="optimizer.step()",
    faulty=compact(torch.float16),
    fixed=compact(torch.float32),
)
