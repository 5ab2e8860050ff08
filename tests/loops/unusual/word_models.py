"""Word models: tables of which a batch uses few rows, masks and negatives that are drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import fresh, tokens


def train_returned_loss(model, optimizer, batches):
    for ids in batches:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


class RareWords(nn.Module):
    def __init__(self, vocabulary=40, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(width, vocabulary, cutoffs=[10, 25], div_value=2.0)

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten()).loss


def common_words():
    return tokens(vocabulary=10)


@odd(
    notes="the clusters of rare words take no part in a batch without rare words: their layers never run "
    "(adaptive softmax)"
)
def adaptive_softmax_without_rare_words() -> TrainLoop:
    model = RareWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=common_words(),
        fit=lambda batches: train_returned_loss(model, optimizer, batches),
    )


class SkipGram(nn.Module):
    """word2vec: two tables, only some rows of each take part; max_norm rescales rows in place during forward."""

    def __init__(self, vocabulary=16, width=8):
        super().__init__()
        self.center = nn.Embedding(vocabulary, width, max_norm=1.0)
        self.context = nn.Embedding(vocabulary, width, sparse=True)

    def forward(self, words, near, far):
        h = self.center(words)
        positive = (h * self.context(near)).sum(1)
        negative = torch.einsum("nw,nkw->nk", h, self.context(far))
        return -(F.logsigmoid(positive) + F.logsigmoid(-negative).sum(1)).mean()


def train_skipgram(model, optimizers, batches):
    for ids in batches:
        words, near = ids[:, :-1].flatten(), ids[:, 1:].flatten()
        far = torch.randint(16, (len(words), 3))
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(words, near, far).backward()
        for optimizer in optimizers:
            optimizer.step()


@odd(
    notes="a parameter is changed in place by the forward pass itself, another has sparse gradients; "
    "negatives are drawn (word2vec)"
)
def skipgram_with_sparse_gradients() -> TrainLoop:
    model = SkipGram()
    optimizers = [
        torch.optim.Adagrad(model.center.parameters(), lr=0.2),
        torch.optim.SparseAdam(model.context.parameters(), lr=2e-2),
    ]
    return TrainLoop(
        model=model,
        optimizer=optimizers,
        batch=tokens(),
        batches=fresh(tokens),
        fit=lambda batches: train_skipgram(model, optimizers, batches),
    )


class MaskedLM(nn.Module):
    def __init__(self, vocabulary=16, width=12):
        super().__init__()
        self.embed, self.mask = nn.Embedding(vocabulary + 1, width), vocabulary
        self.position = nn.Embedding(8, width)
        self.mix = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.out(self.mix(self.embed(ids) + self.position.weight[: ids.size(1)]))


def train_masked_lm(model, optimizer, batches, share=0.15):
    model.train()
    for ids in batches:
        hidden = torch.rand(ids.shape) < share
        if not hidden.any():
            continue
        logits = model(ids.masked_fill(hidden, model.mask))
        optimizer.zero_grad()
        F.cross_entropy(logits[hidden], ids[hidden]).backward()
        optimizer.step()


@odd(
    notes="only masked positions count, a batch without any is passed over openly; "
    "dropout and masks are drawn anew (BERT)"
)
def masked_language_model() -> TrainLoop:
    model = MaskedLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=tokens(),
        batches=fresh(tokens),
        fit=lambda batches: train_masked_lm(model, optimizer, batches),
    )
