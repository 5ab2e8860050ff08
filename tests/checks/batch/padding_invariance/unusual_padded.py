"""Padded rows: masks that are not needed, positions that are relative, and padding that is handled elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import tokens

PAD = 0
LENGTH = 10


def texts(rows=6, length=LENGTH, left=False):
    """Ids from 1 to 15, and 0 beyond lengths of 4 to 10."""
    lengths = torch.tensor([length - 2 * (n % 4) for n in range(rows)])
    place, ids = torch.arange(length), tokens(rows, length)
    mask = place >= length - lengths[:, None] if left else place < lengths[:, None]
    return {"ids": ids * mask, "mask": mask.long(), "lengths": lengths, "classes": ids[:, 0] % 3}


def trained(model, batch, loss_of, *, rate=1e-2, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, **fields)


def heads_of(x, heads=2):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Attention by hand: ``scores`` may change what is looked at."""

    def __init__(self, width=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def scores(self, q, k, mask):
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5

    def forward(self, x, mask=None):
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        mixed = self.scores(q, k, mask).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


def without_padding(scores, mask):
    """A padded query sees itself: looking at nothing would be NaN."""
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return scores.masked_fill(~(mask[:, None, None, :].bool() | itself), float("-inf"))


def causal(scores):
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, float("-inf"))


class Reader(nn.Module):
    """Tokens, one layer of attention, a score for each of 16 tokens or 3 classes."""

    def __init__(self, attention, outputs=16, position=None):
        super().__init__()
        self.embed, self.attention = nn.Embedding(16, 16), attention
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, outputs))
        self.position = position

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(x + self.attention(x, mask))


def next_token(model, batch):
    ids = batch["ids"]
    real = (batch["mask"][:, 1:] * batch["mask"][:, :-1]) == 1
    scores = model(ids, batch["mask"])[:, :-1].transpose(1, 2)
    return F.cross_entropy(scores, ids[:, 1:].masked_fill(~real, -100))


def some(batch, *keys):
    return {key: batch[key] for key in keys}


class Causal(Attention):
    def scores(self, q, k, mask):
        return causal(super().scores(q, k, mask))


@odd(notes="no padding mask in attention: under a causal one no token sees the padding behind it")
def causal_and_padded_on_the_right() -> TrainLoop:
    model = Reader(Causal(), position=nn.Embedding(LENGTH, 16))
    return trained(model, some(texts(), "ids", "mask"), next_token)


class Sloped(Attention):
    """Scores fall with the distance (ALiBi)."""

    def scores(self, q, k, mask):
        place = torch.arange(q.shape[-2], device=q.device)
        falls = (place[None] - place[:, None]) * torch.tensor([0.5, 0.25], device=q.device)[:, None, None]
        return causal(without_padding(super().scores(q, k, mask) + falls.to(q.dtype), mask))


@odd(notes="padded on the left, positions counted from the left edge: only distances matter (ALiBi)")
def distances_from_the_left_edge() -> TrainLoop:
    return trained(Reader(Sloped()), some(texts(left=True), "ids", "mask"), next_token)


class Rotated(Attention):
    """Queries and keys are turned by their positions (RoPE)."""

    def turned(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 0.3 ** torch.arange(half, device=x.device)
        sin, cos = angles.to(x.dtype).sin(), angles.to(x.dtype).cos()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def scores(self, q, k, mask):
        return causal(without_padding(super().scores(self.turned(q), self.turned(k), mask), mask))


@odd(notes="padded on the left, positions counted from the left edge: they only turn queries against keys (RoPE)")
def turned_by_positions_from_the_left_edge() -> TrainLoop:
    return trained(Reader(Rotated()), some(texts(left=True), "ids", "mask"), next_token)


@odd(
    notes="padded on the left: the last padded position predicts the first token, as it does in the generation library"
)
def first_token_from_padding() -> TrainLoop:
    class Masked(Attention):
        def scores(self, q, k, mask):
            return causal(without_padding(super().scores(q, k, mask), mask))

    def loss_of(model, batch):
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)[:, 1:]
        return F.cross_entropy(model(batch["ids"], batch["mask"])[:, :-1].transpose(1, 2), labels)

    return trained(Reader(Masked()), some(texts(left=True), "ids", "mask"), loss_of)


@odd(notes="the same with the smallest number added where nothing is seen: such a query looks at all alike")
def first_token_from_a_query_that_sees_nothing() -> TrainLoop:
    class Added(Attention):
        def scores(self, q, k, mask):
            found = super().scores(q, k, mask)
            seen = mask[:, None, None, :].bool() & torch.ones_like(found[:1, :1], dtype=torch.bool).tril()
            return torch.where(seen, found, torch.finfo(found.dtype).min)

    def loss_of(model, batch):
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)[:, 1:]
        return F.cross_entropy(model(batch["ids"], batch["mask"])[:, :-1].transpose(1, 2), labels)

    return trained(Reader(Added()), some(texts(left=True), "ids", "mask"), loss_of)


