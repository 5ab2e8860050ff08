"""Labels that look shifted, or are not, of loops that mean it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import plain
from tests.loops.nets import GPT, CharLSTM
from tests.loops.odd import odd
from tests.loops.random_data import fresh, tokens


def loop(model, draw, loss_of, **fields) -> TrainLoop:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return plain.loop(model, draw(), loss_of, optimizer, batches=fresh(draw), **fields)


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
