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
    generator,
    graph_of,
    graphs,
    mean_pool,
    next_token,
    packed_documents,
    rings,
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


def listed(*, all_before):
    """Graphs in a list, whose edges the model moves by the nodes of the one before, or of all before."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.head = Convolution(6, 8), nn.Linear(8, 3)

        def forward(self, items):
            sizes = [len(item["x"]) for item in items]
            first = [sum(sizes[:i]) if all_before else sum(sizes[max(i - 1, 0) : i]) for i in range(len(sizes))]
            edges = torch.cat([item["edge_index"] + start for item, start in zip(items, first, strict=True)], 1)
            hidden = torch.tanh(self.convolution(torch.cat([item["x"] for item in items]), edges))
            return self.head(mean_pool(None, hidden, graph_of(sizes), len(items)))

    def loss_of(model, items):
        return F.cross_entropy(model(items), torch.stack([item["y"] for item in items]))

    def make():
        draws = generator(5)
        items = [
            {"x": torch.randn(n, 6, generator=draws), "edge_index": rings((n,)), "y": torch.tensor(i % 3)}
            for i, n in enumerate(SIZES)
        ]
        return loop(Listed(), items, loss_of)

    return make


pair(
    "listed_graphs_moved_by_the_one_before",
    "segment_independence",
    "numbers_shared",
    faulty=listed(all_before=False),
    fixed=listed(all_before=True),
    where="[source]",
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


def one_graph_for_all_rows(*, offset):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.head = Convolution(2, 8), nn.Linear(8, 1)
            self.register_buffer("edges", rings((5,)))

        def forward(self, places):
            rows, nodes = places.shape[:2]
            edges = self.edges
            if offset:
                edges = torch.cat([edges + nodes * row for row in range(rows)], 1)
            hidden = torch.tanh(self.convolution(places.flatten(0, 1), edges))
            return self.head(hidden).view(rows, nodes)

    def make():
        places = torch.rand(3, 5, 2, generator=generator(7))
        return loop(Router(), {"places": places, "next": torch.tensor([1, 4, 0])}, loss_of)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["places"]), batch["next"])

    return make


pair(
    "edges_of_one_graph_for_all_rows",
    "segment_independence",
    "numbers_shared",
    faulty=one_graph_for_all_rows(offset=False),
    fixed=one_graph_for_all_rows(offset=True),
    where="index_add(0, index, values)",
)


def pooled_documents(*, offset):
    class Pooler(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(24, 8), nn.Linear(8, 3)

        def forward(self, ids, document_ids):
            rows = len(ids)
            if offset:
                document_ids = document_ids + 2 * torch.arange(rows)[:, None]
            hidden = torch.tanh(self.tokens(ids)).flatten(0, 1)
            return self.head(summed(hidden, document_ids.flatten(), rows * 2))

    def make():
        ids = torch.randint(24, (3, 7), generator=generator(8))
        numbers = (torch.arange(7) >= torch.tensor([3, 4, 2])[:, None]).long()
        batch = {"ids": ids, "document_ids": numbers, "y": torch.tensor([[0, 1], [2, 1], [1, 0]])}
        return loop(Pooler(), batch, loss_of)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["document_ids"]), batch["y"].flatten())

    return make


pair(
    "documents_of_one_number_pooled_over_rows",
    "segment_independence",
    "numbers_shared",
    faulty=pooled_documents(offset=False),
    fixed=pooled_documents(offset=True),
    where="index_add(0, index, values)",
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
