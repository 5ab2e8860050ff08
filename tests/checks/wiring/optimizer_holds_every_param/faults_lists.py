"""Layers and parameters that the model never registered, and parameters that one optimizer holds twice."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import Block, ConvNet, lm_loss, mlp
from tests.loops.pairs import pair

CHECK = "optimizer_holds_every_param"


def loop(network, batch, loss, optimizer=torch.optim.Adam, **options):
    def make():
        model = network()
        opt = optimizer(model.parameters(), **({"lr": 5e-3} | options))

        def fit(batches):
            model.train()
            for batch in batches:
                opt.zero_grad()
                loss(model, batch).backward()
                opt.step()

        return TrainLoop(model=model, optimizer=opt, batch=batch(), loss=loss, fit=fit)

    return make


# Blocks of a transformer in a plain list.


class ListGPT(nn.Module):
    def __init__(self, vocab=16, width=24, depth=2):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(12, width) * 0.1)
        self.blocks = self.hold([Block(width, 2) for _ in range(depth)])
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.token.weight, std=0.1)

    def hold(self, blocks):
        return blocks

    def forward(self, ids):
        x = self.token(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ModuleListGPT(ListGPT):
    def hold(self, blocks):
        return nn.ModuleList(blocks)


pair(
    "blocks_in_a_list",
    CHECK,
    "not_registered",
    change="self.blocks = self.hold(",
    faulty=loop(ListGPT, data.tokens, lm_loss, torch.optim.AdamW, lr=3e-3),
    fixed=loop(ModuleListGPT, data.tokens, lm_loss, torch.optim.AdamW, lr=3e-3),
)


# A head per task in a dict.


class DictHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.heads = {"value": nn.Linear(24, 1), "sign": nn.Linear(24, 1)}

    def forward(self, x):
        hidden = self.trunk(x)
        return {task: head(hidden) for task, head in self.heads.items()}


class ModuleDictHeads(DictHeads):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict(self.heads)


def two_tasks(model, batch):
    x, y = batch
    out = model(x)
    return F.mse_loss(out["value"], y) + F.binary_cross_entropy_with_logits(out["sign"], (y > 0).to(y.dtype))


pair(
    "heads_in_a_dict",
    CHECK,
    "not_registered",
    faulty=loop(DictHeads, data.table, two_tasks),
    fixed=loop(ModuleDictHeads, data.table, two_tasks),
)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# Parameters in a list.


class ListParameters(nn.Module):
    def __init__(self, experts=3):
        super().__init__()
        self.gate = nn.Linear(6, experts)
        self.experts = self.hold([nn.Parameter(torch.randn(6, 1) * 0.4) for _ in range(experts)])
        self.bias = nn.Parameter(torch.zeros(1))

    def hold(self, experts):
        return experts

    def forward(self, x):
        out = torch.cat([torch.tanh(x @ w) for w in self.experts], dim=1)
        return (self.gate(x).softmax(-1) * out).sum(-1, keepdim=True) * 2 + self.bias


class ParameterListed(ListParameters):
    def hold(self, experts):
        return nn.ParameterList(experts)


def regress(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


pair(
    "parameters_in_a_list",
    CHECK,
    "not_registered",
    faulty=loop(ListParameters, data.table, regress, lr=1e-2),
    fixed=loop(ParameterListed, data.table, regress, lr=1e-2),
)


# A helper object that is no module holds the layers.


class Embedder:
    def __init__(self, width=20):
        self.table = nn.Embedding(16, width)
        self.lift = nn.Linear(width, width)

    def __call__(self, ids):
        return F.gelu(self.lift(self.table(ids)))


class EmbedderModule(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.table = nn.Embedding(16, width)
        self.lift = nn.Linear(width, width)

    def forward(self, ids):
        return F.gelu(self.lift(self.table(ids)))


class Recurrent(nn.Module):
    def __init__(self, embedder):
        super().__init__()
        self.embedder = embedder()
        self.gru = nn.GRU(20, 20, batch_first=True)
        self.out = nn.Linear(20, 16)

    def forward(self, ids):
        return self.out(self.gru(self.embedder(ids))[0])


pair(
    "layers_in_a_plain_object",
    CHECK,
    "not_registered",
    change="class Embedder:",
    faulty=loop(lambda: Recurrent(Embedder), data.tokens, lm_loss),
    fixed=loop(lambda: Recurrent(EmbedderModule), data.tokens, lm_loss),
)


# Namespaces and dataclasses that group layers cannot become modules by a base class.


def embed_with(parts, ids):
    return F.gelu(parts.lift(parts.table(ids)))


class Grouped(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.parts = group(table=nn.Embedding(16, 20), lift=nn.Linear(20, 20))
        self.out = nn.Linear(20, 16)

    def forward(self, ids):
        return self.out(embed_with(self.parts, ids))


class ModuleParts(nn.Module):
    def __init__(self, table, lift):
        super().__init__()
        self.table, self.lift = table, lift


pair(
    "layers_in_a_namespace",
    CHECK,
    "not_registered",
    change="self.parts = group(",
    faulty=loop(lambda: Grouped(types.SimpleNamespace), data.tokens, lm_loss),
    fixed=loop(lambda: Grouped(ModuleParts), data.tokens, lm_loss),
)


# Held twice: encoder and decoder share a tied weight; the head is listed again; a module is listed by two names.


class TiedAutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 24)
        self.middle = nn.Linear(24, 24)
        self.decoder = nn.Linear(24, 24)
        self.decoder.weight = self.middle.weight
        self.out = nn.Linear(24, 6)

    def forward(self, x):
        return self.out(torch.tanh(self.decoder(torch.tanh(self.middle(torch.tanh(self.encoder(x)))))))


def held(network, batch, loss, listed, **options):
    def make():
        model = network()
        optimizer = torch.optim.SGD(listed(model), **options)

        def fit(batches):
            for batch in batches:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit)

    return make


def reconstruct(model, batch):
    return F.mse_loss(model(batch[0]), batch[0])


def each_part(model):
    return [p for part in model.children() for p in part.parameters()]


for name, network, batch, loss, listed, culprit in (
    ("tied_weight_listed_twice", TiedAutoEncoder, data.table, reconstruct, each_part, "middle.weight"),
    (
        "head_listed_twice",
        ConvNet,
        data.images,
        classify,
        lambda model: [*model.parameters(), *model.head.parameters()],
        "head.weight",
    ),
    (
        "first_layer_listed_twice",
        lambda: mlp(6, 24, 1),
        data.table,
        regress,
        lambda model: [*model.parameters(), *(p for name, p in model.named_parameters() if name.startswith("0"))],
        "0.weight",
    ),
):
    pair(
        name,
        CHECK,
        "held_twice",
        culprits=(culprit,),
        faulty=held(network, batch, loss, listed, lr=0.05, momentum=0.9),
        fixed=held(network, batch, loss, lambda model: model.parameters(), lr=0.05, momentum=0.9),
    )
