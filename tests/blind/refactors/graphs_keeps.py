"""Graphs: convolutions, attention, pooling."""

# ruff: noqa: N801
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

NODES, FEATURES, CLASSES = 14, 6, 3


def graphs(n, seed=0):
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
                "batch": torch.tensor([0] * 4 + [1] * 5 + [2] * 5),
                "label": torch.randint(0, 2, (3,), generator=generator),
            }
        )
    return batches


def loop(model, forward, target="y", **options):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4, **options)

    def fit(batches):
        model.train()
        for data in batches:
            optimizer.zero_grad()
            F.cross_entropy(forward(model, data), data[target]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=graphs, fit=fit)


def node_forward(model, data):
    return model(data["x"], data["edge_index"])


@keeps(
    "graphs",
    "messages are gathered and added at their targets in place of a product with a dense matrix",
    thread="pyg-team/pytorch_geometric#48",
    renamed={"weight1": "convs.0.lin.weight", "weight2": "convs.1.lin.weight"},
)
class message_passing:
    def before():
        class GCN(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight1 = nn.Parameter(nn.Linear(FEATURES, 16, bias=False).weight.detach().clone())
                self.weight2 = nn.Parameter(nn.Linear(16, CLASSES, bias=False).weight.detach().clone())

            def forward(self, x, edge_index):
                a = torch.eye(NODES).to(x)
                a[edge_index[1], edge_index[0]] = 1
                d = a.sum(1).rsqrt()
                a = d[:, None] * a * d[None]
                return a @ (F.relu(a @ (x @ self.weight1.t())) @ self.weight2.t())

        return loop(GCN(), node_forward)

    def after():
        class GCNConv(nn.Module):
            def __init__(self, inputs, outputs):
                super().__init__()
                self.lin = nn.Linear(inputs, outputs, bias=False)

            def norm(self, edge_index, nodes, like):
                loops = torch.arange(nodes).expand(2, -1)
                edge_index = torch.cat([edge_index, loops], dim=1)
                source, target = edge_index
                degree = torch.zeros(nodes).to(like).index_add_(0, target, torch.ones(target.numel()).to(like))
                scale = degree.pow(-0.5)
                return edge_index, scale[source] * scale[target]

            def forward(self, x, edge_index):
                (source, target), weight = self.norm(edge_index, x.size(0), x)
                x = self.lin(x)
                return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source])

        class GCN(nn.Module):
            def __init__(self):
                super().__init__()
                self.convs = nn.ModuleList([GCNConv(FEATURES, 16), GCNConv(16, CLASSES)])

            def forward(self, x, edge_index):
                *hidden, last = self.convs
                for conv in hidden:
                    x = conv(x, edge_index).relu()
                return last(x, edge_index)

        return loop(GCN(), node_forward)


