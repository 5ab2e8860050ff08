"""Parameters that no optimizer was given."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair

CHECK = "optimizer_holds_every_param"


def train(loss, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()


# An image classifier whose head is forgotten.


def cnn(trained):
    def make():
        model = ConvNet()
        optimizer = torch.optim.Adam(trained(model), lr=5e-3)
        criterion = nn.CrossEntropyLoss()
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
            fit=lambda batches: train(lambda batch: criterion(model(batch[0]), batch[1]), optimizer, batches),
        )

    return make


pair(
    "cnn_head_forgotten",
    CHECK,
    "not_in_optimizer",
    culprits=("head.weight", "head.bias"),
    faulty=cnn(lambda model: model.features.parameters()),
    fixed=cnn(lambda model: model.parameters()),
)


# A projection that is built in the first forward pass, when its width is known.


class LazyRegressor(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.project = None
        self.out = nn.Linear(hidden, 1)

    def build(self, features):
        self.project = nn.Linear(features, self.hidden)

    def forward(self, x):
        if self.project is None:
            self.build(x.shape[-1])
        return self.out(torch.tanh(self.project(x)))


def lazy(*, build_first):
    def make():
        model = LazyRegressor()
        if build_first:
            model.build(6)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=lambda batches: train(lambda batch: F.mse_loss(model(batch[0]), batch[1]), optimizer, batches),
        )

    return make


pair(
    "layer_built_in_first_forward",
    CHECK,
    "not_in_optimizer",
    culprits=("project.weight", "project.bias"),
    faulty=lazy(build_first=False),
    fixed=lazy(build_first=True),
)


# The generator of parameters was used up by counting them.


# Layers that are copies of the first one, as torch's own encoder makes them: all of them are to train.


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.encoder(self.stem(x)[:, None])[:, 0])


def encoded(trained):
    def make():
        model = Encoded()
        optimizer = torch.optim.Adam(trained(model), lr=5e-3)
        fit = lambda batches: train(lambda b: F.cross_entropy(model(b[0]), b[1]), optimizer, batches)  # noqa: E731
        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "cloned_layers_forgotten",
    CHECK,
    "not_in_optimizer",
    culprits=("encoder.layers.1.linear1.weight", "encoder.layers.2.linear2.bias"),
    faulty=encoded(lambda m: [*m.stem.parameters(), *m.encoder.layers[0].parameters(), *m.head.parameters()]),
    fixed=encoded(lambda m: m.parameters()),
)


# A copy of the first head that differs in its last layer's size, and is trained on labels of its own.


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.coarse, self.fine = mlp(6, 16), mlp(16, 8, 3), mlp(16, 8, 3)
        self.fine.load_state_dict(self.coarse.state_dict())
        self.fine.append(nn.Linear(3, 3))

    def forward(self, x):
        z = torch.relu(self.body(x))
        return self.coarse(z), self.fine(z)


def two_heads(trained):
    def make():
        model = TwoHeads()
        optimizer = torch.optim.Adam(trained(model), lr=5e-3)

        def fit(batches):
            for x, y in batches:
                coarse, fine = model(x)
                optimizer.zero_grad()
                (F.cross_entropy(coarse, y) + F.cross_entropy(fine, y.flip(0))).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "head_that_began_as_a_copy_forgotten",
    CHECK,
    "not_in_optimizer",
    culprits=("fine.3.weight",),
    faulty=two_heads(lambda m: [*m.body.parameters(), *m.coarse.parameters()]),
    fixed=two_heads(lambda m: m.parameters()),
)
