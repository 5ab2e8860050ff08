"""Sentence embeddings as sentence-transformers trains them: mean pooling over tokens, in-batch negatives, a warm-up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop

WORDS, WIDTH = 60, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features):
        ids, mask = features["input_ids"], features["attention_mask"]
        states = self.encoder(self.embed(ids), src_key_padding_mask=mask == 0)
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class MultipleNegativesRankingLoss(nn.Module):
    """Each anchor's own positive against all positives of the batch; cosine similarities times a scale."""

    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model, self.scale, self.cross_entropy = model, scale, nn.CrossEntropyLoss()

    def forward(self, sentence_features):
        anchors, positives = (F.normalize(self.model(features), dim=-1) for features in sentence_features)
        scores = anchors @ positives.T * self.scale
        return self.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def padded(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def pairs(size, seed):
    """An anchor and its words in another order, with some left out."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (size,), generator=draw).tolist()
    anchors = [torch.randint(1, WORDS, (n,), generator=draw) for n in lengths]
    positives = [row[torch.randperm(len(row), generator=draw)[: len(row) - 1]] for row in anchors]
    return [padded(anchors), padded(positives)]


def make():
    model = Encoder()
    loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    def fit(batches):
        loss.train()
        for features in batches:
            value = loss(features)
            value.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=lambda n: [pairs(12, seed) for seed in range(n)],
        fit=fit,
        padding=Padding(pad_id=0),
    )
