"""Classification of small graphs as PyTorch Geometric batches them: one large graph with an index of graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop

FEATURES, CLASSES = 5, 2


@dataclass
class Batch:
    """Nodes of all graphs one below the other; ``batch`` names each node's graph."""

    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor
    y: torch.Tensor
    num_graphs: int


def collate(graphs):
    sizes = [len(x) for x, _, _ in graphs]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return Batch(
        x=torch.cat([x for x, _, _ in graphs]),
        edge_index=torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=False)], dim=1),
        batch=torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes)),
        y=torch.tensor([y for _, _, y in graphs]),
        num_graphs=len(graphs),
    )


class GraphConv(nn.Module):
    """A node's own features and the mean of its neighbours'."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        summed = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x), dtype=x.dtype).index_add_(0, target, torch.ones(len(target), dtype=x.dtype))
        return self.own(x) + self.neighbours(summed / degree.clamp(min=1).unsqueeze(1))


class GraphNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(FEATURES, width), GraphConv(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x, edge_index, batch, num_graphs):
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        pooled = torch.zeros(num_graphs, x.shape[1], dtype=x.dtype).index_add_(0, batch, x)
        count = torch.zeros(num_graphs, dtype=x.dtype).index_add_(0, batch, torch.ones(len(x), dtype=x.dtype))
        return self.head(F.dropout(pooled / count.unsqueeze(1), p=0.2, training=self.training))


def dataset(size=48, seed=2):
    draw = torch.Generator().manual_seed(seed)
    graphs = []
    for number in range(size):
        nodes = int(torch.randint(4, 10, (), generator=draw))
        ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        x = torch.randn(nodes, FEATURES, generator=draw) + number % CLASSES
        graphs.append((x, torch.cat([ring, ring.flip(0)], dim=1), number % CLASSES))
    return graphs


def train(model, optimizer, loader):
    model.train()
    for data in loader:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index, data.batch, data.num_graphs)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()


def make():
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(dataset(), batch_size=8, shuffle=True, collate_fn=collate),
        fit=lambda batches: train(model, optimizer, batches),
    )