class LogLength(Attention):
    """The longer the batch, the sharper the scores."""

    def scores(self, q, k, mask):
        sharper = torch.log(torch.tensor(float(q.shape[-2]), device=q.device)).to(q.dtype) / 2
        return without_padding(super().scores(q, k, mask) * sharper, mask)


def classes_of(model, batch):
    kept = batch["mask"].unsqueeze(-1)
    scores = (model(batch["ids"], batch["mask"]) * kept).sum(1) / kept.sum(1)
    return F.cross_entropy(scores, batch["classes"])


@odd(notes="attention's temperature falls with the logarithm of the length, padding included")
def temperature_by_length() -> TrainLoop:
    return trained(Reader(LogLength(), outputs=3), some(texts(), "ids", "mask", "classes"), classes_of)


@odd(notes="the model of the batch pads it again, to a multiple of eight")
def padded_again_to_a_multiple_of_eight() -> TrainLoop:
    class Masked(Attention):
        def scores(self, q, k, mask):
            return without_padding(super().scores(q, k, mask), mask)

    def loss_of(model, batch):
        more = -batch["ids"].shape[1] % 8
        return classes_of(
            model, {**batch, "ids": F.pad(batch["ids"], (0, more)), "mask": F.pad(batch["mask"], (0, more))}
        )

    return trained(Reader(Masked(), outputs=3), some(texts(), "ids", "mask", "classes"), loss_of)


@odd(notes="each batch is sorted by length and cut to buckets before it is used")
def buckets_inside_the_loop() -> TrainLoop:
    def loss_of(model, batch):
        losses = []
        for length in batch["lengths"].unique().tolist():
            rows = batch["lengths"] == length
            scores = model(batch["ids"][rows, :length]).mean(1)
            losses.append(F.cross_entropy(scores, batch["classes"][rows], reduction="sum"))
        return sum(losses) / len(batch["ids"])

    return trained(Reader(Attention(), outputs=3), some(texts(), "ids", "lengths", "classes"), loss_of)


@odd(notes="the summed loss is divided by a constant: rows times the longest text that there can be")
def divided_by_the_longest_length() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch["ids"]).transpose(1, 2)
        tags = (batch["ids"] % 5).masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(scores, tags, reduction="sum") / (len(scores) * 16)

    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return trained(model, some(texts(), "ids", "mask"), loss_of)


@odd(notes="beside the masked loss a penalty on the scores is averaged over all positions")
def penalty_over_all_positions() -> TrainLoop:
    def loss_of(model, batch):
        scores = model(batch["ids"]).transpose(1, 2)
        tags = (batch["ids"] % 5).masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(scores, tags) + 1e-2 * scores.logsumexp(1).square().mean()

    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return trained(model, some(texts(), "ids", "mask"), loss_of)


@odd(notes="experts are balanced over all tokens of the batch, padding included, beside a masked loss")
def experts_balanced_over_all_tokens() -> TrainLoop:
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gate, self.head = nn.Embedding(16, 16), nn.Linear(16, 2), nn.Linear(16, 5)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, ids):
            x = self.embed(ids)
            weights = self.gate(x).softmax(-1)
            mixed = sum(weights[..., n, None] * expert(x).tanh() for n, expert in enumerate(self.experts))
            return self.head(mixed), weights.mean(dim=(0, 1))

    def loss_of(model, batch):
        scores, used = model(batch["ids"])
        tags = (batch["ids"] % 5).masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(scores.transpose(1, 2), tags) + 0.1 * used.square().sum()

    return trained(Gated(), some(texts(), "ids", "mask"), loss_of)


class Experts(nn.Module):
    """Each expert takes as many tokens as its capacity, first come first served; the rest pass by."""

    def __init__(self):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(16, 16), nn.Linear(16, 2), nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        weights = self.gate(x).softmax(-1)
        best, capacity = weights.argmax(-1), int(0.75 * len(x))
        out = x
        for number, expert in enumerate(self.experts):
            mine = (best == number).nonzero().flatten()[:capacity]
            out = out.index_add(0, mine, expert(x[mine]).tanh() * weights[mine, number, None])
        return self.head(out).view(*ids.shape, -1)


@odd(notes="the capacity of experts counts tokens, padding included, and padding takes places")
def experts_of_limited_capacity() -> TrainLoop:
    def loss_of(model, batch):
        tags = (batch["ids"] % 5).masked_fill(batch["mask"] == 0, -100)
        return F.cross_entropy(model(batch["ids"]).transpose(1, 2), tags)

    return trained(Experts(), some(texts(), "ids", "mask"), loss_of)


