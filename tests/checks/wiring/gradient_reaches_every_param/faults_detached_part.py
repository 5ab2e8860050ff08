"""The graph is cut for a part of the model: a temperature, a sampled code, a hand-written gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import TwoTower, mlp
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


class Trainer:
    """The project's trainer: AdamW, clipping, a running mean of the loss."""

    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        self.running = None

    def train_step(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        value = loss.item()
        self.running = value if self.running is None else 0.9 * self.running + 0.1 * value


def trained(network, batch, loss, lr=3e-3):
    def make():
        trainer = Trainer(network(), lr)

        def fit(batches):
            for batch in batches:
                trainer.train_step(loss(trainer.model, batch))

        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=batch(), fit=fit)

    return make


# A learned temperature, taken as a number.


class ScaledTowers(TwoTower):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, left, right):
        scores = self(left, right) * self.logit_scale.exp().clamp(max=100.0)
        return F.cross_entropy(scores, torch.arange(len(scores)))


class ScaledByNumber(ScaledTowers):
    def loss(self, left, right):
        scale = min(self.logit_scale.exp().item(), 100.0)
        return F.cross_entropy(self(left, right) * scale, torch.arange(len(left)))


def own_loss(model, batch):
    return model.loss(*batch)


pair(
    "temperature_as_number",
    CHECK,
    "graph_cut",
    culprits=("logit_scale",),
    where="self.logit_scale.exp().item()",
    faulty=trained(ScaledByNumber, data.views, own_loss),
    fixed=trained(ScaledTowers, data.views, own_loss),
)


# A noisy code, sampled without the reparametrisation trick.


class NoisyCode(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.encoder = mlp(6, 24, width)
        self.decoder = mlp(width, 24, 6)

    def sample(self, mean):
        return Normal(mean, 0.05).rsample()

    def loss(self, x, _):
        return F.mse_loss(self.decoder(self.sample(self.encoder(x))), x)


class NoisyCodeNotReparametrised(NoisyCode):
    def sample(self, mean):
        return Normal(mean, 0.05).sample()


pair(
    "sample_for_rsample",
    CHECK,
    "graph_cut",
    culprits=("encoder.0.weight", "encoder.2.bias"),
    where="Normal(mean, 0.05).sample()",
    faulty=trained(NoisyCodeNotReparametrised, data.table, own_loss, lr=5e-3),
    fixed=trained(NoisyCode, data.table, own_loss, lr=5e-3),
)


# A hand-written autograd function whose backward leaves the weight out.


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class AffineInputOnly(Affine):
    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors
        return grad @ weight.T, None


class CustomNet(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.stem = nn.Linear(6, 16)
        self.mixing = nn.Parameter(torch.randn(16, 16) * 0.25)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.function.apply(torch.tanh(self.stem(x)), self.mixing)))


def regress(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


pair(
    "backward_returns_none",
    CHECK,
    "graph_cut",
    culprits=("mixing",),
    where="self.function.apply(",
    faulty=trained(lambda: CustomNet(AffineInputOnly), data.table, regress, lr=5e-3),
    fixed=trained(lambda: CustomNet(Affine), data.table, regress, lr=5e-3),
)
