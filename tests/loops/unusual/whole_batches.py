"""Batches of which no part is a batch: a whole graph, time first, hidden states of one size, pairs."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Data:
    """Several graphs in one, as PyG collates them: nodes, edges, and the graph of each node."""

    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    @property
    def num_graphs(self):
        return int(self.batch.max()) + 1

    def to(self, *args):
        return Data(*(t.to(*args) for t in (self.x, self.edge_index, self.batch, self.y)))


def _molecules(graphs=8, seed=0):
    sizes = torch.randint(3, 7, (graphs,), generator=_generator(seed)).tolist()
    x, edges, batch, first = [], [], [], 0
    for number, size in enumerate(sizes):
        x.append(torch.randn(size, 5, generator=_generator(seed + 10 * number)) + (number % 2))
        ring = torch.stack([torch.arange(size), torch.arange(size).roll(1)])
        edges.append(torch.cat([ring, ring.flip(0)], dim=1) + first)
        batch.append(torch.full((size,), number))
        first += size
    return Data(torch.cat(x), torch.cat(edges, dim=1), torch.cat(batch), torch.arange(graphs) % 2)


class GraphClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.lin = nn.Linear(10, 16), nn.Linear(32, 16), nn.Linear(16, 2)

    def _conv(self, layer, x, edge_index):
        source, target = edge_index
        gathered = torch.zeros_like(x).index_add(0, target, x[source])
        return layer(torch.cat([x, gathered], dim=1)).relu()

    def forward(self, x, edge_index, batch):
        x = self._conv(self.conv1, x, edge_index)
        x = self._conv(self.conv2, x, edge_index)
        graphs = int(batch.max()) + 1
        pooled = x.new_zeros(graphs, x.shape[1]).index_add(0, batch, x)
        count = x.new_zeros(graphs).index_add(0, batch, torch.ones_like(x[:, 0]))
        return self.lin(pooled / count[:, None])


@odd(notes="a Data object: nodes, edges and graphs are three numbers of rows, and none of them can be cut alone")
def graphs_in_one_data_object(accumulate=1):
    model = GraphClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model, data):
        return F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)

    def fit(batches):
        optimizer.zero_grad()
        for i, data in enumerate(batches, start=1):
            (loss(model, data) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=_molecules(),
        batches=[_molecules(seed=n) for n in range(6)],
        fit=fit,
        loss=loss,
    )


class DGLGraph:
    """A graph object that shows its tensors by methods and dictionaries."""

    def __init__(self, source, target, nodes):
        self._source, self._target, self._nodes = source, target, nodes
        self.ndata, self.edata = {}, {}

    def num_nodes(self):
        return self._nodes

    def edges(self):
        return self._source, self._target

    def in_degrees(self):
        return torch.bincount(self._target, minlength=self._nodes)


def _social(nodes=24):
    graph = DGLGraph(torch.randint(0, nodes, (72,), generator=_generator(3)), torch.arange(72) % nodes, nodes)
    graph.ndata["label"] = torch.arange(nodes) % 3
    graph.ndata["feat"] = F.one_hot(graph.ndata["label"], 6) + torch.randn(nodes, 6, generator=_generator(4))
    graph.ndata["train_mask"] = torch.arange(nodes) % 4 != 0
    return graph


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(12, 16), nn.Linear(32, 3)

    def _conv(self, layer, graph, h):
        source, target = graph.edges()
        total = h.new_zeros(graph.num_nodes(), h.shape[1]).index_add(0, target, h[source])
        return layer(torch.cat([h, total / graph.in_degrees().clamp(min=1)[:, None]], dim=1))

    def forward(self, graph, h):
        return self._conv(self.layer2, graph, self._conv(self.layer1, graph, h).relu())


@odd(notes="a graph object: features and labels have a row for each node, and its edges name nodes by their number")
def dgl_graph_object():
    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model, graph):
        assert len(graph.ndata["feat"]) == graph.num_nodes(), "expect number of features to match number of nodes"
        mask = graph.ndata["train_mask"]
        return F.cross_entropy(model(graph, graph.ndata["feat"])[mask], graph.ndata["label"][mask])

    def fit(batches):
        for graph in batches:
            value = loss(model, graph)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=_social(), fit=fit, loss=loss)


def _phrases(length=12, rows=6, vocab=16):
    start = torch.arange(rows)
    ids = (start + torch.arange(length + 1)[:, None] * (1 + start % 3)) % vocab
    return ids[:-1].contiguous(), ids[1:].contiguous()


class RNNModel(nn.Module):
    """The language model of PyTorch's examples."""

    def __init__(self, vocab=16, hidden=24):
        super().__init__()
        self.encoder = nn.Embedding(vocab, hidden)
        self.rnn = nn.LSTM(hidden, hidden)
        self.decoder = nn.Linear(hidden, vocab)
        self.hidden = hidden

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, self.decoder.out_features), dim=1), hidden

    def init_hidden(self, rows):
        weight = next(self.parameters())
        return weight.new_zeros(1, rows, self.hidden), weight.new_zeros(1, rows, self.hidden)


