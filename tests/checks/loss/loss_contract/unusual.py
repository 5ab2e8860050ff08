"""Losses whose arguments look wrong: odds, cosines, masks, counts, shifts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops import plain
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, fresh, images, points, tokens


def loop(model, draw, loss_of, rate=1e-2, several=True, **fields) -> TrainLoop:
    fields |= {"batches": fresh(draw)} if several else {}
    return plain.loop(model, draw(), loss_of, torch.optim.Adam(model.parameters(), lr=rate), **fields)


@odd(notes="nll_loss of the scores, beside a log-sum-exp that normalises them: cross entropy with a z-loss")
def cross_entropy_in_two_parts() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch[0])
        whole = scores.logsumexp(1)
        return F.nll_loss(scores, batch[1]) + whole.mean() + 1e-4 * whole.square().mean()

    return loop(relu_mlp(8, 24, 4), points, loss_of)


@odd(notes="complementary labels: nll_loss of log(1 - p), whose rows are no distribution")
def negative_learning() -> TrainLoop:
    def loss_of(model, batch):
        others = (batch[1] + 1) % 4
        return F.nll_loss(torch.log(1 - model(batch[0]).softmax(1) + 1e-6), others)

    return loop(relu_mlp(8, 24, 4), points, loss_of)


@odd(notes="log-probabilities of five classes, of which the last is cut off before nll_loss: rows sum to less than 1")
def no_object_class_cut_off() -> TrainLoop:
    return loop(relu_mlp(8, 24, 5), points, lambda m, b: F.nll_loss(m(b[0]).log_softmax(1)[:, :4], b[1]))


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1), nn.ReLU())

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.net(x), 1).flatten(1)


@odd(notes="ReLU, then a mean over places, then cross_entropy: SqueezeNet and Network in Network")
def relu_before_the_pooling() -> TrainLoop:
    return loop(Squeezed(), images, lambda m, b: F.cross_entropy(8 * m(b[0]), b[1]))


@odd(notes="scores capped by 30 tanh(s / 30) and by 15 sigmoid(s / 4): ranges wide enough to tell classes")
def soft_caps() -> TrainLoop:
    model = nn.ModuleList([relu_mlp(8, 24, 4), relu_mlp(8, 24, 4)])

    def loss_of(model, batch):
        one, other = model[0](batch[0]), model[1](batch[0])
        capped = F.cross_entropy(30 * torch.tanh(one / 30), batch[1])
        return capped + F.cross_entropy(15 * torch.sigmoid(other / 4), batch[1])

    return loop(model, points, loss_of)


class Cosines(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = relu_mlp(8, 24, 8)
        self.prototypes = nn.Parameter(torch.randn(4, 8))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1) @ F.normalize(self.prototypes, dim=1).T


@odd(notes="cosines times a learned scale, and times 16 with a margin taken off the right class")
def cosines_times_a_scale() -> TrainLoop:
    def loss_of(model, batch):
        cosines = model(batch[0])
        margin = cosines - 0.2 * F.one_hot(batch[1], 4)
        return F.cross_entropy(cosines * model.log_scale.exp(), batch[1]) + F.cross_entropy(16 * margin, batch[1])

    return loop(Cosines(), points, loss_of)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.span = nn.Linear(32, 2)

    def forward(self, ids):
        return self.span(self.rnn(self.embed(ids))[0]).unbind(-1)


@odd(notes="a span's start and end: the classes are the positions, each score from another one")
def span_in_a_text() -> TrainLoop:
    def loss_of(model, ids):
        start, end = model(ids)
        return F.cross_entropy(start, ids[:, 0] % 8) + F.cross_entropy(end, ids[:, 1] % 8)

    return loop(Reader(), lambda: tokens(length=8), loss_of)


@odd(notes="word counts as targets of cross_entropy: the likelihood of a multinomial, rows weigh by their length")
def counts_as_targets() -> TrainLoop:
    def draw():
        counts = torch.poisson(torch.rand(8, 12) * 3)
        return counts + (torch.arange(12) == 0)

    return loop(relu_mlp(12, 24, 12), draw, lambda m, x: F.cross_entropy(m(x / x.sum(1, keepdim=True)), x) / 10)


@odd(notes="one-hot targets times an advantage, some of them negative")
def advantages_on_one_hot_targets() -> TrainLoop:
    def draw():
        x, y = points()
        return x, F.one_hot(y, 4) * (0.5 + torch.randn(8, 1).tanh())

    return loop(relu_mlp(8, 24, 4), draw, lambda m, b: F.cross_entropy(m(b[0]), b[1]), rate=1e-3)


@odd(notes="the three best of a teacher's probabilities are kept: they sum to less than 1")
def best_of_the_teacher() -> TrainLoop:
    teacher = relu_mlp(8, 16, 6)

    def loss_of(model, batch):
        with torch.no_grad():
            shares = teacher(batch[0]).softmax(1)
            kept = torch.where(shares >= shares.topk(3).values[:, -1:], shares, 0.0)
        return F.cross_entropy(model(batch[0]), kept)

    return loop(relu_mlp(8, 24, 6), points, loss_of)


@odd(notes="missing labels are -1 and taken out after reduction='none'; others by a weight of 0")
def missing_labels_masked() -> TrainLoop:
    def draw():
        x, y = points(rows=16)
        hot = F.one_hot(y, 4).to(x.dtype)
        return x, torch.where(torch.rand(16, 4) < 0.3, -1.0, hot)

    def loss_of(model, batch):
        scores, labels = model(batch[0]), batch[1]
        kept = (labels >= 0).to(scores.dtype)
        each = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        weighted = F.binary_cross_entropy_with_logits(scores, labels, weight=kept, reduction="sum")
        return (each * kept).sum() / kept.sum() + weighted / kept.sum()

    return loop(relu_mlp(8, 24, 4), draw, loss_of)


@odd(notes="a hard sigmoid, clamp(0.2 s + 0.5, 0, 1), is a probability to binary_cross_entropy")
def hard_sigmoid() -> TrainLoop:
    def loss_of(model, batch):
        p = (0.2 * model(batch[0]) + 0.5).clamp(1e-4, 1 - 1e-4)
        return F.binary_cross_entropy(p, F.one_hot(batch[1], 4).to(p.dtype))

    return loop(relu_mlp(8, 24, 4), points, loss_of)


@odd(notes="labels smoothed beyond 1 for what is real, and towards 0 for what is not")
def smoothed_beyond_one() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch[0])
        hot = F.one_hot(batch[1], 4).to(scores.dtype)
        return F.binary_cross_entropy_with_logits(scores, 0.1 + (0.6 + 0.45 * torch.rand_like(hot)) * hot)

    return loop(relu_mlp(8, 24, 4), points, loss_of, rate=1e-3)


@odd(notes="every score against every other, (N, 1) - (N,): the pairs are what is ranked")
def pairs_of_scores() -> TrainLoop:
    def loss_of(model, batch):
        scores, values = model(batch[0]), batch[1].squeeze(1)
        apart = scores - scores.squeeze(1)
        return F.softplus(-apart * (values[:, None] - values[None]).sign()).mean()

    return loop(relu_mlp(8, 24, 1), curves, loss_of)


@odd(notes="one target for all rows, (N, D) against (D,), as in one-class learning")
def one_target_for_all() -> TrainLoop:
    centre = torch.linspace(-1, 1, 4)

    def loss_of(model, batch):
        return (model(batch[0]) - centre).square().sum(1).mean()

    return loop(relu_mlp(8, 24, 4), points, loss_of)


class GPT(nn.Module):
    def __init__(self, heads=1, shift=False):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(17, 16), nn.GRU(16, 16, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(16, 17) for _ in range(heads))
        self.shift = shift

    def forward(self, ids):
        x = self.embed(ids)
        if self.shift:
            x = F.pad(x, (0, 0, 1, -1))
        hidden = self.rnn(x)[0]
        return [head(hidden) for head in self.heads]


@odd(notes="three heads for the next three tokens")
def several_tokens_ahead() -> TrainLoop:
    def loss_of(model, ids):
        parts = [F.cross_entropy(s[:, :-k].transpose(1, 2), ids[:, k:]) for k, s in enumerate(model(ids), start=1)]
        return torch.stack(parts).mean()

    return loop(GPT(heads=3), lambda: tokens(length=10), loss_of)


@odd(notes="the embeddings are shifted right inside the model: the labels are the inputs")
def shifted_inside() -> TrainLoop:
    return loop(
        GPT(shift=True), lambda: tokens(length=10), lambda m, ids: F.cross_entropy(m(ids)[0].transpose(1, 2), ids)
    )


def padded():
    ids = tokens(length=10)
    lengths = torch.tensor([10 - n % 4 for n in range(6)])
    return {"ids": torch.where(torch.arange(10)[None] < lengths[:, None], ids, 0), "lengths": lengths}


@odd(notes="the padding is also the end of a text: its first occurrence is to be predicted, the rest ignored")
def end_is_padding() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch["ids"]
        labels = ids[:, 1:].masked_fill((ids[:, 1:] == 0) & (ids[:, :-1] == 0), -100)
        return F.cross_entropy(model(ids)[0][:, :-1].transpose(1, 2), labels)

    return loop(GPT(), padded, loss_of, padding=Padding(pad_id=0))


@odd(notes="CTC: labels are padded by the blank beyond their lengths, and a row too long is left out by zero_infinity")
def ctc_with_one_row_too_long() -> TrainLoop:
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 6))

    def draw():
        labels = torch.randint(1, 6, (6, 3))
        lengths = torch.tensor([3, 3, 2, 3, 2, 3])
        labels = torch.where(torch.arange(3)[None] < lengths[:, None], labels, 0)
        frames = torch.eye(6)[labels, :4].repeat_interleave(3, 1) + 0.1 * torch.randn(6, 9, 4)
        return frames, labels, torch.tensor([9, 9, 9, 9, 9, 2]), lengths

    def loss_of(model, batch):
        logp = model(batch[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, *batch[1:], zero_infinity=True)

    return loop(model, draw, loss_of)


@odd(notes="CTC reads lines of text that are padded with white to one width, as at test time: no width is given")
def ctc_of_images_of_one_width() -> TrainLoop:
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 6))

    def draw():
        labels = torch.randint(1, 6, (6, 2))
        lines = torch.eye(6)[labels, :4].repeat_interleave(4, 1)
        white = torch.arange(14) >= torch.tensor([8, 8, 6, 8, 6, 8])[:, None]
        return torch.cat([lines, torch.zeros(6, 6, 4)], 1).masked_fill(white[..., None], 0.0), labels

    def loss_of(model, batch):
        logp = model(batch[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logp, batch[1], torch.full((6,), 14), torch.full((6,), 2))

    return loop(model, draw, loss_of)


@odd(notes="a discriminator's loss turned round for the generator, as in the first GAN paper")
def saturating_generator() -> TrainLoop:
    generator, critic = relu_mlp(4, 16, 2), relu_mlp(2, 16, 1)
    first, second = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (generator, critic))
    score = F.binary_cross_entropy_with_logits

    def train(batches):
        for real in batches:
            fake = generator(torch.randn(len(real), 4))
            second.zero_grad()
            real_score, fake_score = critic(real), critic(fake.detach())
            (
                score(real_score, torch.ones_like(real_score)) + score(fake_score, torch.zeros_like(fake_score))
            ).backward()
            second.step()
            first.zero_grad()
            given = critic(fake)
            (-score(given, torch.zeros_like(given))).backward()
            first.step()

    def draw():
        return torch.randn(16, 2) * 0.3 + 1

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[first, second],
        batch=draw(),
        batches=fresh(draw),
        fit=train,
    )


@odd(notes="losses that are computed for the log only: on probabilities, with history, and never backpropagated")
def losses_for_the_log() -> TrainLoop:
    seen = []

    def loss_of(model, batch):
        scores = model(batch[0])
        seen.append(F.nll_loss(scores.softmax(1), batch[1]).item())
        with torch.no_grad():
            seen.append(F.cross_entropy(scores.softmax(1), batch[1]).item())
        return F.cross_entropy(scores, batch[1])

    return loop(relu_mlp(8, 24, 4), points, loss_of)


@odd(notes="listwise ranking: one softmax over the documents of a query, which lie on axis 0")
def softmax_over_documents() -> TrainLoop:
    def draw():
        documents = torch.randn(10, 6)
        return documents, (documents[:, :1] * 2).softmax(0)

    return loop(relu_mlp(6, 24, 1), draw, lambda m, b: F.kl_div(m(b[0]).log_softmax(0), b[1], reduction="sum"))


@odd(notes="kl_div whose probabilities sum to 1 over the whole matrix, and the reverse of it")
def similarities_as_one_distribution() -> TrainLoop:
    def loss_of(model, batch):
        near = 1 / (1 + torch.cdist(model(batch[0]), model(batch[0])).square())
        near = near.masked_fill(torch.eye(8, dtype=torch.bool), 0.0)
        aim = (batch[1][:, None] == batch[1][None]).to(near.dtype) + 0.1
        q, p = near / near.sum(), aim / aim.sum()
        return F.kl_div((q + 1e-9).log(), p, reduction="sum")

    return loop(relu_mlp(8, 24, 2), points, loss_of)


class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(16, 16), nn.GRU(16, 16, batch_first=True)
        self.query = nn.Linear(16, 16)

    def forward(self, ids):
        hidden = self.rnn(self.embed(ids))[0]
        weights = (hidden @ self.query(hidden[:, -1]).unsqueeze(-1)).squeeze(-1).softmax(1)
        return torch.bmm(weights.unsqueeze(1), F.one_hot(ids, 16).to(weights.dtype)).squeeze(1)


@odd(notes="probabilities mixed by a product (a copy mechanism), clamped into (0, 1) before their logarithm")
def copied_tokens() -> TrainLoop:
    def loss_of(model, ids):
        chances = model(ids).clamp(1e-6, 1.0)
        return -chances.log().gather(1, ids[:, 2:3]).mean()

    return loop(Copying(), lambda: tokens(length=8), loss_of)
