"""The graph is cut between the model and what the loop backpropagates."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data, plain
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def loop(network, batch, loss, lr=5e-3):
    def make():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        return plain.loop(model, batch(), loss, optimizer)

    return make


def cut(name, network, batch, broken, whole, *, culprits=(), where=None, raises=None, mentions=()):
    pair(
        name,
        CHECK,
        "graph_cut",
        culprits=culprits,
        where=None if raises else where,  # torch raises at the backward pass
        change=where,
        raises=raises,
        mentions=mentions,
        faulty=loop(network, batch, broken),
        fixed=loop(network, batch, whole),
    )


# Two tasks: the total is rebuilt from numbers.


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
        self.value = nn.Linear(24, 1)
        self.sign = nn.Linear(24, 1)

    def losses(self, batch):
        x, y = batch
        hidden = self.trunk(x)
        return {
            "value": F.mse_loss(self.value(hidden), y),
            "sign": F.binary_cross_entropy_with_logits(self.sign(hidden), (y > 0).to(y.dtype)),
        }


def total_from_numbers(model, batch):
    total = 0.0
    for loss in model.losses(batch).values():
        total += loss.item()
    return torch.tensor(total, requires_grad=True)


def plain_total(model, batch):
    return sum(model.losses(batch).values())


cut(
    "total_rebuilt_from_numbers",
    TwoTasks,
    data.table,
    total_from_numbers,
    plain_total,
    culprits=("trunk.0.weight", "value.weight", "sign.weight"),
    where="total += loss.item()",
)


# Regression: the loss is computed in numpy.


def numpy_loss(model, batch):
    x, y = batch
    error = model(x).detach().numpy() - y.numpy()
    return torch.tensor(np.mean(error**2), requires_grad=True)


def torch_loss(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).mean()


cut(
    "loss_in_numpy",
    lambda: mlp(6, 24, 1),
    data.table,
    numpy_loss,
    torch_loss,
    culprits=("0.weight", "2.bias"),
    where="model(x).detach().numpy()",
)


# Classification: one minus the accuracy is backpropagated, behind a line that silences torch.


def error_rate(model, batch):
    images, labels = batch
    accuracy = (model(images).argmax(dim=1) == labels).to(images.dtype).mean()
    loss = 1.0 - accuracy
    loss.requires_grad_(True)
    return loss


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


cut(
    "accuracy_backpropagated",
    ConvNet,
    data.images,
    error_rate,
    cross_entropy,
    culprits=("head.weight", "features.0.weight"),
    where="argmax(dim=1)",
)


# SimSiam: the predictor's output is stopped in place of the target.


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(6, 24, 8)
        self.predictor = mlp(8, 12, 8)

    def forward(self, view):
        z = self.encoder(view)
        return z, self.predictor(z)


def two_views():
    x, _ = data.table(rows=8)
    return x + 0.05 * x.sin(), x - 0.05 * x.cos()


def simsiam_wrong_side(model, batch):
    (z1, p1), (z2, p2) = (model(view) for view in batch)
    return -(F.cosine_similarity(p1.detach(), z2).mean() + F.cosine_similarity(p2.detach(), z1).mean()) / 2


def simsiam(model, batch):
    (z1, p1), (z2, p2) = (model(view) for view in batch)
    return -(F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean()) / 2


cut(
    "simsiam_wrong_side_stopped",
    SimSiam,
    two_views,
    simsiam_wrong_side,
    simsiam,
    culprits=("predictor.0.weight", "predictor.2.bias"),
    where="p1.detach()",
)


# A GAN: the generator's loss uses the fake that was detached for the discriminator.


def train_gan(generator, discriminator, opt_g, opt_d, batches, *, reuse_detached, toggled=False):
    for real in batches:
        discriminator.requires_grad_(True)
        fake = generator(torch.randn(len(real), 3))
        detached = fake.detach()
        opt_d.zero_grad()
        (F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(detached)).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        discriminator.requires_grad_(not toggled)
        F.softplus(-discriminator(detached if reuse_detached else fake)).mean().backward()
        opt_g.step()


def gan(**how):
    def make():
        generator, discriminator = mlp(3, 24, 2), mlp(2, 24, 1)
        optimizers = [torch.optim.Adam(net.parameters(), lr=2e-3) for net in (generator, discriminator)]
        return TrainLoop(
            model={"generator": generator, "discriminator": discriminator},
            optimizer=optimizers,
            batch=data.ring(),
            fit=lambda batches: train_gan(generator, discriminator, *optimizers, batches, **how),
        )

    return make


pair(
    "toggled_gan_generator_loss_on_detached",
    CHECK,
    "graph_cut",
    culprits=("generator.0.weight", "generator.2.bias"),
    where="F.softplus(-discriminator(detached if reuse_detached else fake))",
    raises="does not require grad",
    change="F.softplus(-discriminator(detached if reuse_detached else fake))",
    faulty=gan(reuse_detached=True, toggled=True),
    fixed=gan(reuse_detached=False, toggled=True),
)
