"""Graphs that are batched as they should be, though nodes meet in all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


@dataclass
class Data:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor

    @property
    def num_nodes(self):
        return len(self.x)


@dataclass
class Batch:
    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor
    ptr: torch.Tensor
    y: torch.Tensor

    @property
    def num_graphs(self):
        return len(self.ptr) - 1

    @classmethod
    def from_data_list(cls, graphs):
        sizes = torch.tensor([g.num_nodes for g in graphs])
        ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return cls(
            torch.cat([g.x for g in graphs]),
            torch.cat([g.edge_index + start for g, start in zip(graphs, ptr, strict=False)], 1),
            torch.repeat_interleave(torch.arange(len(graphs)), sizes),
            ptr,
            torch.stack([g.y for g in graphs]),
        )


def random_graph(features=4, classes=3, low=3, high=7, regression=False):
    nodes = int(torch.randint(low, high + 1, ()))
    ring = torch.arange(nodes)
    edges = torch.stack([ring, (ring + 1) % nodes])
    chords = torch.randint(0, nodes, (2, 2))
    y = torch.randn(()) if regression else torch.randint(0, classes, ())
    return Data(x=torch.randn(nodes, features), edge_index=torch.cat([edges, edges.flip(0), chords], 1), y=y)


def graph_loader(n=32, batch_size=8, collate_fn=None, **options):
    graphs = [random_graph(**options) for _ in range(n)]
    return DataLoader(graphs, batch_size, collate_fn=collate_fn or Batch.from_data_list)


def scatter_add(x, index, size):
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def scatter_mean(x, index, size):
    count = torch.bincount(index, minlength=size).clamp(min=1)
    return scatter_add(x, index, size) / count.view(-1, *[1] * (x.dim() - 1))


def scatter_softmax(x, index, size):
    top = x.new_full((size, *x.shape[1:]), float("-inf"))
    expanded = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    top = top.scatter_reduce(0, expanded, x.detach(), "amax")
    out = (x - top[index]).exp()
    return out / (scatter_add(out, index, size)[index] + 1e-16)


class GINConv(nn.Module):
    def __init__(self, inputs, outputs, norm=False):
        super().__init__()
        middle = nn.BatchNorm1d(outputs) if norm else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(inputs, outputs), middle, nn.ReLU(), nn.Linear(outputs, outputs))
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.mlp((1 + self.eps) * x + scatter_add(x[source], target, len(x)))


def fit_graphs(model, optimizer, criterion=F.cross_entropy):
    def train(batches):
        model.train()
        for data in batches:
            optimizer.zero_grad()
            loss = criterion(model(data), data.y)
            loss.backward()
            optimizer.step()

    return train


def fit_lists(model, optimizer):
    def train(batches):
        model.train()
        for graphs in batches:
            data = Batch.from_data_list(graphs)
            loss = F.cross_entropy(model(data), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


@right(
    "graphs",
    "edge indices grow by the nodes of all graphs before: the batch is one graph of separate parts, summed by part",
    thread="pyg-team/pytorch_geometric#31",
)
def disjoint_union():
    torch.manual_seed(0)

    class GIN(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GINConv(4, 12, norm=True), GINConv(12, 12, norm=True)])
            self.out = nn.Linear(12, 3)

        def forward(self, data):
            x = data.x
            for conv in self.convs:
                x = conv(x, data.edge_index).relu()
            return self.out(scatter_add(x, data.batch, data.num_graphs))

    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batches=graph_loader(), fit=fit_graphs(model, optimizer))


@right(
    "graphs",
    "graphs without nodes are in the batch: the pool is told the number of graphs and gives zeros for them",
    thread="pyg-team/pytorch_geometric#2895",
)
def empty_graphs():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = GINConv(4, 12), nn.Linear(12, 3)

        def forward(self, data):
            return self.out(scatter_add(self.conv(data.x, data.edge_index), data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    graphs = [random_graph() for _ in range(27)]
    for i in range(2, 27, 9):
        graphs[i] = Data(x=torch.zeros(0, 4), edge_index=torch.zeros(2, 0, dtype=torch.long), y=torch.tensor(i % 3))
    data = DataLoader(graphs, 9, collate_fn=Batch.from_data_list)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_graphs(model, optimizer))


class GATConv(nn.Module):
    def __init__(self, inputs, outputs, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.outputs, self.dropout = heads, outputs, dropout
        self.lin = nn.Linear(inputs, heads * outputs, bias=False)
        self.att = nn.Parameter(torch.randn(1, heads, 2 * outputs) * 0.2)

    def forward(self, x, edge_index):
        loops = torch.arange(len(x)).expand(2, -1)
        source, target = torch.cat([edge_index, loops], 1)
        h = self.lin(x).view(-1, self.heads, self.outputs)
        alpha = F.leaky_relu((torch.cat([h[target], h[source]], -1) * self.att).sum(-1), 0.2)
        alpha = F.dropout(scatter_softmax(alpha, target, len(x)), self.dropout, self.training)
        return scatter_add(h[source] * alpha[..., None], target, len(x)).flatten(1)


@right(
    "graphs",
    "the attention of the edges is normalised over those that end in the same node, not over an axis",
    thread="pyg-team/pytorch_geometric#227",
)
def attention_by_target():
    torch.manual_seed(0)

    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.out = GATConv(4, 6), GATConv(12, 6), nn.Linear(12, 3)

        def forward(self, data):
            x = F.elu(self.conv1(data.x, data.edge_index))
            x = F.elu(self.conv2(x, data.edge_index))
            return self.out(scatter_mean(x, data.batch, data.num_graphs))

    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(model=model, optimizer=optimizer, batches=graph_loader(), fit=fit_graphs(model, optimizer))


@right(
    "graphs",
    "dropout on attention that is normalised already, in a node classifier: one graph, a loss over train_mask",
    thread="dmlc/dgl#1016",
)
def citation_network():
    torch.manual_seed(0)

    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = GATConv(6, 4, heads=3, dropout=0.4)
            self.conv2 = GATConv(12, 4, heads=1, dropout=0.4)

        def forward(self, x, edge_index):
            return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)

    model = GAT()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    nodes = 30
    graph = {
        "x": torch.randn(nodes, 6),
        "edge_index": torch.randint(0, nodes, (2, 70)),
        "y": torch.randint(0, 4, (nodes,)),
        "train_mask": torch.arange(nodes) < 12,
    }

    def train(batches):
        model.train()
        for data in batches:
            optimizer.zero_grad()
            out = model(data["x"], data["edge_index"])
            F.cross_entropy(out[data["train_mask"]], data["y"][data["train_mask"]]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=graph, fit=train)


@right(
    "graphs",
    "a virtual node per graph: added to the nodes of its graph before the layer, updated by the sum of them after",
    thread="snap-stanford/ogb#291",
)
def virtual_nodes():
    torch.manual_seed(0)

    class VirtualGIN(nn.Module):
        def __init__(self, dim=12, layers=3):
            super().__init__()
            self.inputs = nn.Linear(4, dim)
            self.virtual = nn.Embedding(1, dim)
            nn.init.constant_(self.virtual.weight, 0)
            self.convs = nn.ModuleList(GINConv(dim, dim) for _ in range(layers))
            self.updates = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(layers - 1))
            self.out = nn.Linear(dim, 3)

        def forward(self, data):
            virtual = self.virtual(torch.zeros(data.num_graphs, dtype=torch.long))
            h = self.inputs(data.x)
            for i, conv in enumerate(self.convs):
                h = h + virtual[data.batch]
                following = conv(h, data.edge_index).relu()
                if i < len(self.updates):
                    virtual = virtual + self.updates[i](scatter_add(h, data.batch, data.num_graphs) + virtual)
                h = following
            return self.out(scatter_mean(h, data.batch, data.num_graphs))

    model = VirtualGIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = graph_loader(30, 6, collate_fn=list)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_lists(model, optimizer))


class GraphNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.mean_scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x, batch, size):
        out = x - scatter_mean(x, batch, size)[batch] * self.mean_scale
        std = (scatter_mean(out.pow(2), batch, size) + self.eps).sqrt()[batch]
        return self.weight * out / std + self.bias


@right(
    "graphs",
    "GraphNorm with the batch vector: mean and deviation of each graph over its own nodes",
    thread="pyg-team/pytorch_geometric#687",
)
def norm_by_graph():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = GINConv(4, 12), GraphNorm(12), nn.Linear(12, 3)

        def forward(self, data):
            x = self.conv(data.x, data.edge_index)
            x = self.norm(x, data.batch, data.num_graphs).relu()
            return self.out(scatter_mean(x, data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = graph_loader(35, 7, collate_fn=list)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=data, fit=fit_lists(model, optimizer), rows_interact=False
    )


def to_dense_batch(x, batch, size):
    counts = torch.bincount(batch, minlength=size)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(x)) - starts[batch]
    dense = x.new_zeros(size, int(counts.max()), x.shape[1])
    mask = torch.zeros(dense.shape[:2], dtype=torch.bool)
    mask[batch, place] = True
    return dense.index_put((batch, place), x), mask


@right(
    "graphs",
    "nodes are laid out as (graphs, nodes) for attention, with the padded ones masked, and taken back by the mask",
    thread="pyg-team/pytorch_geometric#1629",
)
def dense_attention():
    torch.manual_seed(0)

    class GPSConv(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.conv, self.norm = GINConv(dim, dim), nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)

        def forward(self, x, data):
            local = x + self.conv(x, data.edge_index)
            h, mask = to_dense_batch(x, data.batch, data.num_graphs)
            h, _ = self.attn(h, h, h, key_padding_mask=~mask, need_weights=False)
            return self.norm(local + h[mask])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.gps, self.out = nn.Linear(4, 12), GPSConv(12), nn.Linear(12, 1)

        def forward(self, data):
            x = self.gps(self.inputs(data.x), data)
            return self.out(scatter_add(x, data.batch, data.num_graphs)).squeeze(-1)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = graph_loader(36, 9, regression=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_graphs(model, optimizer, F.l1_loss))


@right(
    "graphs",
    "nodes stand at the end of the padded rows, so the mask is true for the first max - n of them",
    thread="ucbrise/graphtrans#7",
)
def nodes_at_the_end():
    torch.manual_seed(0)

    class GraphTrans(nn.Module):
        def __init__(self, dim=12):
            super().__init__()
            self.gnn = GINConv(4, dim)
            self.transformer = nn.TransformerEncoderLayer(dim, 2, 24, dropout=0.0)
            self.cls, self.out = nn.Parameter(torch.randn(1, 1, dim) * 0.1), nn.Linear(dim, 3)

        def pad_batch(self, h, ptr):
            sizes = (ptr[1:] - ptr[:-1]).tolist()
            width = max(sizes)
            padded = h.new_zeros(width, len(sizes), h.shape[-1])
            mask = torch.zeros(len(sizes), width, dtype=torch.bool)
            for i, n in enumerate(sizes):
                padded[-n:, i] = h[ptr[i] : ptr[i + 1]]
                mask[i, : width - n] = True
            return padded, mask

        def forward(self, data):
            padded, mask = self.pad_batch(self.gnn(data.x, data.edge_index), data.ptr)
            padded = torch.cat([padded, self.cls.expand(1, padded.shape[1], -1)])
            mask = torch.cat([mask, mask.new_zeros(len(mask), 1)], 1)
            return self.out(self.transformer(padded, src_key_padding_mask=mask)[-1])

    model = GraphTrans()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = graph_loader(40, 10)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_graphs(model, optimizer))


@right(
    "graphs",
    "Set2Set: an LSTM over processing steps with a row per graph, attention over the nodes of that graph",
    thread="pyg-team/pytorch_geometric#206",
)
def set_to_set():
    torch.manual_seed(0)

    class Set2Set(nn.Module):
        def __init__(self, dim, steps=3):
            super().__init__()
            self.steps, self.dim, self.lstm = steps, dim, nn.LSTM(2 * dim, dim)

        def forward(self, x, batch, size):
            state = (x.new_zeros(1, size, self.dim), x.new_zeros(1, size, self.dim))
            q_star = x.new_zeros(size, 2 * self.dim)
            for _ in range(self.steps):
                q, state = self.lstm(q_star.unsqueeze(0), state)
                q = q.view(size, self.dim)
                weight = scatter_softmax((x * q[batch]).sum(-1, keepdim=True), batch, size)
                q_star = torch.cat([q, scatter_add(weight * x, batch, size)], dim=-1)
            return q_star

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool, self.out = GINConv(4, 8), Set2Set(8), nn.Linear(16, 3)

        def forward(self, data):
            return self.out(self.pool(self.conv(data.x, data.edge_index), data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=graph_loader(collate_fn=list), fit=fit_lists(model, optimizer)
    )


@right(
    "graphs",
    "a global attention pool: the softmax of the gates is by graph, segments of the batch vector",
    thread="danielegrattarola/spektral#302",
)
def gated_pool():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gate = GINConv(4, 12), nn.Linear(12, 1)
            self.value, self.out = nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, graphs):
            data = Batch.from_data_list(graphs)
            x = self.conv(data.x, data.edge_index).relu()
            gate = scatter_softmax(self.gate(x), data.batch, len(graphs))
            return self.out(scatter_add(gate * self.value(x), data.batch, len(graphs)))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = DataLoader([random_graph() for _ in range(32)], 8, collate_fn=list)

    def train(batches):
        for graphs in batches:
            loss = F.cross_entropy(model(graphs), torch.stack([g.y for g in graphs]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


@right(
    "graphs",
    "link prediction on one graph: sampled negative edges may be real ones now and then",
    thread="dmlc/dgl#1535",
)
def link_prediction():
    torch.manual_seed(0)

    class SAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.neighbours = nn.Linear(5, 12), nn.Linear(5, 12, bias=False)
            self.predict = nn.Linear(12, 1)

        def forward(self, x, edge_index):
            source, target = edge_index
            return F.relu(self.own(x) + self.neighbours(scatter_mean(x[source], target, len(x))))

        def score(self, h, edges):
            return self.predict(h[edges[0]] * h[edges[1]]).squeeze(-1)

    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    nodes = 25
    x, edge_index = torch.randn(nodes, 5), torch.randint(0, nodes, (2, 60))

    def train(batches):
        for seeds in batches:
            h = model(x, edge_index)
            pos = edge_index[:, seeds]
            neg = torch.stack([pos[0].repeat_interleave(2), torch.randint(0, nodes, (2 * len(seeds),))])
            pos_score, neg_score = model.score(h, pos), model.score(h, neg)
            score = torch.cat([pos_score, neg_score])
            label = torch.cat([torch.ones_like(pos_score), torch.zeros_like(neg_score)])
            loss = F.binary_cross_entropy_with_logits(score, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(torch.arange(60), 15, shuffle=True), fit=train
    )


@right(
    "graphs",
    "neighbour sampling: the seeds are the first batch_size nodes of the subgraph, and only they are in the loss",
    thread="pyg-team/pytorch_geometric#64",
)
def neighbour_sampling():
    torch.manual_seed(0)
    nodes = 40
    features, labels = torch.randn(nodes, 5), torch.randint(0, 4, (nodes,))
    neighbours = torch.randint(0, nodes, (nodes, 6))

    def sample(seeds):
        seeds = torch.stack(seeds)
        chosen = neighbours[seeds][:, torch.randperm(6)[:3]]
        n_id = torch.cat([seeds, chosen.flatten()])
        target = torch.arange(len(seeds)).repeat_interleave(3)
        source = torch.arange(len(seeds), len(n_id))
        return {
            "n_id": n_id,
            "edge_index": torch.stack([source, target]),
            "batch_size": len(seeds),
        }

    class SAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.root, self.rel, self.out = nn.Linear(5, 12), nn.Linear(5, 12, bias=False), nn.Linear(12, 4)

        def forward(self, x, edge_index):
            source, target = edge_index
            return self.out(F.relu(self.root(x) + self.rel(scatter_mean(x[source], target, len(x)))))

    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train(batches):
        model.train()
        for batch in batches:
            optimizer.zero_grad()
            out = model(features[batch["n_id"]], batch["edge_index"])[: batch["batch_size"]]
            F.cross_entropy(out, labels[batch["n_id"][: batch["batch_size"]]]).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(torch.arange(nodes), 8, shuffle=True, collate_fn=sample),
        fit=train,
    )


@right(
    "graphs",
    "a dense batch of enzymes: the mask takes padded nodes out after each layer and out of the count of the mean",
    thread="pyg-team/pytorch_geometric#881",
)
def dense_with_mask():
    torch.manual_seed(0)

    class DenseSAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.rel1, self.root1 = nn.Linear(3, 12, bias=False), nn.Linear(3, 12)
            self.rel2, self.root2 = nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
            self.out = nn.Linear(12, 4)

        def forward(self, x, adj, mask):
            keep = mask[..., None].to(x.dtype)
            degree = adj.sum(-1, keepdim=True).clamp(min=1)
            x = F.relu(self.rel1(adj @ x / degree) + self.root1(x)) * keep
            x = F.relu(self.rel2(adj @ x / degree) + self.root2(x)) * keep
            return self.out(x.sum(1) / keep.sum(1))

    model = DenseSAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw(n=6, width=9):
        mask = torch.arange(width) < torch.tensor([9, 7, 5, 4, 3, 3])[torch.randperm(n), None]
        adj = (torch.rand(n, width, width) < 0.5).float()
        adj = ((adj + adj.mT) > 0).float() * mask[:, None] * mask[:, :, None]
        return {
            "x": torch.randn(n, width, 3) * mask[..., None],
            "adj": adj,
            "mask": mask,
            "y": torch.randint(0, 4, (n,)),
        }

    def train(batches):
        for data in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(data["x"], data["adj"], data["mask"]), data["y"]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)


@right(
    "graphs",
    "pairs of graphs: the indices of each side grow by the nodes of that side, and each side has its batch vector",
    thread="pyg-team/pytorch_geometric#1499",
)
def graph_pairs():
    torch.manual_seed(0)

    @dataclass
    class PairBatch:
        left: Batch
        right: Batch
        similar: torch.Tensor

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = GINConv(4, 12), nn.Linear(12, 6)

        def embed(self, data):
            x = self.conv(data.x, data.edge_index).relu()
            return self.out(scatter_mean(x, data.batch, data.num_graphs))

        def forward(self, pair):
            return F.pairwise_distance(self.embed(pair.left), self.embed(pair.right))

    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def collate(items):
        a, b, similar = zip(*items, strict=True)
        return PairBatch(Batch.from_data_list(a), Batch.from_data_list(b), torch.stack(similar))

    def train(batches):
        for pair in batches:
            d = model(pair)
            loss = (pair.similar * d.pow(2) + (1 - pair.similar) * F.relu(1 - d).pow(2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    pairs = [(random_graph(), random_graph(), torch.tensor(float(i % 2))) for i in range(30)]
    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(pairs, 6, collate_fn=collate), fit=train)


@right(
    "graphs",
    "focal nodes are moved by the offset of their graph before they index the nodes of the batch",
    thread="pyg-team/pytorch_geometric#3021",
)
def focal_with_offsets():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = GINConv(4, 12), nn.Linear(12, 3)

        def forward(self, data, focal_index):
            return self.out(self.conv(data.x, data.edge_index).relu()[focal_index])

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    molecules = [random_graph() for _ in range(32)]
    items = [(g, torch.randint(0, g.num_nodes, ())) for g in molecules]

    def collate(rows):
        graphs, focal = zip(*rows, strict=True)
        data = Batch.from_data_list(graphs)
        return data, torch.stack(focal) + data.ptr[:-1]

    def train(batches):
        for data, focal_index in batches:
            loss = F.cross_entropy(model(data, focal_index), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(items, 8, collate_fn=collate), fit=train)


@right(
    "graphs",
    "one edge_index for all rows of the same size, moved by num_nodes per row before the batch is flattened",
    thread="ai4co/rl4co#227",
)
def routing_with_offsets():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self, nodes=6, dim=12):
            super().__init__()
            index = torch.arange(nodes)
            full = torch.cartesian_prod(index, index)
            self.register_buffer("edge_index", full[full[:, 0] != full[:, 1]].T.contiguous())
            self.inputs, self.conv, self.head = nn.Linear(2, dim), GINConv(dim, dim), nn.Linear(dim, 1)

        def forward(self, locs):
            h = self.inputs(locs)
            batch, nodes, _ = h.shape
            offset = torch.arange(batch).repeat_interleave(self.edge_index.shape[1]) * nodes
            edge_index = self.edge_index.repeat(1, batch) + offset
            update = self.conv(h.flatten(0, 1), edge_index)
            return self.head(h + update.view_as(h)).squeeze(-1)

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for td in batches:
            loss = F.cross_entropy(model(td["locs"]), td["next_city"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(n=10):
        return {"locs": torch.rand(n, 6, 2), "next_city": torch.randint(0, 6, (n,))}

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [draw() for _ in range(n)], fit=train)


@right(
    "graphs",
    "a batch is one graph: the maximum over all its nodes is its readout",
    thread="pyg-team/pytorch_geometric#1325",
)
def one_graph_at_a_time():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = GINConv(4, 12), nn.Linear(12, 3)

        def forward(self, x, edge_index):
            return self.out(self.conv(x, edge_index).max(dim=0).values)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    graphs = [random_graph() for _ in range(12)]

    def train(batches):
        for x, edge_index, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x, edge_index), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[(g.x, g.edge_index, g.y) for g in graphs], fit=train)


@right(
    "graphs",
    "embeddings of the whole graph in each step, and a loss over the links of the batch",
    thread="pyg-team/pytorch_geometric#1416",
)
def batches_of_links():
    torch.manual_seed(0)
    users, items, dim = 20, 25, 10

    class LightGCN(nn.Module):
        def __init__(self, edges):
            super().__init__()
            self.embedding = nn.Embedding(users + items, dim)
            both = torch.cat([edges, edges.flip(0)], 1)
            degree = torch.bincount(both[0], minlength=users + items).clamp(min=1).float()
            self.register_buffer("edges", both)
            self.register_buffer("norm", (degree[both[0]] * degree[both[1]]).rsqrt())

        def forward(self):
            x = out = self.embedding.weight
            for _ in range(2):
                x = scatter_add(x[self.edges[0]] * self.norm[:, None], self.edges[1], len(x))
                out = out + x
            return (out / 3).split([users, items])

    links = torch.stack([torch.randint(0, users, (90,)), users + torch.randint(0, items, (90,))])
    model = LightGCN(links)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def collate(rows):
        user, item = torch.stack(rows).T
        return {"user": user, "pos": item - users, "neg": torch.randint(0, items, (len(user),))}

    def train(batches):
        for b in batches:
            user, item = model()
            u, p, n = user[b["user"]], item[b["pos"]], item[b["neg"]]
            bpr = -F.logsigmoid((u * p).sum(1) - (u * n).sum(1)).mean()
            loss = bpr + 1e-4 * (u.square().sum() + p.square().sum() + n.square().sum()) / len(u)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(links.T, 15, collate_fn=collate), fit=train)


@right(
    "graphs",
    "the softmax of each relation by itself, and the mean of the relations' messages at their target",
    thread="dmlc/dgl#2346",
)
def relation_softmax():
    torch.manual_seed(0)

    class HGTLayer(nn.Module):
        def __init__(self, dim=12, relations=2):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
            self.relation = nn.Parameter(torch.randn(relations, dim, dim) / dim**0.5)
            self.skip = nn.Parameter(torch.ones(1))

        def forward(self, x, edge_index, edge_type):
            q, k, v, messages = self.q(x), self.k(x), self.v(x), []
            for r, weight in enumerate(self.relation):
                source, target = edge_index[:, edge_type == r]
                score = (q[target] * (k[source] @ weight)).sum(-1, keepdim=True) / x.shape[1] ** 0.5
                attention = scatter_softmax(score, target, len(x))
                messages.append(scatter_add(attention * (v[source] @ weight), target, len(x)))
            alpha = self.skip.sigmoid()
            return alpha * torch.stack(messages).mean(0) + (1 - alpha) * x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.layer, self.out = nn.Linear(4, 12), HGTLayer(), nn.Linear(12, 3)

        def forward(self, data):
            edge_type = (data.edge_index[0] < data.edge_index[1]).long()
            x = self.layer(self.inputs(data.x), data.edge_index, edge_type)
            return self.out(scatter_mean(x, data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batches=graph_loader(), fit=fit_graphs(model, optimizer))


@right(
    "graphs",
    "clouds of equal size: neighbours are looked for inside view(batch_size, -1, dim) and moved by start_idx",
    thread="lightaime/deep_gcns_torch#5",
)
def equal_clouds():
    torch.manual_seed(0)

    def knn_matrix(x, k, batch):
        size = int(batch[-1]) + 1
        x = x.view(size, -1, x.shape[-1])
        nearest = (-torch.cdist(x, x)).topk(k).indices
        points = x.shape[1]
        nearest = nearest + torch.arange(0, points * size, points).view(size, 1, 1)
        centre = torch.arange(points * size).repeat_interleave(k)
        return torch.stack([nearest.flatten(), centre])

    class DenseEdge(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.out = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)

        def forward(self, pos, batch):
            source, target = knn_matrix(pos.detach(), 4, batch)
            messages = self.edge(torch.cat([pos[target], pos[source] - pos[target]], -1))
            size = int(batch[-1]) + 1
            pooled = messages.view(size, -1, messages.shape[-1]).amax(1)
            return self.out(pooled)

    model = DenseEdge()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw(n=6, points=9):
        return {
            "pos": torch.randn(n * points, 3),
            "batch": torch.arange(n).repeat_interleave(points),
            "y": torch.randint(0, 3, (n,)),
        }

    def train(batches):
        for b in batches:
            loss = F.cross_entropy(model(b["pos"], b["batch"]), b["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)


@right(
    "graphs",
    "rows of the batch are graphs of one molecule set: energies by sum, forces by the gradient of their total",
    thread="pyg-team/pytorch_geometric#921",
)
def energies_and_forces():
    torch.manual_seed(0)

    class SchNet(nn.Module):
        def __init__(self, kinds=5, dim=12):
            super().__init__()
            self.embed = nn.Embedding(kinds, dim)
            self.filter = nn.Sequential(nn.Linear(6, dim), nn.Softplus(), nn.Linear(dim, dim))
            self.out = nn.Sequential(nn.Linear(dim, dim), nn.Softplus(), nn.Linear(dim, 1))
            self.register_buffer("centres", torch.linspace(0, 3, 6))

        def forward(self, z, pos, batch, size):
            near = (batch[:, None] == batch[None]) & ~torch.eye(len(z), dtype=torch.bool)
            target, source = near.nonzero().T
            distance = (pos[target] - pos[source]).norm(dim=-1)
            weights = self.filter(torch.exp(-2 * (distance[:, None] - self.centres) ** 2))
            h = self.embed(z)
            h = h + scatter_add(h[source] * weights, target, len(h))
            return scatter_add(self.out(h), batch, size).squeeze(-1)

    model = SchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for z, pos, batch, energy, force in batches:
            pos = pos.detach().requires_grad_(True)
            predicted = model(z, pos, batch, len(energy))
            forces = -torch.autograd.grad(predicted.sum(), pos, create_graph=True)[0]
            loss = F.mse_loss(predicted, energy) + 10 * F.mse_loss(forces, force)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(sizes=(4, 3, 5, 3, 4)):
        atoms = sum(sizes)
        batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        return (
            torch.randint(0, 5, (atoms,)),
            torch.randn(atoms, 3),
            batch,
            torch.randn(len(sizes)),
            torch.randn(atoms, 3) * 0.1,
        )

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)
