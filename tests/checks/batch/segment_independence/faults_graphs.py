"""Graphs of one batch that meet: by a pooling, a norm, a softmax, a reshape or their edges."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.segmented import (
    GraphNet,
    averaged,
    borders,
    classify_graphs,
    graph_of,
    graphs,
    mean_pool,
    rings,
    softmax_within,
    summed,
)


def net(pool, norm=None, data=graphs, loss_of=classify_graphs, **layers):
    return lambda: loop(GraphNet(pool, norm, **{name: layer() for name, layer in layers.items()}), data(), loss_of)


def pooled_over_all(_layers, hidden, _batch, count):
    return hidden.mean(0, keepdim=True).expand(count, -1)


pair(
    "readout_without_the_graph_of_each_node",
    "segment_independence",
    "pooled_over_graphs",
    faulty=net(pooled_over_all),
    fixed=net(mean_pool),
    where="hidden.mean(0, keepdim=True)",
    culprits=("mean in GraphNet",),
    quick=True,
)


def norm_of_a_graph(_layers, hidden, batch, count):
    centred = hidden - averaged(hidden, batch, count)[batch]
    return centred / (averaged(centred.square(), batch, count)[batch] + 1e-5).sqrt()


def gate_over_all_nodes(m, hidden, batch, count):
    weights = torch.softmax(m["gate"](hidden), dim=0)
    return summed(weights * hidden, batch, count)


def gate_within_graphs(m, hidden, batch, count):
    return summed(softmax_within(m["gate"](hidden), batch, count) * hidden, batch, count)


pair(
    "attention_pool_with_one_softmax",
    "segment_independence",
    "softmax_over_graphs",
    faulty=net(gate_over_all_nodes, gate=lambda: nn.Linear(8, 1)),
    fixed=net(gate_within_graphs, gate=lambda: nn.Linear(8, 1)),
    where="torch.softmax",
    culprits=("softmax in GraphNet",),
    quick=True,
)


def equal_parts(_layers, hidden, _batch, count):
    return hidden.view(count, -1, hidden.shape[1]).mean(1)


def uneven():
    return graphs((3, 5, 4, 4))


pair(
    "nodes_split_into_equal_parts",
    "segment_independence",
    "cut_across_graphs",
    faulty=net(equal_parts, data=uneven),
    fixed=net(mean_pool, data=uneven),
    where="hidden.view(count",
    quick=True,
)


def collated(*, offset, sizes=(3, 5, 4, 2)):
    """A list of graphs, put together by the project's own function."""

    def make():
        whole = graphs(sizes)
        items = [
            {"x": whole.x[a:b], "edge_index": rings((b - a,)), "y": int(y)}
            for (a, b), y in zip(itertools.pairwise(whole.ptr.tolist()), whole.y, strict=True)
        ]

        def loss_of(model, items):
            counts = [len(item["x"]) for item in items]
            firsts = borders(counts) if offset else [0] * len(items)
            edges = torch.cat([g["edge_index"] + first for g, first in zip(items, firsts, strict=False)], 1)
            nodes, labels = torch.cat([g["x"] for g in items]), torch.tensor([g["y"] for g in items])
            return F.cross_entropy(model(nodes, edges, graph_of(counts), len(items)), labels)

        return loop(GraphNet(mean_pool), items, loss_of)

    return make


pair(
    "list_of_graphs_put_together_without_offsets",
    "segment_independence",
    "numbers_shared",
    faulty=collated(offset=False),
    fixed=collated(offset=True),
)

pair(
    "edges_of_all_graphs_from_zero",
    "segment_independence",
    "edges_not_offset",
    faulty=net(mean_pool, data=lambda: graphs(edges=rings(offset=False))),
    fixed=net(mean_pool),
    culprits=("edge_index",),
    quick=True,
)


def one_too_few():
    """Offsets by the last index of the graph before, not by its number of nodes."""
    sizes = (3, 5, 4, 2)
    parts = [rings((size,)) + first - n for n, (size, first) in enumerate(zip(sizes, borders(sizes), strict=False))]
    return graphs(sizes, edges=torch.cat(parts, 1))


pair(
    "offsets_by_the_last_index",
    "segment_independence",
    "edges_across_graphs",
    faulty=net(mean_pool, data=one_too_few),
    fixed=net(mean_pool),
    culprits=("edge_index",),
    quick=True,
)


def as_named_by_dgl(norm):
    """The nodes of a batched graph with their counts, and no vector."""

    def make():
        whole = graphs()
        batch = {"feat": whole.x, "edges": whole.edge_index, "batch_num_nodes": torch.tensor([3, 5, 4, 2])}
        batch["labels"] = whole.y

        def loss_of(model, b):
            graph = graph_of(b["batch_num_nodes"].tolist())
            return F.cross_entropy(model(b["feat"], b["edges"], graph, len(b["labels"])), b["labels"])

        return loop(GraphNet(mean_pool, norm), batch, loss_of)

    return make


def pair_norm(_layers, hidden, _batch, _count):
    centred = hidden - hidden.mean(dim=0, keepdim=True)
    return centred / (1e-5 + centred.pow(2).sum(-1).mean()).sqrt()


pair(
    "pair_norm_over_all_graphs",
    "segment_independence",
    "pooled_over_graphs",
    faulty=as_named_by_dgl(pair_norm),
    fixed=as_named_by_dgl(norm_of_a_graph),
    where="hidden.mean(dim=0, keepdim=True)",
)


def scores_in_the_loop(score):
    """One node of each graph is to be picked, as by a policy."""

    class Picker(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(6, 1)

        def forward(self, x):
            return self.score(x)

    def loss_of(model, data):
        logp = score(model(data.x), data)
        return F.nll_loss(torch.cat([logp, torch.zeros_like(logp)], 1)[data.ptr[:-1]], torch.zeros_like(data.y))

    return lambda: loop(Picker(), graphs(), loss_of)


pair(
    "scores_of_all_nodes_in_one_softmax_in_the_loop",
    "segment_independence",
    "softmax_over_graphs",
    faulty=scores_in_the_loop(lambda scores, _data: scores.log_softmax(0)),
    fixed=scores_in_the_loop(lambda scores, data: softmax_within(scores, data.batch, len(data.y)).log()),
    where="scores.log_softmax(0)",
)


class Sets(nn.Module):
    """Points of several sets, which only a sorted vector of numbers and as many labels tell."""

    def __init__(self, pool):
        super().__init__()
        self.body, self.head, self.pool = nn.Linear(6, 8), nn.Linear(8, 3), pool

    def forward(self, points, owner):
        hidden = torch.tanh(self.body(points))
        return self.head(self.pool(None, hidden, owner, int(owner.max()) + 1))


def sets(pool):
    def make():
        whole = graphs()
        batch = {"points": whole.x, "owner": whole.batch, "kind": whole.y}
        return loop(Sets(pool), batch, lambda m, b: F.cross_entropy(m(b["points"], b["owner"]), b["kind"]))

    return make


pair(
    "points_of_all_sets_are_pooled",
    "segment_independence",
    "pooled_over_graphs",
    faulty=sets(pooled_over_all),
    fixed=sets(mean_pool),
    level="advice",
)
