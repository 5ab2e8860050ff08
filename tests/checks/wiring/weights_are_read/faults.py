"""Weights that are moved and not read, and values of the first batch that outlive it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair
from tests.loops.plain import loop


def functional(once):
    """A forward pass by ``functional_call``, whose gradients are assigned by hand."""

    def make():
        model = mlp(6, 16, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def copied():
            return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

        def fit(batches):
            params = copied()
            for x, y in batches:
                if not once:
                    params = copied()
                loss = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
                for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(params.values())), strict=True):
                    p.grad = grad
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


class Joined(nn.Module):
    """A head of old and new classes, whose rows are joined once, when the net is built."""

    def __init__(self, once):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.old = nn.Parameter(torch.randn(2, 16) * 0.1)
        self.new = nn.Parameter(torch.randn(1, 16) * 0.1)
        self.joined = torch.cat([self.old, self.new]) if once else None

    def forward(self, x):
        weight = torch.cat([self.old, self.new]) if self.joined is None else self.joined
        return F.linear(self.body(x), weight)


def classified(model_of):
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    return lambda: loop(model_of(), data.labelled(), loss)


pair(
    "head_joined_when_the_net_is_built",
    "weights_are_read",
    "weights_read_once",
    culprits=("old", "new"),
    change="torch.cat([self.old, self.new]) if once",
    faulty=classified(lambda: Joined(once=True)),
    fixed=classified(lambda: Joined(once=False)),
    quick=True,
)

pair(
    "parameters_copied_once_for_functional_call",
    "weights_are_read",
    "weights_read_once",
    culprits=("0.weight",),
    where="torch.autograd.grad",
    faulty=functional(once=True),
    fixed=functional(once=False),
)


class Text(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.body = nn.GRU(12, 12, batch_first=True)
        self.decoder = nn.Linear(12, 16, bias=False)
        tie(self)

    def forward(self, ids):
        return self.decoder(self.body(self.embedding(ids))[0])


def share_data(net):
    net.decoder.weight.data = net.embedding.weight.data


def share_parameter(net):
    net.decoder.weight = net.embedding.weight


def language_model(tie):
    def loss(model, batch):
        ids, after = batch
        return F.cross_entropy(model(ids).flatten(0, 1), after.flatten())

    return lambda: loop(Text(tie), data.tokens(), loss)


pair(
    "decoder_tied_by_data",
    "weights_are_read",
    "tied_through_data",
    culprits=("embedding.weight", "decoder.weight"),
    change="net.decoder.weight.data = net.embedding.weight.data",
    faulty=language_model(share_data),
    fixed=language_model(share_parameter),
    quick=True,
)


class Projected(nn.Module):
    def __init__(self, anew):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        self.project = None if anew else nn.Linear(16, 16)

    def forward(self, x):
        x = F.relu(self.body(x))
        project = nn.Linear(16, 16) if self.project is None else self.project
        return self.head(F.relu(project(x)))


pair(
    "projection_built_in_forward",
    "weights_are_read",
    "layer_made_anew",
    where="nn.Linear(16, 16) if self.project is None",
    faulty=classified(lambda: Projected(anew=True)),
    fixed=classified(lambda: Projected(anew=False)),
    quick=True,
)


class Graphs(nn.Module):
    """A graph convolution that normalises the adjacency, and keeps what it gets."""

    def __init__(self, keeps):
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        self.keeps = keeps
        self.adjacency = None

    def normalised(self, adjacency):
        if self.adjacency is None or not self.keeps:
            degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
            self.adjacency = adjacency / degree
        return self.adjacency

    def forward(self, x, adjacency):
        a = self.normalised(adjacency)
        return self.head((a @ F.relu(self.first(x))).mean(1))


def graphs(count=13):
    drawn = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        x = torch.randn(6, 5, 4, generator=drawn)
        adjacency = (torch.rand(6, 5, 5, generator=drawn) > 0.5).to(x.dtype)
        found.append((x, adjacency, torch.arange(6) % 3))
    return found


def graph_loop(keeps):
    def make():
        model = Graphs(keeps)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches):
            for x, adjacency, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x, adjacency), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=graphs(), fit=fit)

    return make


pair(
    "adjacency_of_the_first_batch",
    "weights_are_read",
    "kept_from_first_batch",
    culprits=("batch[1]",),
    where="a @ F.relu(self.first(x))",
    change="self.adjacency = adjacency / degree",
    faulty=graph_loop(keeps=True),
    fixed=graph_loop(keeps=False),
    quick=True,
)


class Encoded(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.encoder = mlp(6, 16, 8).requires_grad_(False)
        self.head = mlp(8, 16, 3)
        self.keeps = keeps
        self.cache = {}

    def features(self, x):
        if "features" not in self.cache or not self.keeps:
            with torch.no_grad():
                self.cache["features"] = self.encoder(x)
        return self.cache["features"]

    def forward(self, x):
        return self.head(self.features(x))


pair(
    "features_kept_under_one_key",
    "weights_are_read",
    "kept_from_first_batch",
    culprits=("batch[0]",),
    where="F.cross_entropy(model(x), y)",
    faulty=classified(lambda: Encoded(keeps=True)),
    fixed=classified(lambda: Encoded(keeps=False)),
)


# Fine-tuning in bfloat16: the pretrained weights are loaded, and the optimizer steps float32 masters.


class MixedTuner:
    def __init__(self, load_first):
        self.model = mlp(6, 16, 3).bfloat16()
        pretrained = {name: 1.5 * value for name, value in mlp(6, 16, 3).state_dict().items()}
        if load_first:
            self.model.load_state_dict(pretrained)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.05)
        if not load_first:
            self.model.load_state_dict(pretrained)

    def fit(self, batches):
        for x, y in batches:
            self.model.zero_grad()
            F.cross_entropy(self.model(x.bfloat16()).float(), y).backward()
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = p.grad.float()
            self.optimizer.step()
            with torch.no_grad():
                for master, p in zip(self.masters, self.model.parameters(), strict=True):
                    p.copy_(master)


def mixed_tuning(load_first):
    def make():
        tuner = MixedTuner(load_first)
        return TrainLoop(model=tuner.model, optimizer=tuner.optimizer, batch=data.labelled(), fit=tuner.fit)

    return make


pair(
    "masters_made_before_the_weights_are_loaded",
    "weights_are_read",
    "masters_hold_others",
    culprits=("0.weight", "2.weight"),
    where="self.optimizer.step()",
    faulty=mixed_tuning(load_first=False),
    fixed=mixed_tuning(load_first=True),
    quick=True,
)