@odd(notes="time first: (12, 6) ids, of which the axis of examples is the second")
def time_first_lstm():
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(model, batch):
        data, targets = batch
        output, _ = model(data, model.init_hidden(data.shape[1]))
        return F.nll_loss(output, targets.reshape(-1))

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=_phrases(), fit=fit, loss=loss)


@odd(notes="time first, and the loop accumulates: half the rows along the first axis is half of the time")
def time_first_lstm_that_accumulates(accumulate=1):
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fit(batches):
        optimizer.zero_grad()
        for i, (data, targets) in enumerate(batches, start=1):
            output, _ = model(data, model.init_hidden(data.shape[1]))
            (F.nll_loss(output, targets.reshape(-1)) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=_phrases(), fit=fit)


@odd(notes="a hidden state that is sized to the batch and carried from one batch to the next: no other size fits")
def stateful_lstm_of_one_batch_size():
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = [model.init_hidden(6)]

    def step(batch):
        data, targets = batch
        state[0] = tuple(h.detach() for h in state[0])
        optimizer.zero_grad()
        output, state[0] = model(data, state[0])
        F.nll_loss(output, targets.reshape(-1)).backward()
        optimizer.step()

    def loss(model, batch):
        output, _ = model(batch[0], model.init_hidden(6))
        return F.nll_loss(output, batch[1].reshape(-1))

    return TrainLoop(model=model, optimizer=optimizer, batch=_phrases(), step=step, loss=loss)


class Translator(nn.Module):
    def __init__(self, vocab=16, width=16):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, 1, width))
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=False)
        self.generator = nn.Linear(width, vocab)

    def forward(self, src, tgt, tgt_mask):
        src = self.source(src) + self.position[: len(src)]
        tgt = self.target(tgt) + self.position[: len(tgt)]
        return self.generator(self.transformer(src, tgt, tgt_mask=tgt_mask))


@odd(notes="nn.Transformer with time first, and a mask of time by time in the batch")
def transformer_with_time_first():
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)

    def batch():
        src, following = _phrases(length=10)
        tgt = torch.cat([torch.zeros(1, 6, dtype=torch.long), following[:-1]])
        return {
            "src": src,
            "tgt_input": tgt,
            "tgt_output": following,
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(10),
        }

    def loss(model, batch):
        logits = model(batch["src"], batch["tgt_input"], batch["tgt_mask"])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["tgt_output"].reshape(-1))

    def fit(batches):
        model.train()
        for batch in batches:
            value = loss(model, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch(), fit=fit, loss=loss)


class Recognizer(nn.Module):
    def __init__(self, features=6, hidden=16, symbols=5):
        super().__init__()
        self.rnn = nn.GRU(features, hidden)
        self.out = nn.Linear(hidden, symbols)

    def forward(self, frames):
        return self.out(self.rnn(frames)[0]).log_softmax(-1)


@odd(notes="CTC as torch has it: frames and log-probabilities with time first, targets and lengths with examples first")
def ctc_with_time_first():
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ctc = nn.CTCLoss(blank=0)

    def loss(model, batch):
        frames, targets, frame_lengths, target_lengths = batch
        return ctc(model(frames), targets, frame_lengths, target_lengths)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    frames = torch.randn(14, 4, 6, generator=_generator(5))
    targets = torch.randint(1, 5, (4, 4), generator=_generator(6))
    batch = (frames, targets, torch.tensor([14, 13, 11, 9]), torch.tensor([4, 4, 3, 2]))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, loss=loss)


