"""Undivided losses over batches whose rows are not along the first axis, or that only the project can split."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.pairs import pair


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def loop_of(model, loss, batch, divided, accumulate, **fields):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        optimizer.zero_grad()
        for i, given in enumerate(batches, start=1):
            value = loss(model, given)
            (value / accumulate if divided else value).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)


class Tagger(nn.Module):
    """A tag for each word of a sentence; time comes first."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(12, 8), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.rnn(self.table(words))[0])


def tags(model, batch):
    words, wanted = batch
    return F.cross_entropy(model(words).flatten(0, 1), wanted.flatten())


def sentences():
    words = torch.randint(0, 12, (9, 6), generator=drawn(0))
    return words, words % 3


def time_first(divided, accumulate, **fields):
    return loop_of(Tagger(), tags, sentences(), divided, accumulate, **fields)


class Frames(nn.Module):
    """Scores of each frame by itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, frames):
        return self.body(frames)


def summed_over_time(model, batch):
    frames, labels = batch
    return F.cross_entropy(model(frames).flatten(0, 1), labels.flatten(), reduction="sum") / labels.shape[1]


def frames(divided, accumulate):
    labels = torch.randint(0, 3, (12, 6), generator=drawn(1))
    batch = F.one_hot(labels, 5) + 0.5 * torch.randn(12, 6, 5, generator=drawn(2)), labels
    return loop_of(Frames(), summed_over_time, batch, divided, accumulate, batch_dim=1)


class Graphs:
    """Several graphs in one: the features of all nodes, edges by the numbers of nodes, and the graph of each node."""

    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y


def collate(graphs):
    first = [0]
    for x, _, _ in graphs:
        first.append(first[-1] + len(x))
    return Graphs(
        torch.cat([x for x, _, _ in graphs]),
        torch.cat([edges + n for (_, edges, _), n in zip(graphs, first, strict=False)], dim=1),
        torch.cat([torch.full((len(x),), number) for number, (x, _, _) in enumerate(graphs)]),
        torch.stack([y for _, _, y in graphs]),
    )


def separate(data):
    for number, y in enumerate(data.y):
        nodes = (data.batch == number).nonzero().flatten()
        edges = data.edge_index[:, data.batch[data.edge_index[0]] == number] - nodes[0]
        yield data.x[nodes], edges, y


def split_batch(data, k):
    graphs = list(separate(data))
    size = len(graphs) // k
    if size * k != len(graphs):
        raise ValueError(f"{len(graphs)} graphs cannot be split into {k} parts")
    return [collate(graphs[n * size : (n + 1) * size]) for n in range(k)]


class OfGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, data):
        source, target = data.edge_index
        near = torch.zeros_like(data.x).index_add(0, target, data.x[source])
        nodes = self.conv(torch.cat([data.x, near], dim=1)).tanh()
        graphs = nodes.new_zeros(len(data.y), 12).index_add(0, data.batch, nodes)
        return self.out(graphs)


def of_graphs(divided, accumulate):
    rings = []
    for number, size in enumerate((3, 5, 4, 6, 3, 4, 5, 4)):
        ring = torch.stack([torch.arange(size), torch.arange(size).roll(1)])
        features = torch.randn(size, 3, generator=drawn(number)) + number % 2
        rings.append((features, torch.cat([ring, ring.flip(0)], dim=1), torch.tensor(number % 2)))
    loss = lambda model, data: F.cross_entropy(model(data), data.y)  # noqa: E731
    return loop_of(OfGraphs(), loss, collate(rings), divided, accumulate, split_batch=split_batch)


def both(made, **fields):
    def faulty(accumulate=1):
        return made(False, accumulate, **fields)

    def fixed(accumulate=1):
        return made(True, accumulate, **fields)

    return {"faulty": faulty, "fixed": fixed}


undivided = functools.partial(pair, check="accumulation_equivalence", cause="loss_not_divided", where="backward()")

undivided("undivided_with_time_first", **both(time_first, batch_dim=1))
undivided("undivided_over_graphs_that_the_project_splits", **both(of_graphs))
