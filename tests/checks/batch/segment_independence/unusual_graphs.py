"""Several graphs in one batch that look as if they met."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.segmented import (
    SIZES,
    GraphNet,
    averaged,
    borders,
    classify_graphs,
    generator,
    graph_of,
    graphs,
    mean_pool,
    rings,
    softmax_within,
    summed,
)


@odd(notes="a virtual node for each graph sends the sum of its nodes back to all of them")
def virtual_nodes():
    def norm(m, hidden, batch, count):
        return hidden + torch.relu(m["virtual"](summed(hidden, batch, count)))[batch]

    return loop(GraphNet(mean_pool, norm, virtual=nn.Linear(8, 8)), graphs(), classify_graphs)


@odd(notes="batch norm over the nodes of all graphs: running statistics keep them apart in evaluation")
def batch_norm_over_all_nodes():
    def norm(m, hidden, _batch, _count):
        return m["bn"](hidden)

    return loop(GraphNet(mean_pool, norm, bn=nn.BatchNorm1d(8)), graphs(), classify_graphs)


@odd(notes="attention pooling, its softmax written out by scatter within each graph")
def attention_pool_within_graphs():
    def pool(m, hidden, batch, count):
        return summed(softmax_within(m["gate"](hidden), batch, count) * hidden, batch, count)

    return loop(GraphNet(pool, gate=nn.Linear(8, 1)), graphs(), classify_graphs)


@odd(notes="a padded dense batch of the graphs, with attention between the nodes of one")
def dense_attention_within_graphs():
    def norm(m, hidden, batch, count):
        first = torch.cat([batch.new_zeros(1), batch.bincount(minlength=count).cumsum(0)])
        place = torch.arange(len(batch)) - first[batch]
        dense = hidden.new_zeros(count, int(place.max()) + 1, hidden.shape[1])
        dense[batch, place] = hidden
        real = torch.zeros(dense.shape[:2], dtype=torch.bool)
        real[batch, place] = True
        mixed, _ = m["attend"](dense, dense, dense, key_padding_mask=~real)
        return hidden + mixed[batch, place]

    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    return loop(GraphNet(mean_pool, norm, attend=attend), graphs(), classify_graphs)


@odd(notes="graphs of one size: a reshape splits the nodes at their borders")
def reshaped_into_graphs_of_one_size():
    def pool(_layers, hidden, _batch, count):
        return hidden.view(count, -1, hidden.shape[1]).amax(1)

    return loop(GraphNet(pool), graphs((4, 4, 4, 4)), classify_graphs)


@odd(notes="graphs come in pairs, and the nodes of one attend to those of its partner")
def matching_of_pairs_of_graphs():
    def norm(m, hidden, batch, _count):
        scores = m["query"](hidden) @ hidden.T
        partner = batch[:, None] == (batch ^ 1)[None]
        weights = scores.masked_fill(~partner, -torch.inf).softmax(1)
        return hidden - weights @ hidden

    batch = graphs()
    return loop(GraphNet(mean_pool, norm, query=nn.Linear(8, 8)), batch, classify_graphs, rows_interact=True)


@odd(notes="one graph for all: labels for its nodes, and no vector that says which graph")
def one_transductive_graph():
    @dataclass
    class Citations:
        x: torch.Tensor
        edge_index: torch.Tensor
        y: torch.Tensor
        train_mask: torch.Tensor

    def pool(_layers, hidden, _batch, _count):
        return hidden - hidden.mean(0)

    def loss_of(model, data):
        mask = data.train_mask
        return F.cross_entropy(model(data.x, data.edge_index, None, 1)[mask], data.y[mask])

    edges = torch.cat([rings((12,)), torch.tensor([[0, 3, 5], [6, 9, 11]])], 1)
    batch = Citations(torch.randn(12, 6, generator=generator(2)), edges, torch.arange(12) % 3, torch.arange(12) < 8)
    return loop(GraphNet(pool), batch, loss_of)


@odd(notes="users and items have graphs of their own, with edges from one kind to the other")
def edges_between_two_kinds_of_nodes():
    class Ratings(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item, self.head = nn.Linear(4, 8), nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, data):
            source, target = data["user", "rates", "item"]["edge_index"]
            sent = torch.tanh(self.user(data["user"]["x"]))[source]
            items = torch.tanh(self.item(data["item"]["x"]))
            items = items + averaged(sent, target, len(items)).nan_to_num()
            return self.head(averaged(items, data["item"]["batch"], len(data["y"])))

    edges = torch.tensor([[0, 1, 2, 2, 3, 4, 5, 5], [0, 1, 1, 2, 3, 4, 5, 6]])
    batch = {
        "user": {"x": torch.randn(6, 4, generator=generator(1)), "batch": torch.tensor([0, 0, 0, 1, 1, 2])},
        "item": {"x": torch.randn(7, 5, generator=generator(2)), "batch": torch.tensor([0, 0, 0, 1, 1, 2, 2])},
        ("user", "rates", "item"): {"edge_index": edges},
        "y": torch.tensor([0, 1, 2]),
    }
    return loop(Ratings(), batch, lambda m, b: F.cross_entropy(m(b), b["y"]))


@odd(notes="graphs are a list, put together in the loop; some are single nodes without an edge")
def lists_of_graphs_put_together_in_the_loop():
    sizes = (3, 1, 4, 1, 2)
    x = torch.randn(sum(sizes), 6, generator=generator(4))
    items = [
        {"x": x[a:b], "edge_index": rings((b - a,)) if b - a > 1 else torch.empty(2, 0, dtype=torch.long), "y": n % 3}
        for n, (a, b) in enumerate(itertools.pairwise(borders(sizes).tolist()))
    ]

    def loss_of(model, items):
        counts = [len(item["x"]) for item in items]
        first = borders(counts)
        edges = torch.cat([item["edge_index"] + start for item, start in zip(items, first, strict=False)], 1)
        nodes = torch.cat([item["x"] for item in items])
        labels = torch.tensor([item["y"] for item in items])
        return F.cross_entropy(model(nodes, edges, graph_of(counts), len(items)), labels)

    return loop(GraphNet(mean_pool), items, loss_of)


@odd(notes="a jigsaw of contrasts: two views of each graph, and all other graphs of the batch are negatives")
def graph_contrast_over_the_batch():
    class Views(GraphNet):
        def encode(self, data, seed):
            kept = torch.rand(data.x.shape, generator=generator(seed)).to(data.x) > 0.2
            return F.normalize(self(data.x * kept, data.edge_index, data.batch, len(data.y)), dim=1)

    def loss_of(model, data):
        scores = model.encode(data, 1) @ model.encode(data, 2).T / 0.2
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return loop(Views(mean_pool, classes=8), graphs(), loss_of)


@odd(notes="the offsets of Pointcept: where each cloud of points ends; nearest points within each")
def clouds_of_points_with_offsets():
    class Clouds(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, coord, feat, offset):
            ends = offset.tolist()
            out, hidden = [], torch.tanh(self.body(torch.cat([coord, feat], 1)))
            for first, last in zip([0, *ends], ends, strict=False):
                near = torch.cdist(coord[first:last], coord[first:last]).topk(2, largest=False).indices
                out.append(hidden[first:last][near].amax(1))
            return self.head(torch.cat(out))

    points = sum(SIZES)
    batch = {
        "coord": torch.rand(points, 3, generator=generator(1)),
        "feat": torch.randn(points, 3, generator=generator(2)),
        "offset": borders()[1:],
        "segment": torch.arange(points) % 3,
    }
    return loop(Clouds(), batch, lambda m, b: F.cross_entropy(m(b["coord"], b["feat"], b["offset"]), b["segment"]))


@odd(notes="energies are sums over the nodes of a graph, forces the gradient of all of them by the positions")
def energies_and_forces():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, pos, edge_index, batch, count):
            source, target = edge_index
            apart = (pos[source] - pos[target]).square().sum(1, keepdim=True)
            return summed(self.pair(apart), batch[source], count)[:, 0]

    data = graphs()
    batch = {"pos": torch.rand(sum(SIZES), 3, generator=generator(5)), "edge_index": data.edge_index}
    batch |= {"batch": data.batch, "energy": torch.tensor([4.0, -3.0, 5.0, -6.0])}
    batch["forces"] = torch.randn(sum(SIZES), 3, generator=generator(6))

    def loss_of(model, b):
        pos = b["pos"].clone().requires_grad_()
        energy = model(pos, b["edge_index"], b["batch"], len(b["energy"]))
        (slope,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return F.mse_loss(energy, b["energy"]) + F.mse_loss(-slope, b["forces"])

    return loop(Energy(), batch, loss_of)


@odd(notes="parallel edges: a bond and its twin, in the first graph alone; the others are single atoms")
def parallel_edges_in_the_first_graph():
    edges = torch.tensor([[0, 1, 0, 1, 1, 2], [1, 0, 1, 0, 2, 1]])
    data = graphs((3, 1, 1, 1), edges=edges)
    return loop(GraphNet(mean_pool), replace(data), classify_graphs)


@odd(notes="whole numbers that do not fall: the hour of each row is no graph")
def sorted_numbers_that_are_no_graphs():
    hours = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])

    class Hourly(nn.Module):
        def __init__(self):
            super().__init__()
            self.hour, self.body, self.head = nn.Embedding(4, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, hour):
            return self.head(torch.tanh(self.body(x) + self.hour(hour)))

    batch = {"x": torch.randn(8, 6, generator=generator(2)), "hour": hours, "y": torch.arange(8) % 3}
    return loop(Hourly(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["hour"]), b["y"]))


@odd(notes="two views of all nodes, standardised over the batch in the loss, as CCA-SSG does")
def node_views_standardised_in_the_loss():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x):
            return self.body(x)

    def standardised(z):
        return (z - z.mean(0)) / (z.std(0) + 1e-6)

    def loss_of(model, data):
        one, two = (standardised(model(data.x + 0.1 * torch.randn_like(data.x))) for _ in range(2))
        apart = (one.T @ one / len(one) - torch.eye(4)).square().sum()
        return F.mse_loss(one, two) + 0.1 * apart

    return loop(Views(), graphs(), loss_of)


@odd(notes="each graph is compared with a node of the next one, by numbers within the batch")
def nodes_of_other_graphs_as_negatives():
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)

        def forward(self, x, own, other):
            hidden = self.body(x)
            return (hidden[own] * hidden[other]).sum(-1)

    def loss_of(model, batch):
        return F.softplus(model(batch["x"], batch["own"], batch["other"])).mean()

    data = graphs()
    own = data.ptr[:-1]
    batch = {"x": data.x, "batch": data.batch, "own": own, "other": own.roll(-1)}
    return loop(Contrast(), batch, loss_of, rows_interact=True)


@odd(notes="the first time step of each row, picked by its number from the flattened steps of a time-major batch")
def first_steps_by_number():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)

        def forward(self, x):
            return self.body(x.flatten(0, 1)[torch.arange(x.shape[1])])

    batch = torch.randn(6, 5, 4, generator=generator(2)), torch.arange(5) % 3
    return loop(Steps(), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch_dim=1)


@odd(notes="each edge is compared with one of another graph on purpose, by numbers that are drawn")
def edges_compared_with_those_of_other_graphs():
    class Compared(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, data, negatives):
            source, target = data.edge_index
            hidden = torch.tanh(self.body(data.x[source] + data.x[target]))
            return self.head(hidden - hidden[negatives])

    data = graphs()
    drawn = torch.randperm(data.edge_index.shape[1], generator=torch.Generator().manual_seed(1))
    return loop(Compared(), (data, drawn), lambda model, batch: F.softplus(-model(*batch)).mean())
