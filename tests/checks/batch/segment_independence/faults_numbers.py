"""Numbers of nodes that graphs share, and a convolution over the borders of documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.pairs import pair
from tests.loops.plain import loop
from tests.loops.segmented import (
    SIZES,
    Convolution,
    borders,
    generator,
    graphs,
    next_token,
    packed_documents,
    summed,
    within_documents,
)


def centres(*, offset):
    """Classify one node of each graph, which the data count within their graph."""

    class Centres(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.head = Convolution(6, 8), nn.Linear(8, 3)

        def forward(self, x, edge_index, centre):
            return self.head(torch.tanh(self.convolution(x, edge_index))[centre])

    def loss_of(model, batch):
        data, centre = batch
        return F.cross_entropy(model(data.x, data.edge_index, centre), data.y)

    def make():
        data, centre = graphs(), torch.tensor([2, 1, 3, 0])
        return loop(Centres(), (data, centre + data.ptr[:-1] if offset else centre), loss_of)

    return make


pair(
    "a_node_of_each_graph_without_the_offset",
    "segment_independence",
    "numbers_shared",
    faulty=centres(offset=False),
    fixed=centres(offset=True),
    where="[centre]",
    culprits=("batch[1]",),
    quick=True,
)


def attention_by_edges(*, nodes_apart):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.score, self.head = nn.Linear(4, 8), nn.Linear(16, 1), nn.Linear(8, 2)

        def forward(self, x, adjacency):
            rows, nodes = x.shape[:2]
            hidden, edges = self.project(x), adjacency.nonzero()
            flat, step = hidden.flatten(0, 1), nodes if nodes_apart else rows
            one, other = (flat[edges[:, 0] * step + edges[:, end]] for end in (1, 2))
            scores = hidden.new_full(adjacency.shape, -1e9)
            scores[adjacency == 1] = torch.tanh(self.score(torch.cat([one, other], -1))).squeeze(-1)
            return self.head((scores.softmax(-1) @ hidden).mean(1))

    def make():
        ring = torch.eye(6) + torch.eye(6).roll(1, 0)
        x = torch.randn(3, 6, 4, generator=generator(6))
        return loop(Attention(), (x, ring.expand(3, -1, -1).clone(), torch.tensor([0, 1, 1])), loss_of)

    def loss_of(model, batch):
        return F.cross_entropy(model(*batch[:2]), batch[2])

    return make


pair(
    "flat_places_stepped_by_the_number_of_rows",
    "segment_independence",
    "numbers_shared",
    faulty=attention_by_edges(nodes_apart=False),
    fixed=attention_by_edges(nodes_apart=True),
    where="edges[:, 0] * step",
)


class Convolved(nn.Module):
    def __init__(self, *, restarts):
        super().__init__()
        self.tokens, self.convolution = nn.Embedding(24, 16), nn.Conv1d(16, 16, 3, groups=16)
        self.qkv, self.head, self.restarts = nn.Linear(16, 48), nn.Linear(16, 24), restarts

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids).transpose(1, 2)
        starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), input_ids.shape[1]]
        sizes = torch.tensor(starts).diff().tolist() if self.restarts else [input_ids.shape[1]]
        parts = [self.convolution(F.pad(part, (2, 0))) for part in hidden.split(sizes, 2)]
        query, key, value = self.qkv(torch.cat(parts, 2).transpose(1, 2)).chunk(3, -1)
        allowed = within_documents(position_ids).tril()
        return self.head(F.scaled_dot_product_attention(query, key, value, attn_mask=allowed))


def convolved(*, restarts):
    return lambda: loop(Convolved(restarts=restarts), packed_documents(), next_token)


pair(
    "convolution_over_the_borders_of_documents",
    "segment_independence",
    "convolution_across_documents",
    faulty=convolved(restarts=False),
    fixed=convolved(restarts=True),
    where="self.convolution(F.pad(part, (2, 0)))",
    culprits=("conv1d in convolution",),
    quick=True,
)


class BondMessages(nn.Module):
    """Messages along directed edges, each without what came back on its reverse."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, data, reverse):
        source, target = data.edge_index
        start = self.first(data.x)[source]
        hidden = start.tanh()
        into = summed(hidden, target, len(data.x))
        hidden = torch.tanh(start + self.again(into[source] - hidden[reverse]))
        return self.head(summed(summed(hidden, target, len(data.x)), data.batch, len(data.y)))


def reversed_edges(starts):
    """``starts``: what is added to the numbers of each graph's edges."""

    def make():
        data, own = graphs(), [(torch.arange(2 * n) + n) % (2 * n) for n in SIZES]
        reverse = torch.cat([numbers + start for numbers, start in zip(own, starts, strict=True)])
        batch = {"graphs": data, "rev_edge_index": reverse}
        return loop(BondMessages(), batch, lambda model, b: F.cross_entropy(model(*b.values()), b["graphs"].y))

    return make


# https://github.com/chemprop/chemprop/issues/786: an edge's number, moved by the nodes before it, or not at all.

for name, starts in (("nodes", borders().tolist()[:-1]), ("nothing", [0] * len(SIZES))):
    pair(
        f"reverse_edges_moved_by_{name}",
        "segment_independence",
        "numbers_shared",
        faulty=reversed_edges(starts),
        fixed=reversed_edges((2 * borders()).tolist()[:-1]),
        where="hidden[reverse]",
        culprits=("rev_edge_index",),
    )
