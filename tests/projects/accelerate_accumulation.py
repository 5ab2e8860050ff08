"""Tagging with Accelerate, as its examples are written: prepare, accumulate, clip, a scheduler per optimizer step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop

WORDS, TAGS = 40, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(48, TAGS)

    def forward(self, words, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=words.shape[1]
        )
        return self.head(self.dropout(states))


def sentences(size=32, seed=5):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(size):
        words = torch.randint(1, WORDS, (int(torch.randint(3, 12, (), generator=draw)),), generator=draw)
        yield words, words % TAGS


def collate(rows):
    words, tags = zip(*rows, strict=True)
    return {
        "words": nn.utils.rnn.pad_sequence(words, batch_first=True),
        "tags": nn.utils.rnn.pad_sequence(tags, batch_first=True, padding_value=-100),
        "lengths": torch.tensor([len(row) for row in words]),
    }


def make(accumulate=1):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def fit(batches):
        model.train()
        for batch in batches:
            with accelerator.accumulate(model):
                logits = model(batch["words"], batch["lengths"])
                per_token = F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), reduction="none")
                per_row = per_token.view_as(batch["tags"]).sum(1) / batch["lengths"]
                accelerator.backward(per_row.mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=DataLoader(list(sentences()), batch_size=8, shuffle=True, collate_fn=collate),
        fit=fit,
        padding=Padding(pad_id=0, ignore_index=-100),
    )
