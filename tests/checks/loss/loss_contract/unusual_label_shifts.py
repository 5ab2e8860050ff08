"""Labels that look shifted, or are not, of loops that mean it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import GPT, CharLSTM
from tests.loops.odd import odd
from tests.loops.random_data import fresh, tokens


def loop(model, draw, loss_of, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=draw(), batches=fresh(draw), fit=fit, **fields)


def scored(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def words(rows=6, length=10, vocab=16):
    return torch.randint(1, vocab, (rows, length))


@odd(notes="an echo: the label is the input one step before, and a blank at first")
def echo_of_the_input() -> TrainLoop:
    def draw():
        ids = words()
        return ids, torch.cat([torch.zeros(6, 1, dtype=torch.long), ids[:, :-1]], 1)

    return loop(CharLSTM(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="the same label everywhere: whether a text is loaded says nothing yet of positions")
def one_label_at_each_position() -> TrainLoop:
    return loop(CharLSTM(), words, lambda m, ids: scored(m(ids), ids[:, :1].expand_as(ids)))


@odd(notes="a masked language model sees both sides: its labels are the inputs that were replaced")
def masked_words_with_frozen_embeddings() -> TrainLoop:
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(17, 24).requires_grad_(False)
            self.lstm = nn.LSTM(24, 12, batch_first=True, bidirectional=True)
            self.head = nn.Linear(24, 17)

        def forward(self, ids):
            return self.head(self.lstm(self.embed(ids))[0])

    def draw():
        ids = tokens(length=12)
        chosen = torch.rand(ids.shape) < 0.3
        chosen[:, 0] = True
        return ids.masked_fill(chosen, 16), ids.masked_fill(~chosen, -100)

    return loop(Encoder(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="an autoencoder of words sees them all: frozen embeddings, labels that are the inputs")
def autoencoder_of_words() -> TrainLoop:
    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(17, 24).requires_grad_(False)
            self.lstm = nn.LSTM(24, 24, batch_first=True)
            self.back = nn.LSTM(24, 24, batch_first=True)
            self.head = nn.Linear(24, 17)

        def forward(self, ids):
            _, (code, _) = self.lstm(self.embed(ids))
            return self.head(self.back(code[0][:, None].expand(-1, ids.shape[1], -1))[0])

    return loop(Code(), tokens, lambda m, ids: scored(m(ids), ids))


@odd(notes="denoising by a model that sees no later input: labels are the inputs before the noise")
def causal_denoising() -> TrainLoop:
    def draw():
        clean = tokens(length=12)
        noisy = torch.where(torch.rand(clean.shape) < 0.2, torch.randint(1, 16, clean.shape), clean)
        return noisy, clean

    return loop(GPT(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="two heads: the next token, and the one after that, whose labels come with the batch")
def two_tokens_ahead_by_a_second_head() -> TrainLoop:
    class TwoHeads(GPT):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(self.head.in_features, self.head.out_features)

        def forward(self, ids):
            x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)), self.second(self.norm(x))

    def draw():
        ids = tokens(length=12)
        return {"ids": ids[:, :10], "next": ids[:, 1:11].contiguous(), "after": ids[:, 2:].contiguous()}

    def loss_of(model, batch):
        following, after = model(batch["ids"])
        return scored(following, batch["next"]) + 0.3 * scored(after, batch["after"])

    return loop(TwoHeads(), draw, loss_of)


@odd(notes="a prefix is seen from both sides, the rest from the left; only the rest is labelled, by the next token")
def answers_behind_a_prefix_seen_from_both_sides() -> TrainLoop:
    class Prefix(GPT):
        def forward(self, ids):
            length = ids.shape[1]
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            seen[:, :5] = True
            x = self.token(ids) + self.position(torch.arange(length))
            for block in self.blocks:
                given = block.norm1(x)
                rows, _, width = given.shape
                parts = block.qkv(given).view(rows, length, 3, block.heads, width // block.heads)
                q, k, v = parts.permute(2, 0, 3, 1, 4)
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
                x = x + block.proj(mixed.transpose(1, 2).reshape(rows, length, width))
                x = x + block.mlp(block.norm2(x))
            return self.head(self.norm(x))

    def draw():
        ids = tokens(length=13)
        labels = ids[:, 1:].clone()
        labels[:, :4] = -100
        return ids[:, :-1], labels

    return loop(Prefix(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="tags that depend on the token two ahead in part: whether it is a stop")
def tags_of_later_tokens() -> TrainLoop:
    def draw():
        ids = words(length=12, vocab=6)
        return ids[:, :10], (ids[:, 2:] == 1).long()

    return loop(CharLSTM(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="long runs of equal bytes: most labels are also the id two positions ahead")
def runs_of_equal_bytes() -> TrainLoop:
    def draw():
        ids = words(rows=6, length=4).repeat_interleave(4, 1)[:, :13]
        return ids[:, :-1], ids[:, 1:].contiguous()

    return loop(CharLSTM(), draw, lambda m, b: scored(m(b[0]), b[1]))


@odd(notes="rows padded on the left, prompts masked, few labels: the next token at each")
def left_padded_answers() -> TrainLoop:
    class Padded(GPT):
        def forward(self, ids, mask):
            length = ids.shape[1]
            x = self.token(ids) + self.position((mask.cumsum(1) - 1).clamp_min(0))
            seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, None].bool()
            seen = seen | torch.eye(length, dtype=torch.bool)
            for block in self.blocks:
                given = block.norm1(x)
                rows, _, width = given.shape
                parts = block.qkv(given).view(rows, length, 3, block.heads, width // block.heads)
                q, k, v = parts.permute(2, 0, 3, 1, 4)
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
                x = x + block.proj(mixed.transpose(1, 2).reshape(rows, length, width))
                x = x + block.mlp(block.norm2(x))
            return self.head(self.norm(x))

    def draw():
        ids, labels = tokens(rows=4, length=12), torch.full((4, 12), -100)
        for row in range(4):
            ids[row, :row] = 0
            labels[row, 9:] = ids[row, 9:]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    def loss_of(model, batch):
        scores = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())

    return loop(Padded(), draw, loss_of)


@odd(notes="spans are replaced by sentinels, and the decoder says sentinels and spans")
def span_corruption() -> TrainLoop:
    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 24)
            self.encoder = nn.GRU(24, 24, batch_first=True)
            self.decoder = nn.GRU(24, 24, batch_first=True)
            self.head = nn.Linear(24, 20)

        def forward(self, ids, labels):
            before = F.pad(labels, (1, 0))[:, :-1].clamp_min(0)
            _, state = self.encoder(self.embed(ids))
            return scored(self.head(self.decoder(self.embed(before), state)[0]), labels)

    def draw():
        ids = tokens(length=8)
        first, last = torch.full((6, 1), 17), torch.full((6, 1), 18)
        corrupted = torch.cat([ids[:, :2], first, ids[:, 5:]], 1)
        return corrupted, torch.cat([first, ids[:, 2:5], last, torch.full((6, 1), -100)], 1)

    return loop(Encoded(), draw, lambda m, b: m(*b))
