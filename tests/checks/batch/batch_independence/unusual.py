"""Rows that are to meet, axes in another order, and positions that may be seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count, *shape, seed=0):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def loop(model, batch, loss_of, rate=5e-3, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)


def classified(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


class Wired(nn.Module):
    """Some layers, and a function of them and the input."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, *inputs):
        return self.function(self.layers, *inputs)


@odd(notes="a discriminator is told how far the batch spreads")
def minibatch_spread_beside_each_row():
    def forward(m, x):
        hidden = torch.tanh(m["body"](x))
        centred = hidden - hidden.mean(0)
        spread = (centred.square().mean(0) + 1e-8).sqrt().mean().expand(len(x), 1)
        return m["head"](torch.cat([hidden, spread], 1))

    return loop(Wired(forward, body=nn.Linear(6, 8), head=nn.Linear(9, 4)), (drawn(8, 6), classes(4, 8)), classified)


@odd(notes="rows are one set: each attends to all others")
def attention_between_rows():
    def forward(m, x):
        hidden = m["body"](x)
        mixed, _ = m["attend"](hidden[None], hidden[None], hidden[None])
        return m["head"](hidden + mixed[0])

    layers = {"body": nn.Linear(6, 8), "attend": nn.MultiheadAttention(8, 2, batch_first=True), "head": nn.Linear(8, 4)}
    return loop(Wired(forward, **layers), (drawn(8, 6), classes(4, 8)), classified)


@odd(notes="rows are nodes; PairNorm centres them and messages pass between them")
def graph_with_pair_norm():
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])

    def forward(m, x, edges):
        hidden = m["body"](x)
        hidden = hidden - hidden.mean(0)
        hidden = hidden / (hidden.square().sum(1).mean() + 1e-6).sqrt()
        gathered = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        return m["head"](torch.relu(hidden + gathered))

    model = Wired(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 3))
    batch = {"x": drawn(8, 6), "edges": edges, "y": classes(3, 8)}
    return loop(model, batch, lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["y"]))


@odd(notes="rows are the points of one cloud; a global maximum is given to each")
def point_cloud_segmentation():
    def forward(m, points):
        scaled = points / points.norm(dim=1).max()
        each = torch.relu(m["body"](scaled))
        return m["head"](torch.cat([each, each.max(0).values.expand_as(each)], 1))

    model = Wired(forward, body=nn.Linear(3, 12), head=nn.Linear(24, 4))
    return loop(model, (drawn(14, 3), classes(4, 14)), classified)


@odd(notes="queries are told apart by the support rows of the same batch")
def prototypes_from_the_batch():
    def forward(m, support, labels, query):
        hidden = m["body"](support)
        prototypes = torch.stack([hidden[labels == c].mean(0) for c in range(3)])
        return -torch.cdist(m["body"](query), prototypes)

    model = Wired(forward, body=relu_mlp(6, 12, 8))
    batch = {"support": drawn(9, 6), "labels": torch.arange(9) % 3, "query": drawn(9, 6, seed=1)}
    return loop(model, batch, lambda m, b: F.cross_entropy(m(b["support"], b["labels"], b["query"]), b["labels"]))


@odd(notes="rows are the documents of one query: a softmax over all of them")
def listwise_ranking():
    model = Wired(lambda m, x: F.log_softmax(m["body"](x).squeeze(1), 0), body=relu_mlp(6, 12, 1))
    batch = (drawn(10, 6), F.softmax(drawn(10, seed=2), 0))
    return loop(model, batch, lambda m, b: -(b[1] * m(b[0])).sum())


@odd(notes="batch statistics in evaluation, too, by a flag that says so")
def batch_norm_without_running_statistics():
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12, track_running_stats=False), nn.ReLU(), nn.Linear(12, 4))
    return loop(model, (drawn(8, 6), classes(4, 8)), classified)


class OwnBatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            with torch.no_grad():
                self.mean.lerp_(mean.detach(), 0.1)
                self.var.lerp_(var.detach(), 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


@odd(notes="a batch norm by hand, with running statistics for evaluation")
def batch_norm_by_hand():
    model = nn.Sequential(nn.Linear(6, 12), OwnBatchNorm(12), nn.ReLU(), nn.Linear(12, 4))
    return loop(model, (drawn(8, 6), classes(4, 8)), classified)


@odd(notes="positions are the first axis, rows the second, as nn.LSTM has it by default")
def time_first_tagger():
    model = Wired(lambda m, x: m["head"](m["rnn"](x)[0]), rnn=nn.LSTM(4, 8), head=nn.Linear(8, 3))

    def loss_of(m, batch):
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten())

    return loop(model, (drawn(9, 5, 4), classes(3, 9, 5)), loss_of)


@odd(notes="the same with one label for each row, taken off the last step")
def time_first_classifier():
    model = Wired(lambda m, x: m["head"](m["rnn"](x)[0][-1]), rnn=nn.GRU(4, 8), head=nn.Linear(8, 3))
    return loop(model, (drawn(9, 5, 4), classes(3, 5)), classified)


@odd(notes="one long unbatched series: an LSTM walks over what looks like rows")
def one_unbatched_series():
    model = Wired(lambda m, x: m["head"](m["rnn"](x)[0]), rnn=nn.LSTM(4, 8), head=nn.Linear(8, 3))
    return loop(model, (drawn(15, 4), classes(3, 15)), classified)


@odd(notes="a model of the world: the target of each row is the next row")
def next_row_as_target():
    model = relu_mlp(5, 16, 5)
    return loop(model, (drawn(12, 5),), lambda m, b: F.mse_loss(m(b[0][:-1]), b[0][1:]))


@odd(notes="rows and labels are shuffled alike before the model")
def rows_and_labels_shuffled_alike():
    def loss_of(m, batch):
        order = torch.randperm(len(batch[0]))
        return F.cross_entropy(m(batch[0][order]), batch[1][order])

    return loop(relu_mlp(6, 16, 4), (drawn(9, 6), classes(4, 9)), loss_of)


@odd(notes="each row's negative is the next row, a constant number of rows on")
def negatives_by_rolling_the_rows():
    def loss_of(m, batch):
        x, y = batch
        near = (m(x) - m(x.roll(1, 0))).square().sum(1)
        return F.relu(1 + (m(x) - y).square().sum(1) - near).mean()

    return loop(relu_mlp(6, 16, 4), (drawn(9, 6), drawn(9, 4, seed=3)), loss_of)


@odd(notes="rows are sorted by length inside, and put back")
def sorted_by_length_and_restored():
    def forward(m, x, lengths):
        order = lengths.argsort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x[order], lengths[order], batch_first=True)
        return m["head"](m["rnn"](packed)[1][-1][order.argsort()])

    model = Wired(forward, rnn=nn.GRU(4, 8, batch_first=True), head=nn.Linear(8, 3))
    batch = {"x": drawn(6, 7, 4), "lengths": torch.tensor([3, 7, 5, 2, 6, 4]), "y": classes(3, 6)}
    return loop(model, batch, lambda m, b: F.cross_entropy(m(b["x"], b["lengths"]), b["y"]))


class Block(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, allowed):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))


class Language(nn.Module):
    """``allowed(length)`` says which keys each query may see."""

    def __init__(self, allowed, vocabulary=17, width=12):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.block, self.head, self.allowed = Block(width), nn.Linear(width, vocabulary), allowed

    def forward(self, ids):
        length = ids.shape[1]
        x = self.embed(ids) + self.position(torch.arange(length))
        return self.head(self.block(x, self.allowed(length)))


