"""Right loops about padding that look odd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right

VOCAB = 30


def sentences(n=40, low=3, high=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (n,), generator=generator)
    return [torch.randint(3, VOCAB, (int(length),), generator=generator) for length in lengths]


def labelled(classes, **keywords):
    return [(text, int(text.sum()) % classes) for text in sentences(**keywords)]


def pad(rows, value=0):
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


@right(
    "padding",
    "a Kim CNN whose convolutions see zero vectors of padding_idx at the end, of sentences padded to one fixed width",
    thread="https://escholarship.org/uc/item/7bc9c7jp",
)
def text_cnn():
    torch.manual_seed(0)

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
            self.convs = nn.ModuleList(nn.Conv1d(16, 8, size) for size in (2, 3, 4))
            self.fc = nn.Linear(24, 3)

        def forward(self, ids):
            x = self.embed(ids).transpose(1, 2)
            return self.fc(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1))

    model = TextCNN()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    data = labelled(3, seed=4)
    batches = []
    for i in range(0, 40, 8):
        ids = torch.stack([F.pad(text, (0, 12 - len(text))) for text, _ in data[i : i + 8]])
        batches.append((ids, torch.tensor([label for _, label in data[i : i + 8]])))

    def fit(batches):
        for ids, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


@right(
    "padding",
    "start and end of an answer are a softmax over positions, with padded ones set to -inf; rows without "
    "an answer are ignored",
    thread="InseeFrLab/torchTextClassifiers#96",
)
def span_extraction():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.span = nn.Linear(dim, 2, bias=False)

        def forward(self, ids, mask):
            x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
            hidden = self.layer(x, src_key_padding_mask=mask.eq(0))
            scores = self.span(hidden).masked_fill(mask.unsqueeze(-1).eq(0), float("-inf"))
            return scores.unbind(-1)

    def collate(rows):
        ids = pad(rows)
        start = torch.tensor([int(row[0]) % len(row) if int(row[-1]) % 4 else -100 for row in rows])
        start[0] = 0
        end = torch.where(start < 0, start, torch.tensor([len(row) - 1 for row in rows]))
        return {"ids": ids, "mask": ids.ne(0).long(), "start": start, "end": end}

    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            start, end = model(batch["ids"], batch["mask"])
            per_row = F.cross_entropy(start, batch["start"], reduction="none")
            per_row = per_row + F.cross_entropy(end, batch["end"], reduction="none")
            loss = per_row.sum() / batch["start"].ge(0).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(sentences(seed=33), batch_size=8, collate_fn=collate),
        fit=fit,
    )