@odd(notes="CTC over targets that are concatenated: 13 symbols, 4 examples, 14 frames")
def ctc_over_concatenated_targets(accumulate=1):
    model = Recognizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ctc = nn.CTCLoss(blank=0)

    def fit(batches):
        optimizer.zero_grad()
        for i, (frames, targets, frame_lengths, target_lengths) in enumerate(batches, start=1):
            (ctc(model(frames), targets, frame_lengths, target_lengths) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    frames = torch.randn(14, 4, 6, generator=_generator(5))
    lengths = torch.tensor([4, 4, 3, 2])
    batch = (frames, torch.randint(1, 5, (13,), generator=_generator(6)), torch.tensor([14, 13, 11, 9]), lengths)
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


@odd(notes="packed sequences: steps that belong to the first, second, ... position of all examples stand in one list")
def packed_sequences():
    model = nn.ModuleDict({"rnn": nn.LSTM(3, 12), "out": nn.Linear(12, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model, batch):
        packed, labels = batch
        _, (h, _) = model["rnn"](packed)
        return F.cross_entropy(model["out"](h[-1]), labels)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    texts = [torch.randn(n, 3, generator=_generator(n)) + n % 2 for n in (7, 6, 5, 4, 3, 2)]
    labels = torch.tensor([n % 2 for n in (7, 6, 5, 4, 3, 2)])
    batch = (nn.utils.rnn.pack_sequence(texts), labels)
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, loss=loss)


@odd(notes="the loop asserts the batch size of its settings: its loader drops a smaller batch")
def asserted_batch_size(accumulate=1):
    rows = 12
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        x, y = batch
        if x.shape[0] != rows:
            raise ValueError(f"expected a batch of {rows}, got {x.shape[0]}")
        return F.cross_entropy(model(x), y)

    def fit(batches):
        optimizer.zero_grad()
        for i, batch in enumerate(batches, start=1):
            (loss(model, batch) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    y = torch.arange(rows) % 3
    x = F.one_hot(y, 6) + torch.randn(rows, 6, generator=_generator(7))
    return TrainLoop(model=model, optimizer=optimizer, batch=(x, y), fit=fit, loss=loss)


@odd(notes="two views of each picture one after the other: the loss asserts that the number of rows is even")
def contrastive_with_even_rows(accumulate=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(model, views):
        assert len(views) % 2 == 0, "NT-Xent needs pairs of views"
        assert len(views) >= 6, "NT-Xent needs other pairs to compare with"
        z = F.normalize(model(views), dim=1)
        similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(similarity, torch.arange(len(z)) ^ 1)

    def fit(batches):
        optimizer.zero_grad()
        for i, views in enumerate(batches, start=1):
            (loss(model, views) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    pictures = torch.randn(6, 1, 8, generator=_generator(8))
    views = (pictures + 0.1 * torch.randn(6, 2, 8, generator=_generator(9))).reshape(12, 8)
    return TrainLoop(model=model, optimizer=optimizer, batch=views, fit=fit, loss=loss)


class Intensity(nn.Module):
    """A Hawkes-like process: the rate after each event, from the time since the one before."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 8, batch_first=True)
        self.rate = nn.Linear(8, 1)

    def forward(self, times):
        gaps = torch.diff(times, prepend=times.new_zeros(1))
        hidden, _ = self.rnn(gaps[None, :, None])
        return F.softplus(self.rate(hidden))[0, :, 0], gaps


@odd(notes="lists of events of different lengths, one tensor for each; their log-likelihood is summed event by event")
def point_process_over_ragged_lists():
    model = Intensity()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model, batch):
        times, total = batch["times"], batch["events"]
        if sum(map(len, times)) != total:
            raise RuntimeError(f"{total} events expected, {sum(map(len, times))} given")
        value = torch.zeros(())
        for events in times:
            rate, gaps = model(events)
            value = value - (rate[:-1].log() - rate[:-1] * gaps[1:]).sum()
        return value / total

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    times = [torch.rand(n, generator=_generator(n)).cumsum(0) for n in (5, 8, 3, 6)]
    return TrainLoop(model=model, optimizer=optimizer, batch={"times": times, "events": 22}, fit=fit, loss=loss)


def _frames(seed=0, length=12, rows=6):
    labels = torch.randint(0, 3, (length, rows), generator=_generator(seed))
    noise = torch.randn(length, rows, 5, generator=_generator(seed + 1))
    return F.one_hot(labels, 5) + 0.5 * noise, labels


def _per_frame(reduced, accumulate):
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def fit(batches):
        optimizer.zero_grad()
        for i, (frames, labels) in enumerate(batches, start=1):
            (reduced(model(frames), labels) / accumulate).backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=_frames(), fit=fit)


@odd(notes="time first: a sum over frames, a mean over examples; cut along the time it looks divided twice")
def frames_summed_over_time(accumulate=1):
    def reduced(scores, labels):
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / labels.shape[1]

    return _per_frame(reduced, accumulate)


@odd(notes="time first: the mean over examples of a sum over frames, and a penalty that is a mean over both")
def frames_summed_beside_a_mean(accumulate=1):
    def reduced(scores, labels):
        each = F.cross_entropy(scores.permute(0, 2, 1), labels, reduction="none")
        return each.sum(0).mean() + 0.1 * scores.square().mean()

    return _per_frame(reduced, accumulate)