@keeps(
    "graphs",
    "the linear map of a convolution is applied to the nodes in place of their sums",
    thread="pyg-team/pytorch_geometric#798",
)
class linear_first:
    class Conv(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.lin_l = nn.Linear(inputs, outputs)
            self.lin_r = nn.Linear(inputs, outputs, bias=False)

        def mean(self, x, edge_index):
            source, target = edge_index
            count = torch.zeros(len(x)).to(x).index_add(0, target, torch.ones(target.numel()).to(x)).clamp(min=1)
            return torch.zeros_like(x).index_add(0, target, x[source]) / count[:, None]

    class SAGE(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.conv1, self.conv2 = conv(FEATURES, 12), conv(12, CLASSES)

        def forward(self, x, edge_index):
            return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)

    def before():
        class SAGEConv(linear_first.Conv):
            def forward(self, x, edge_index):
                return self.lin_l(self.mean(x, edge_index)) + self.lin_r(x)

        return loop(linear_first.SAGE(SAGEConv), node_forward)

    def after():
        class SAGEConv(linear_first.Conv):
            def forward(self, x, edge_index):
                y = F.linear(x, self.lin_l.weight)
                return self.mean(y, edge_index) + self.lin_l.bias + self.lin_r(x)

        return loop(linear_first.SAGE(SAGEConv), node_forward)


@keeps(
    "graphs",
    "attention over neighbours by a masked matrix becomes a softmax over edges, grouped by their target",
    thread="pyg-team/pytorch_geometric#224",
    renamed={"w": "conv.lin.weight", "a_src": "conv.att_src", "a_dst": "conv.att_dst"},
)
class edge_softmax:
    def before():
        class GAT(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.empty(12, FEATURES))
                self.a_src, self.a_dst = nn.Parameter(torch.empty(12)), nn.Parameter(torch.empty(12))
                for p in self.parameters():
                    nn.init.normal_(p, std=0.3)
                self.out = nn.Linear(12, CLASSES)

            def forward(self, x, edge_index):
                h = x @ self.w.t()
                e = F.leaky_relu((h @ self.a_dst)[:, None] + (h @ self.a_src)[None], 0.2)
                mask = torch.eye(NODES, dtype=torch.bool)
                mask[edge_index[1], edge_index[0]] = True
                return self.out(F.elu(e.masked_fill(~mask, float("-inf")).softmax(1) @ h))

        return loop(GAT(), node_forward)

    def after():
        def grouped_softmax(values, index, size):
            top = torch.full((size,), float("-inf")).to(values).scatter_reduce(0, index, values.detach(), "amax")
            exp = (values - top[index]).exp()
            return exp / torch.zeros(size).to(values).index_add(0, index, exp)[index]

        class GATConv(nn.Module):
            def __init__(self, inputs, outputs, negative_slope=0.2):
                super().__init__()
                self.lin = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
                self.att_src = nn.Parameter(torch.empty(outputs))
                self.att_dst = nn.Parameter(torch.empty(outputs))
                self.negative_slope = negative_slope
                for p in (self.lin.weight, self.att_src, self.att_dst):
                    nn.init.normal_(p, std=0.3)

            def forward(self, x, edge_index):
                nodes = x.size(0)
                source, target = torch.cat([edge_index, torch.arange(nodes).repeat(2, 1)], 1)
                h = self.lin(x)
                score = (h * self.att_src).sum(-1)[source] + (h * self.att_dst).sum(-1)[target]
                alpha = grouped_softmax(F.leaky_relu(score, self.negative_slope), target, nodes)
                return torch.zeros_like(h).index_add(0, target, alpha[:, None] * h[source])

        class GAT(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = GATConv(FEATURES, 12)
                self.out = nn.Linear(12, CLASSES)

            def forward(self, x, edge_index):
                return self.out(F.elu(self.conv(x, edge_index)))

        return loop(GAT(), node_forward)


@dataclass
class GraphBatch:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor
    batch: torch.Tensor
    label: torch.Tensor


@keeps(
    "graphs",
    "graphs are pooled by one call for the batch in place of a loop, and the batch is an object",
    thread="pyg-team/pytorch_geometric#9008",
    renamed={"mlp.0": "readout.lin1", "mlp.3": "readout.lin2"},
)
class pooling:
    def before():
        class GIN(nn.Module):
            def __init__(self):
                super().__init__()
                self.eps = nn.Parameter(torch.zeros(1))
                self.nn = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12))
                self.mlp = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 2))

            def forward(self, data):
                x, (source, target) = data["x"], data["edge_index"]
                total = torch.zeros_like(x)
                total.index_add_(0, target, x[source])
                x = self.nn((1 + self.eps) * x + total)
                pooled = [x[data["batch"] == i].mean(0) for i in range(int(data["batch"].max()) + 1)]
                return self.mlp(torch.stack(pooled))

        return loop(GIN(), lambda model, data: model(data), target="label")

    def after():
        def global_mean_pool(x, batch):
            size = int(batch.max()) + 1
            count = torch.bincount(batch, minlength=size).clamp(min=1)
            return torch.zeros(size, x.size(1)).to(x).index_add(0, batch, x) / count[:, None]

        class Readout(nn.Module):
            def __init__(self, width, p=0.5):
                super().__init__()
                self.lin1, self.lin2 = nn.Linear(width, width), nn.Linear(width, 2)
                self.p = p

            def forward(self, x):
                return self.lin2(F.dropout(self.lin1(x).relu(), p=self.p, training=self.training))

        class GIN(nn.Module):
            def __init__(self):
                super().__init__()
                self.eps = nn.Parameter(torch.zeros(1))
                self.nn = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12))
                self.readout = Readout(12)

            def forward(self, x, edge_index, batch):
                index = edge_index[1].unsqueeze(1).expand(-1, x.size(1))
                total = torch.zeros_like(x).scatter_add(0, index, x[edge_index[0]])
                return self.readout(global_mean_pool(self.nn(x + self.eps * x + total), batch))

        model = GIN()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
        criterion = nn.CrossEntropyLoss()

        def train_step(data):
            loss = criterion(model(data.x, data.edge_index, data.batch), data.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batches=lambda n: [GraphBatch(**data) for data in graphs(n)],
            fit=lambda batches: [train_step(data) for data in batches],
        )