def earlier(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


@odd(notes="a prefix sees all of itself; its own tokens are no targets")
def prefix_language_model():
    def allowed(length):
        mask = earlier(length)
        mask[:4, :4] = True
        return mask

    def loss_of(m, ids):
        targets = ids[:, 1:].clone()
        targets[:, :4] = -100
        return F.cross_entropy(m(ids[:, :-1]).transpose(1, 2), targets)

    return loop(Language(allowed), classes(17, 5, 12), loss_of)


@odd(notes="the token before is told, from those after it")
def language_model_from_the_end():
    def loss_of(m, ids):
        return F.cross_entropy(m(ids[:, 1:]).transpose(1, 2), ids[:, :-1])

    return loop(Language(lambda length: earlier(length).T), classes(17, 5, 12), loss_of)


@odd(notes="a masked language model sees later tokens, and is asked for hidden ones")
def masked_language_model_by_hand():
    ids = classes(16, 5, 12)
    hidden = classes(4, 5, 12, seed=4) == 0

    def loss_of(m, batch):
        ids, hidden = batch
        scores = m(ids.masked_fill(hidden, 16))
        return F.cross_entropy(scores.transpose(1, 2), ids.masked_fill(~hidden, -100))

    return loop(Language(lambda length: None), (ids, hidden), loss_of)


@odd(notes="a long convolution by Fourier transforms, zeros behind: causal up to rounding")
def causal_convolution_by_fourier_transform():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
            self.kernel = nn.Parameter(0.3 * torch.randn(12, 8))

        def forward(self, ids):
            x, size = self.embed(ids), 2 * ids.shape[1]
            kernel = self.kernel[: ids.shape[1]]
            y = torch.fft.irfft(torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(kernel, n=size, dim=0), n=size, dim=1)
            return self.head(x + y[:, : ids.shape[1]])

    def loss_of(m, ids):
        return F.cross_entropy(m(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    return loop(Net(), classes(17, 5, 13), loss_of)


@odd(notes="two heads tell the next token and the one after it")
def two_tokens_at_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(17, 12), nn.GRU(12, 12, batch_first=True)
            self.heads = nn.ModuleList(nn.Linear(12, 17) for _ in range(2))

        def forward(self, ids):
            hidden, _ = self.rnn(self.embed(ids))
            return [head(hidden) for head in self.heads]

    def loss_of(m, ids):
        one, two = m(ids[:, :-2])
        return F.cross_entropy(one.transpose(1, 2), ids[:, 1:-1]) + F.cross_entropy(two.transpose(1, 2), ids[:, 2:])

    return loop(Net(), classes(17, 5, 14), loss_of)


@odd(notes="the network's input is fixed noise; the batch is only what it is to draw")
def image_prior():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("noise", drawn(6, 8, seed=5))
            self.body = relu_mlp(8, 16, 10)

        def forward(self):
            return self.body(self.noise)

    return loop(Net(), (drawn(6, 10),), lambda m, b: F.mse_loss(m(), b[0]))


@odd(notes="a row of the batch is an index beside its features, which only a log reads")
def identifiers_in_the_batch():
    seen = []

    def loss_of(m, batch):
        seen.append(batch["id"].sum())
        return F.cross_entropy(m(batch["x"]), batch["y"])

    return loop(relu_mlp(6, 16, 4), {"id": torch.arange(9), "x": drawn(9, 6), "y": classes(4, 9)}, loss_of)


@odd(notes="a network behind the decoder smooths what was told; it is compared with the answer as well")
def smoothed_after_the_decoder():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 12, batch_first=True), nn.Linear(12, 4)
            self.smooth = nn.Conv1d(4, 4, 5, padding=2)

        def forward(self, frames):
            told = self.out(self.rnn(frames)[0])
            return told, told + self.smooth(told.transpose(1, 2)).transpose(1, 2)

    def loss_of(m, frames):
        told, smoothed = m(frames[:, :-1])
        return F.mse_loss(told, frames[:, 1:]) + F.mse_loss(smoothed, frames[:, 1:])

    return loop(Net(), drawn(5, 11, 4), loss_of)


@odd(notes="the loop makes its own data, and only counts its batches")
def a_batch_that_only_counts():
    def loss_of(m, _batch):
        x = torch.randn(16, 3)
        return F.mse_loss(m(x), x.square().sum(1, keepdim=True))

    return loop(relu_mlp(3, 16, 1), torch.arange(8.0), loss_of)
