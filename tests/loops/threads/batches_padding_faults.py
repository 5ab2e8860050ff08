"""Faulty loops about padding: attention, pooling, losses, masks of two sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def sentences(n, vocab=30, low=3, high=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (n,), generator=generator)
    return [torch.randint(1, vocab, (int(length),), generator=generator) for length in lengths]


def labels_of(texts, classes):
    return [int(text.sum()) % classes for text in texts]


@fault(
    "padding",
    "pad_sequence fills with 0, the mask of the model compares with pad_token_id 1: every padded "
    "position counts as a token",
    thread="CarperAI/trlx#474",
    check="padding_invariance",
)
def roberta_classifier(pad_token_id=1):
    torch.manual_seed(0)

    class Roberta(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.words = nn.Embedding(30, dim, padding_idx=pad_token_id)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.classifier = nn.Linear(dim, 3)

        def forward(self, input_ids):
            mask = input_ids.ne(pad_token_id)
            hidden = self.layer(self.words(input_ids), src_key_padding_mask=~mask)
            return self.classifier((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    def collate(items):
        rows, labels = zip(*items, strict=True)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": pad_sequence(rows, batch_first=True), "length": lengths, "labels": torch.tensor(labels)}

    model = Roberta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            loss = F.cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    texts = [text.clamp(min=2) for text in sentences(40, seed=17)]
    loader = DataLoader(list(zip(texts, labels_of(texts, 3), strict=True)), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
