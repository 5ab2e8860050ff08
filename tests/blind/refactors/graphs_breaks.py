"""Graphs: convolutions, attention, pooling."""

# ruff: noqa: N801
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

NODES, FEATURES, CLASSES = 12, 6, 3


def graphs(n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n):
        adjacency = torch.rand(NODES, NODES, generator=generator) < 0.25
        adjacency.fill_diagonal_(False)
        batches.append(
            {
                "x": torch.randn(NODES, FEATURES, generator=generator),
                "edge_index": adjacency.nonzero().t().contiguous(),
                "y": torch.randint(0, CLASSES, (NODES,), generator=generator),
                "train_mask": torch.rand(NODES, generator=generator) < 0.7,
            }
        )
    return batches


def train(model, optimizer, batches):
    model.train()
    for data in batches:
        optimizer.zero_grad()
        out = model(data["x"], data["edge_index"])
        F.cross_entropy(out[data["train_mask"]], data["y"][data["train_mask"]]).backward()
        optimizer.step()


def loop(model, optimizer=None, fit=train):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=graphs, fit=lambda batches: fit(model, optimizer, batches)
    )


def add_self_loops(edge_index, nodes):
    return torch.cat([edge_index, torch.arange(nodes).expand(2, -1)], 1)


def degree(index, nodes, like):
    return torch.zeros(nodes).to(like).index_add(0, index, torch.ones(index.numel()).to(like))


class GCNConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def norm(self, edge_index, x):
        edge_index = add_self_loops(edge_index, len(x))
        scale = degree(edge_index[1], len(x), x).rsqrt()
        return edge_index, scale[edge_index[0]] * scale[edge_index[1]]

    def propagate(self, x, edge_index, weight):
        source, target = edge_index
        return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source])

    def forward(self, x, edge_index):
        edge_index, weight = self.norm(edge_index, x)
        return self.propagate(self.lin(x), edge_index, weight) + self.bias


class GCN(nn.Module):
    def __init__(self, conv=GCNConv):
        super().__init__()
        self.conv1 = conv(FEATURES, 16)
        self.conv2 = conv(16, CLASSES)

    def forward(self, x, edge_index):
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


@breaks(
    "graphs",
    "nodes no longer send to themselves",
    first="output",
    place="conv1",
    thread="pyg-team/pytorch_geometric#6251",
)
class own_messages:
    def before():
        return loop(GCN())

    def after():
        class Conv(GCNConv):
            def norm(self, edge_index, x):
                scale = degree(edge_index[1], len(x), x).clamp(min=1).rsqrt()
                return edge_index, scale[edge_index[0]] * scale[edge_index[1]]

        return loop(GCN(Conv))


@breaks(
    "graphs",
    "degrees are counted before the nodes' own edges are added",
    first="output",
    place="conv1",
    thread="pyg-team/pytorch_geometric#48",
)
class degree_order:
    def before():
        return loop(GCN())

    def after():
        class Conv(GCNConv):
            def norm(self, edge_index, x):
                scale = degree(edge_index[1], len(x), x).clamp(min=1).rsqrt()
                edge_index = add_self_loops(edge_index, len(x))
                return edge_index, scale[edge_index[0]] * scale[edge_index[1]]

        return loop(GCN(Conv))


@breaks(
    "graphs",
    "messages run against the edges",
    first="output",
    place="conv1",
    thread="pyg-team/pytorch_geometric#3907",
)
class flow:
    def before():
        return loop(GCN())

    def after():
        class MessagePassing(nn.Module):
            def __init__(self, flow="target_to_source"):
                super().__init__()
                self.i, self.j = (1, 0) if flow == "source_to_target" else (0, 1)

            def propagate(self, x, edge_index, weight):
                out = x.new_zeros(x.shape)
                return out.index_add(0, edge_index[self.i], weight[:, None] * x[edge_index[self.j]])

        class Conv(MessagePassing):
            def __init__(self, inputs, outputs):
                super().__init__()
                self.lin = nn.Linear(inputs, outputs, bias=False)
                self.bias = nn.Parameter(torch.zeros(outputs))

            norm = GCNConv.norm

            def forward(self, x, edge_index):
                edge_index, weight = self.norm(edge_index, x)
                return self.propagate(self.lin(x), edge_index, weight) + self.bias

        return loop(GCN(Conv))


class SAGEConv(nn.Module):
    def __init__(self, inputs, outputs, aggr="mean"):
        super().__init__()
        self.lin = nn.Linear(2 * inputs, outputs)
        self.aggr = aggr

    def forward(self, x, edge_index):
        source, target = edge_index
        total = torch.zeros_like(x).index_add(0, target, x[source])
        if self.aggr == "mean":
            total = total / degree(target, len(x), x).clamp(min=1)[:, None]
        return self.lin(torch.cat([x, total], 1))


@breaks(
    "graphs",
    "neighbours are added up and no longer averaged",
    first="output",
    place="conv1.lin",
    thread="pyg-team/pytorch_geometric#4379",
)
class aggregation:
    def before():
        return loop(GCN(SAGEConv))

    def after():
        def make(inputs, outputs, **kwargs):
            kwargs.setdefault("aggr", "add")
            return SAGEConv(inputs, outputs, **kwargs)

        return loop(GCN(make))


@breaks(
    "graphs",
    "gradients are clipped behind the step",
    first="gradient",
    place="clip_grad_norm_",
    thread="VGraphRNN/VGRNN#4",
)
class clip_line:
    def before():
        def fit(model, optimizer, batches):
            for data in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(data["x"], data["edge_index"]), data["y"]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()

        model = GCN()
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.2), fit)

    def after():
        def fit(model, optimizer, batches):
            for data in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data["x"], data["edge_index"]), data["y"])
                loss.backward()
                optimizer.step()
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)

        model = GCN()
        return loop(model, torch.optim.SGD(model.parameters(), lr=0.2), fit)


@breaks(
    "graphs",
    "the weight decay of the first convolution is now that of all",
    first="group",
    place="weight_decay",
    thread="pyg-team/pytorch_geometric#1468",
)
class first_layer_decay:
    def before():
        model = GCN()
        groups = [
            {"params": model.conv1.parameters(), "weight_decay": 5e-3},
            {"params": model.conv2.parameters(), "weight_decay": 0.0},
        ]
        return loop(model, torch.optim.Adam(groups, lr=1e-2))

    def after():
        model = GCN()
        return loop(model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-3))


@breaks(
    "graphs",
    "the loss takes the nodes of the test set too",
    first="loss",
    place="cross_entropy",
    thread="theislab/geome#16",
)
class node_mask:
    def before():
        return loop(GCN())

    def after():
        class NodeTask:
            def __init__(self, split="train_mask"):
                self.split = split

            def __call__(self, model, optimizer, batches):
                for data in batches:
                    out, y = model(data["x"], data["edge_index"]), data["y"]
                    optimizer.zero_grad()
                    F.cross_entropy(out, y).backward()
                    optimizer.step()

        return loop(GCN(), fit=NodeTask())