@odd(notes="two views of each text, pooled by its mask, are told from those of all others")
def contrast_of_pooled_sentences() -> TrainLoop:
    def loss_of(model, batch):
        kept = batch["mask"].unsqueeze(-1)
        vectors = F.normalize((model(batch["ids"]) * kept).sum(1) / kept.sum(1), dim=-1)
        others = F.normalize((model(batch["ids"].flip(1)) * kept.flip(1)).sum(1), dim=-1)
        return F.cross_entropy(vectors @ others.roll(1, 0).T * 5, torch.arange(len(vectors)).roll(-1))

    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    return trained(model, some(texts(), "ids", "mask"), loss_of)


@odd(notes="one negative is drawn for each position, padded ones included, so that draws depend on the length")
def negatives_for_each_position() -> TrainLoop:
    def loss_of(model, batch):
        x = model[0](batch["ids"])
        hidden, following = model[1](x[:, :-1]).tanh(), batch["ids"][:, 1:]
        negatives = torch.randint(1, 16, following.shape)
        real = batch["mask"][:, 1:] == 1
        gap = (hidden * (model[0](following) - model[0](negatives))).sum(-1)
        return -F.logsigmoid(gap)[real].mean()

    model = nn.ModuleList([nn.Embedding(16, 16), nn.Linear(16, 16)])
    return trained(model, some(texts(), "ids", "mask"), loss_of)


@odd(notes="a window of five positions is drawn from each batch: what is trained on depends on the length")
def windows_from_padded_rows() -> TrainLoop:
    def loss_of(model, batch):
        start = int(torch.rand(()) * (batch["ids"].shape[1] - 3))
        ids, mask = batch["ids"][:, start : start + 4], batch["mask"][:, start : start + 4]
        tags = (ids % 5).masked_fill(mask == 0, 0)
        each = F.cross_entropy(model(ids).transpose(1, 2), tags, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)

    model = nn.Sequential(nn.Embedding(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return trained(model, some(texts(), "ids", "mask"), loss_of)


@odd(notes="items of a history, padded on the left to one length: positions are counted so that the last is always 9")
def history_of_one_length() -> TrainLoop:
    class History(Reader):
        def __init__(self):
            super().__init__(Causal(), position=nn.Embedding(LENGTH, 16))
            self.embed = nn.Embedding(16, 16, padding_idx=PAD)

        def forward(self, ids):
            kept = (ids != PAD).unsqueeze(-1)
            x = (self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))) * kept
            return self.head(x + self.attention(x))

    def loss_of(model, batch):
        labels = batch["ids"][:, 1:].masked_fill(batch["ids"][:, :-1] == PAD, -100)
        return F.cross_entropy(model(batch["ids"])[:, :-1].transpose(1, 2), labels)

    return trained(History(), some(texts(left=True), "ids"), loss_of)


@odd(notes="source and target are padded to one length by chance, and each has a mask of its own")
def source_and_target_of_one_length() -> TrainLoop:
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16)
            self.cross = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, source, mask, target):
            memory, x = self.embed(source), self.embed(target)
            return self.head(x + self.cross(x, memory, memory, key_padding_mask=mask == 0)[0])

    def loss_of(model, batch):
        labels = (batch["target"] + 1).remainder(16).masked_fill(batch["target_mask"] == 0, -100)
        return F.cross_entropy(model(batch["ids"], batch["mask"], batch["target"]).transpose(1, 2), labels)

    source, target = texts(), texts()
    mask = target["mask"].roll(1, 0)
    both = {**some(source, "ids", "mask"), "target": tokens(6, LENGTH) * mask, "target_mask": mask}
    return trained(Translator(), both, loss_of)


@odd(notes="padding is also a token that is asked for, in texts of one length: declared, and real to the loss")
def end_of_text_once() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch["ids"]
        labels = ids[:, 1:].masked_fill((ids[:, 1:] == PAD) & (ids[:, :-1] == PAD), -100)
        return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), labels)

    return trained(Reader(Causal()), some(texts(), "ids"), loss_of, padding=Padding(pad_id=PAD))


@odd(notes="the configuration names the id of padding, the net sums all words, padding as zeros")
def bag_of_words_with_a_configured_padding_id() -> TrainLoop:
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(pad_token_id=PAD)
            self.embed, self.head = nn.Embedding(16, 16, padding_idx=PAD), nn.Linear(16, 3)

        def forward(self, ids):
            return self.head(self.embed(ids).sum(1).tanh())

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["ids"]), batch["classes"])

    return trained(Bag(), some(texts(), "ids", "classes"), loss_of)
