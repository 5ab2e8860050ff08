"""Batches of every shape, and loops whose trained tensor is the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, images, points, tokens


@dataclass(frozen=True)
class Example:
    x: Tensor
    y: Tensor
    weight: Tensor
    source: str = "toy"


def weighted_examples():
    x, y = points()
    return Example(x, y, 0.5 + torch.rand(len(x)))


@odd(notes="a frozen dataclass with a string in it; rows are weighted one by one")
def dataclass_batch_with_row_weights() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for b in batches:
            optimizer.zero_grad()
            loss = (b.weight * F.cross_entropy(model(b.x), b.y, reduction="none")).sum() / b.weight.sum()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batch=weighted_examples(), batches=fresh(weighted_examples), fit=fit
    )


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.dense = nn.EmbeddingBag(16, 8, mode="mean"), nn.Linear(8, 8)
        self.out = nn.Linear(16, 1)

    def forward(self, features):
        joined = torch.cat([self.text(features["ids"]), self.dense(features["dense"]["values"])], 1)
        return self.out(torch.relu(joined)).squeeze(1)


@odd(notes="dicts in dicts with a list of strings, boolean labels that are cast in the loop")
def nested_dict_batch() -> TrainLoop:
    model = TwoTower()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def fit(batches):
        for b in batches:
            optimizer.zero_grad()
            out = model(b["features"])
            F.binary_cross_entropy_with_logits(out, b["label"].to(out.dtype)).backward()
            optimizer.step()

    x, y = points()
    batch = {
        "features": {"ids": tokens(8, 4), "dense": {"values": x}},
        "label": y > 1,
        "names": [f"row{i}" for i in range(8)],
    }
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor
    labels: Tensor
    known: Tensor


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, nodes, edges):
        source, target = edges
        degree = torch.zeros(len(nodes)).index_add(0, target, torch.ones(len(target))).clamp(min=1)[:, None]

        def gather(h):
            return h + torch.zeros_like(h).index_add(0, target, h[source]) / degree

        return self.second(gather(torch.relu(self.first(gather(nodes)))))


@odd(
    notes="one graph is the batch: rows interact, only some have a label, the edges have another length (node "
    "classification)"
)
def named_tuple_graph_batch() -> TrainLoop:
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for graph in batches:
            optimizer.zero_grad()
            out = model(graph.nodes, graph.edges)
            F.cross_entropy(out[graph.known], graph.labels[graph.known]).backward()
            optimizer.step()

    nodes, labels = points(rows=12)
    batch = Graph(nodes, torch.randint(12, (2, 20)), labels, torch.arange(12) % 3 != 0)
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


def detections(rows=6):
    pictures, kinds = images(rows)
    return {"image": pictures, "kind": kinds, "box": torch.rand(rows, 4), "positive": torch.rand(rows) < 0.4}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.objectness, self.kind, self.box = nn.Linear(16, 1), nn.Linear(16, 4), nn.Linear(16, 4)

    def loss(self, b):
        h, positive = self.body(b["image"]), b["positive"]
        weight = positive.to(h.dtype)
        count = weight.sum().clamp(min=1)
        found = F.binary_cross_entropy_with_logits(self.objectness(h).squeeze(1), weight)
        kind = (weight * F.cross_entropy(self.kind(h), b["kind"], reduction="none")).sum() / count
        box = (weight * F.smooth_l1_loss(self.box(h), b["box"], reduction="none").sum(1)).sum() / count
        return found + kind + box


def train_detector(model, optimizer, batches):
    for b in batches:
        optimizer.zero_grad()
        model.loss(b).backward()
        optimizer.step()


@odd(notes="a batch without positives gives two heads a gradient of exactly 0, by a mask (detection)")
def detection_batches_without_positives() -> TrainLoop:
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = detections()
    batch["positive"][0] = True
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        batches=fresh(detections),
        fit=lambda batches: train_detector(model, optimizer, batches),
    )


@odd(notes="the only batch declared has no positive at all: two heads have a gradient of exactly 0 for the whole run")
def detection_declared_without_positives() -> TrainLoop:
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = detections()
    batch["positive"][:] = False
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        fit=lambda batches: train_detector(model, optimizer, batches),
    )


class PartialLabels(nn.Module):
    def __init__(self, targets=3):
        super().__init__()
        self.net = relu_mlp(8, 16, targets)

    def forward(self, x):
        return self.net(x)


def train_partial(model, optimizer, batches):
    for x, y in batches:
        known = y.isfinite()
        error = torch.where(known, model(x) - y.nan_to_num(), torch.zeros_like(y))
        optimizer.zero_grad()
        (error.square().sum() / known.sum().clamp(min=1)).backward()
        optimizer.step()


@odd(
    notes="missing labels are NaN in the batch and are masked openly; the mask, not the loss, is what nan_to_num serves"
)
def missing_labels_marked_by_nan() -> TrainLoop:
    model = PartialLabels()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, _ = points()
    y = torch.where(torch.rand(8, 3) < 0.3, torch.nan, x[:, :3] - x[:, 3:6])
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(x, y),
        fit=lambda batches: train_partial(model, optimizer, batches),
    )


def gram(h):
    h = h.flatten(2)
    return h @ h.transpose(1, 2) / h.size(2)


def train_style(net, picture, optimizer, batches):
    for content, style in batches:
        optimizer.zero_grad()
        with torch.no_grad():
            aim_content, aim_style = net(content), gram(net(style))
        h = net(picture)
        (
            F.mse_loss(h, aim_content.mean(0, keepdim=True)) + F.mse_loss(gram(h), aim_style.mean(0, keepdim=True))
        ).backward()
        optimizer.step()
        with torch.no_grad():
            picture.clamp_(-2, 2)


@odd(
    notes="the network is fixed and the picture is trained: the optimizer holds no parameter of the model "
    "(style transfer)"
)
def style_transfer_optimises_the_picture() -> TrainLoop:
    net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh()).eval().requires_grad_(False)
    picture = torch.randn(1, 1, 8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([picture], lr=5e-2)
    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batch=(images()[0], images()[0]),
        fit=lambda batches: train_style(net, picture, optimizer, batches),
    )


def train_patch(net, patch, optimizer, batches, aim=2):
    for x, _ in batches:
        covered = x.clone()
        covered[:, :, 2:5, 2:5] = patch.sigmoid()
        loss = F.cross_entropy(net(covered), torch.full((len(x),), aim))
        (patch.grad,) = torch.autograd.grad(loss, [patch])
        optimizer.step()


@odd(
    notes="the network requires grad and is never trained: only the patch's gradient is asked for (adversarial "
    "patch); frozen= says so"
)
def adversarial_patch_on_a_fixed_network() -> TrainLoop:
    net = nn.Sequential()
    net.add_module("features", nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()))
    net.add_module("classifier", nn.Linear(16, 4))
    patch = torch.zeros(1, 3, 3, requires_grad=True)
    optimizer = torch.optim.SGD([patch], lr=1.0, momentum=0.5)
    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batch=images(),
        batches=fresh(images),
        frozen=("features.", "classifier."),
        fit=lambda batches: train_patch(net, patch, optimizer, batches),
    )


class AutoDecoder(nn.Module):
    """DeepSDF: one latent code per shape, looked up by index and trained with the decoder."""

    def __init__(self, shapes=6, latent=4):
        super().__init__()
        self.codes, self.decoder = (
            nn.Embedding(shapes, latent, max_norm=2.0),
            mlp(latent + 2, 16, 1, activation=nn.Tanh),
        )

    def forward(self, index, point):
        return self.decoder(torch.cat([self.codes(index), point], 1))


@odd(notes="codes are data and parameters at once: those of shapes outside the batch have no gradient (auto-decoder)")
def auto_decoder_latent_codes() -> TrainLoop:
    model = AutoDecoder()
    optimizer = torch.optim.Adam(
        [{"params": model.decoder.parameters(), "lr": 5e-3}, {"params": model.codes.parameters(), "lr": 2e-2}]
    )

    def fit(batches):
        for index, point, distance in batches:
            optimizer.zero_grad()
            loss = F.l1_loss(model(index, point), distance) + 1e-3 * model.codes(index).square().sum(1).mean()
            loss.backward()
            optimizer.step()

    point = torch.rand(8, 2) * 2 - 1
    batch = torch.randint(4, (8,)), point, point.norm(dim=1, keepdim=True) - 0.5
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class Coordinates(nn.Module):
    """Physics-informed net: derivatives of the output with respect to the input are in the loss."""

    def __init__(self):
        super().__init__()
        self.net = mlp(1, 12, 1, activation=nn.Tanh)

    def residual(self, t):
        t = t.clone().requires_grad_(True)
        u = self.net(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return du + u

    def loss(self, t):
        start = self.net(torch.zeros(1, 1)) - 1.0
        return self.residual(t).square().mean() + start.square().mean()


@odd(notes="there are no targets: the loss is an equation's residual, with a derivative by autograd.grad in it (PINN)")
def physics_informed_network() -> TrainLoop:
    model = Coordinates()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def fit(batches):
        for t in batches:
            optimizer.zero_grad()
            model.loss(t).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=2.0 * torch.rand(8, 1),
        batches=fresh(lambda: 2.0 * torch.rand(8, 1)),
        fit=fit,
    )
