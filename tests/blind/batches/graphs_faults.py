"""Graphs of one batch that meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


@dataclass
class Data:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor


@dataclass
class Batch:
    x: torch.Tensor
    edge_index: torch.Tensor
    batch: torch.Tensor
    y: torch.Tensor

    @property
    def num_graphs(self):
        return len(self.y)


def random_graph(features=4, classes=3, low=3, high=7):
    nodes = int(torch.randint(low, high + 1, ()))
    ring = torch.arange(nodes)
    edges = torch.stack([ring, (ring + 1) % nodes])
    return Data(torch.randn(nodes, features), torch.cat([edges, edges.flip(0)], 1), torch.randint(0, classes, ()))


def collate(graphs):
    sizes = torch.tensor([len(g.x) for g in graphs])
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    return Batch(
        torch.cat([g.x for g in graphs]),
        torch.cat([g.edge_index + start for g, start in zip(graphs, starts, strict=True)], 1),
        torch.repeat_interleave(torch.arange(len(graphs)), sizes),
        torch.stack([g.y for g in graphs]),
    )


def scatter_add(x, index, size):
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def scatter_mean(x, index, size):
    count = torch.bincount(index, minlength=size).clamp(min=1)
    return scatter_add(x, index, size) / count.view(-1, *[1] * (x.dim() - 1))


class SAGEConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.own(x) + self.neighbours(scatter_mean(x[source], target, len(x)))


def fit_graphs(model, optimizer):
    def train(batches):
        model.train()
        for data in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), data.y)
            loss.backward()
            optimizer.step()

    return train


def fit_lists(model, optimizer):
    def train(batches):
        model.train()
        for graphs in batches:
            data = collate(graphs)
            loss = F.cross_entropy(model(data), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


@fault(
    "graphs",
    "edges are moved by the node count of the graph before, not by the sum of all before: num_nodes_list[i - 1]",
    thread="deepchem/deepchem#3291",
    check="batch_independence",
)
def batch_graph_data():
    torch.manual_seed(0)

    class BatchGraphData:
        def __init__(self, graphs):
            num_nodes_list = [len(g.x) for g in graphs]
            self.node_features = torch.cat([g.x for g in graphs])
            shifted = [g.edge_index + (num_nodes_list[i - 1] if i else 0) for i, g in enumerate(graphs)]
            self.edge_index = torch.cat(shifted, 1)
            self.graph_index = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(num_nodes_list))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.out = SAGEConv(4, 16), SAGEConv(16, 16), nn.Linear(16, 3)

        def forward(self, graphs):
            g = BatchGraphData(graphs)
            x = F.relu(self.conv1(g.node_features, g.edge_index))
            x = F.relu(self.conv2(x, g.edge_index))
            return self.out(scatter_mean(x, g.graph_index, len(graphs)))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = DataLoader([random_graph() for _ in range(40)], 8, collate_fn=list)

    def train(batches):
        for graphs in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(graphs), torch.stack([g.y for g in graphs])).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=train)


class RoutingEncoder(nn.Module):
    def __init__(self, nodes=6, dim=12):
        super().__init__()
        self.init_embedding = nn.Linear(2, dim)
        self.layers = nn.ModuleList(SAGEConv(dim, dim) for _ in range(2))
        index = torch.arange(nodes)
        full = torch.cartesian_prod(index, index)
        self.register_buffer("edge_index", full[full[:, 0] != full[:, 1]].T.contiguous())
        self.head = nn.Linear(dim, 1)

    def forward(self, locs):
        h = self.init_embedding(locs)
        batch, nodes, dim = h.shape
        update = h.reshape(-1, dim)
        for layer in self.layers:
            update = F.relu(layer(update, self.edge_index))
        return self.head(update.view(batch, nodes, dim) + h).squeeze(-1)


@fault(
    "graphs",
    "edge_index is that of one graph: on the flattened batch only the nodes of the first graph get messages",
    thread="ai4co/rl4co#227",
    check="batch_independence",
)
def routing():
    torch.manual_seed(0)
    model = RoutingEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for td in batches:
            scores = model(td["locs"])
            loss = F.cross_entropy(scores, td["next_city"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def draw(n=10):
        return {"locs": torch.rand(n, 6, 2), "next_city": torch.randint(0, 6, (n,))}

    return TrainLoop(model=model, optimizer=optimizer, batches=lambda n: [draw() for _ in range(n)], fit=train)


class GlobalAttnSumPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn_kernel = nn.Linear(dim, 1, bias=False)

    def forward(self, x, index, size):
        coefficients = self.attn_kernel(x).squeeze(-1).softmax(-1)
        return scatter_add(coefficients[:, None] * x, index, size)


@fault(
    "graphs",
    "softmax of the attention pool is over all nodes of the batch, not over those of each graph",
    thread="danielegrattarola/spektral#302",
    check="batch_independence",
)
def attention_pool():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool, self.out = SAGEConv(4, 16), GlobalAttnSumPool(16), nn.Linear(16, 3)

        def forward(self, data):
            x = F.relu(self.conv(data.x, data.edge_index))
            return self.out(self.pool(x, data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = DataLoader([random_graph() for _ in range(32)], 8, collate_fn=list)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_lists(model, optimizer))


class GraphormerHead(nn.Module):
    def __init__(self, inputs, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, dim) for _ in range(3))
        self.centrality = nn.Embedding(8, inputs)

    def forward(self, x, edge_index):
        degree = torch.bincount(edge_index[1], minlength=len(x)).clamp(max=7)
        x = x + self.centrality(degree)
        a = self.q(x) @ self.k(x).T / x.shape[-1] ** 0.5
        return a.softmax(dim=-1) @ self.v(x)


@fault(
    "graphs",
    "torch.softmax(a, dim=-1) attends from each node to the nodes of all graphs of the batch",
    thread="leffff/graphormer-pyg#14",
    check="batch_independence",
)
def graphormer():
    torch.manual_seed(0)

    class Graphormer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.out = GraphormerHead(4, 16), nn.Linear(16, 3)

        def forward(self, data):
            h = self.head(data.x, data.edge_index)
            return self.out(scatter_mean(h, data.batch, data.num_graphs))

    model = Graphormer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader([random_graph() for _ in range(30)], 6, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=data, fit=fit_graphs(model, optimizer), rows_interact=False
    )


class GATLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.projection = nn.Linear(inputs, outputs)
        self.a = nn.Parameter(torch.randn(2 * outputs) * 0.3)

    def forward(self, node_feats, adj_matrix):
        batch_size, num_nodes = node_feats.shape[:2]
        node_feats = self.projection(node_feats)
        edges = adj_matrix.nonzero()
        flat = node_feats.view(batch_size * num_nodes, -1)
        row = edges[:, 0] * batch_size + edges[:, 1]
        col = edges[:, 0] * batch_size + edges[:, 2]
        logits = F.leaky_relu(torch.cat([flat[row], flat[col]], -1) @ self.a, 0.2)
        scores = logits.new_full(adj_matrix.shape, -9e15)
        scores[adj_matrix == 1] = logits
        return torch.bmm(scores.softmax(-1), node_feats)


@fault(
    "graphs",
    "flat node indices step by batch_size per graph where they should step by num_nodes: nodes of other graphs",
    thread="phlippe/uvadlc_notebooks#5",
    check="batch_independence",
)
def tutorial_gat():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gat, self.out = GATLayer(3, 12), nn.Linear(12, 2)

        def forward(self, nodes, adjacency):
            return self.out(F.elu(self.gat(nodes, adjacency)).mean(1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        for nodes, adjacency, label in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(nodes, adjacency), label).backward()
            optimizer.step()

    def draw(n=4, nodes=7):
        adjacency = (torch.rand(n, nodes, nodes) < 0.3).float()
        adjacency = ((adjacency + adjacency.mT + torch.eye(nodes)) > 0).float()
        return torch.randn(n, nodes, 3), adjacency, torch.randint(0, 2, (n,))

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)


class InstanceNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x, batch=None):
        if batch is None:
            batch = x.new_zeros(len(x), dtype=torch.long)
        size = int(batch.max()) + 1
        out = x - scatter_mean(x, batch, size)[batch]
        variance = scatter_mean(out * out, batch, size)
        return out / (variance + self.eps).sqrt()[batch] * self.weight + self.bias


@fault(
    "graphs",
    "the instance norm is called without data.batch: its statistics are over the nodes of all graphs",
    thread="pyg-team/pytorch_geometric#9647",
    check="batch_independence",
)
def deep_gcn():
    torch.manual_seed(0)

    class DeepGCNLayer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm, self.conv = InstanceNorm(dim), SAGEConv(dim, dim)

        def forward(self, x, edge_index):
            return x + self.conv(F.relu(self.norm(x)), edge_index)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(4, 12)
            self.layers = nn.ModuleList(DeepGCNLayer(12) for _ in range(2))
            self.out = nn.Linear(12, 3)

        def forward(self, data):
            x = self.inputs(data.x)
            for layer in self.layers:
                x = layer(x, data.edge_index)
            return self.out(scatter_mean(x, data.batch, data.num_graphs))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = DataLoader([random_graph() for _ in range(35)], 7, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=data, fit=fit_graphs(model, optimizer), rows_interact=False
    )


def global_add_pool(x, batch=None, size=None):
    if batch is None:
        return x.sum(dim=0, keepdim=True)
    return scatter_add(x, batch, size)


@fault(
    "graphs",
    "global_add_pool(x) without batch sums the nodes of all graphs, and each graph's readout gets that sum",
    thread="pyg-team/pytorch_geometric#4809",
    check="batch_independence",
)
def context_readout():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.context = SAGEConv(4, 12), nn.Linear(12, 12)
            self.out = nn.Linear(24, 3)

        def forward(self, data):
            x = F.relu(self.conv(data.x, data.edge_index))
            local = scatter_mean(x, data.batch, data.num_graphs)
            context = torch.tanh(self.context(global_add_pool(x)))
            return self.out(torch.cat([local, context.expand_as(local)], dim=-1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = DataLoader([random_graph() for _ in range(36)], 9, collate_fn=list)
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit_lists(model, optimizer))


@fault(
    "graphs",
    "focal_nodes are concatenated without the offset of their graph: all of them point into the first graphs",
    thread="pyg-team/pytorch_geometric#3021",
    check="batch_independence",
)
def focal_atoms():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = SAGEConv(4, 16), nn.Linear(16, 3)

        def forward(self, batch, focal_nodes):
            return self.out(F.relu(self.conv(batch.x, batch.edge_index))[focal_nodes])

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def collate_molecules(items):
        graphs, focal = zip(*items, strict=True)
        return collate(graphs), torch.stack(focal)

    molecules = []
    for _ in range(32):
        graph = random_graph()
        molecules.append((graph, torch.randint(0, len(graph.x), ())))

    def train(batches):
        for batch, focal_nodes in batches:
            loss = F.cross_entropy(model(batch, focal_nodes), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(molecules, 8, collate_fn=collate_molecules), fit=train
    )


class EdgeAttention(nn.Module):
    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads).transpose(1, 2).reshape(b * self.heads, n, -1)

    def forward(self, nodes, mask):
        b, n, d = nodes.shape
        q, k, v = (self.split(t) for t in self.to_qkv(nodes).chunk(3, dim=-1))
        sim = q @ k.mT * q.shape[-1] ** -0.5
        mask = mask[:, None, :].repeat(self.heads, 1, 1)
        sim = sim.masked_fill(~mask, torch.finfo(sim.dtype).min)
        out = (sim.softmax(-1) @ v).view(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, d)
        return self.to_out(out)


@fault(
    "graphs",
    "mask.repeat(heads, 1, 1) is laid out (heads, batch) and sim (batch, heads): graphs get the masks of others",
    thread="lucidrains/graph-transformer-pytorch#2",
    check="batch_independence",
)
def graph_transformer():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention, self.out = nn.Linear(4, 12), EdgeAttention(), nn.Linear(12, 2)

        def forward(self, nodes, mask):
            x = self.embed(nodes)
            x = x + self.attention(x, mask)
            return self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def draw(n=5, width=8):
        sizes = torch.randint(2, width + 1, (n,))
        sizes[0] = width
        mask = torch.arange(width) < sizes[:, None]
        return {
            "nodes": torch.randn(n, width, 4) * mask[..., None],
            "mask": mask,
            "label": torch.randint(0, 2, (n,)),
        }

    def train(batches):
        for b in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(b["nodes"], b["mask"]), b["label"]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)


class DenseNet(nn.Module):
    def __init__(self, features=3, dim=14, classes=4):
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(features, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x, adj, mask=None):
        degree = adj.sum(-1, keepdim=True).clamp(min=1)
        x = F.relu(self.conv1(adj @ x / degree + x))
        x = F.relu(self.conv2(adj @ x / degree + x))
        if mask is not None:
            x = x * mask[..., None]
        return self.out(x.mean(dim=1))


@fault(
    "graphs",
    "the dense model is called without data['mask']: padded nodes get biases and are in the mean of the readout",
    thread="pyg-team/pytorch_geometric#881",
    check="padding_invariance",
)
def dense_enzymes():
    torch.manual_seed(0)
    model = DenseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw(n=6, width=9):
        sizes = torch.tensor([9, 7, 5, 4, 3, 3])[torch.randperm(n)]
        mask = torch.arange(width) < sizes[:, None]
        adj = (torch.rand(n, width, width) < 0.5).float()
        adj = ((adj + adj.mT) > 0).float() * mask[:, None] * mask[:, :, None]
        x = torch.randn(n, width, 3) * mask[..., None]
        return {"x": x, "adj": adj, "mask": mask, "y": torch.randint(0, 4, (n,))}

    def train(batches):
        model.train()
        for data in batches:
            optimizer.zero_grad()
            output = model(data["x"], data["adj"])
            F.cross_entropy(output, data["y"]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=[draw() for _ in range(4)], fit=train)


def knn_graph(positions, k):
    distances = torch.cdist(positions, positions)
    distances.fill_diagonal_(float("inf"))
    nearest = distances.topk(k, largest=False).indices
    target = torch.arange(len(positions)).repeat_interleave(k)
    return torch.stack([nearest.flatten(), target])


@fault(
    "graphs",
    "knn_graph(x) is taken over the hits of all events of the batch: edges join hits of different events",
    thread="graphnet-team/graphnet#236",
    check="batch_independence",
)
def dynamic_edges():
    torch.manual_seed(0)

    class DynEdge(nn.Module):
        def __init__(self, k=3):
            super().__init__()
            self.k = k
            self.conv1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.conv2 = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
            self.out = nn.Linear(16, 1)

        def edge_conv(self, net, x):
            source, target = knn_graph(x.detach()[:, :3], self.k)
            messages = net(torch.cat([x[target], x[source] - x[target]], -1))
            return scatter_mean(messages, target, len(x))

        def forward(self, data):
            x = self.edge_conv(self.conv1, data.x)
            x = self.edge_conv(self.conv2, x)
            return self.out(scatter_mean(x, data.batch, data.num_graphs)).squeeze(-1)

    model = DynEdge()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    events = []
    for _ in range(32):
        graph = random_graph(low=5, high=8)
        graph.y = torch.randn(())
        events.append(graph)

    def train(batches):
        for data in batches:
            optimizer.zero_grad()
            F.huber_loss(model(data), data.y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(events, 8, collate_fn=collate), fit=train)


@fault(
    "graphs",
    "x.split(bincount(batch)) takes nodes for sorted by graph, and batch is interleaved: sums over nodes of others",
    thread="pyg-team/pytorch_geometric#10254",
    check="batch_independence",
)
def point_sets():
    torch.manual_seed(0)

    class PointSets(nn.Module):
        def __init__(self):
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))
            self.rho = nn.Linear(12, 2)

        def forward(self, x, batch):
            parts = self.phi(x).split(torch.bincount(batch).tolist())
            return self.rho(torch.stack([part.sum(0) for part in parts]))

    model = PointSets()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def collate_points(sets):
        points, labels = zip(*sets, strict=True)
        most = max(len(p) for p in points)
        x = [p[i] for i in range(most) for p in points if i < len(p)]
        batch = [j for i in range(most) for j, p in enumerate(points) if i < len(p)]
        return torch.stack(x), torch.tensor(batch), torch.tensor(labels)

    def train(batches):
        for x, batch, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x, batch), labels).backward()
            optimizer.step()

    sets = [(torch.randn(3 + i % 4, 3), i % 2) for i in range(30)]
    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(sets, 6, collate_fn=collate_points), fit=train
    )
