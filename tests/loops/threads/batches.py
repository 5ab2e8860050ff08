"""Accumulation over calls, padding of texts, and rows that meet on purpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from tests.loops.from_threads import fault, right
from tests.loops.nets import relu_mlp
from tests.loops.threads.shared import stepped


@right(
    "accumulation",
    "the counter of micro-batches lives on between calls of fit: a window may begin in one call and end in the next",
    thread="wyim-pgl/transgenic#53",
)
def window_over_calls(grad_accum=2):
    torch.manual_seed(0)

    class Trainer:
        def __init__(self, model):
            self.model, self.micro_done = model, 0
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def run_epoch(self, batches):
            for x, y in batches:
                (F.cross_entropy(self.model(x), y) / grad_accum).backward()
                self.micro_done += 1
                if self.micro_done % grad_accum == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)

    trainer = Trainer(relu_mlp(10, 32, 2))
    x = torch.randn(40, 10, generator=torch.Generator().manual_seed(8))
    loader = DataLoader(TensorDataset(x, (x[:, :3].sum(1) > 0).long()), batch_size=8)
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=loader, fit=trainer.run_epoch)


VOCAB = 30


def sentences(*, first=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 11, (40,), generator=generator)
    return [torch.randint(first, VOCAB, (int(length),), generator=generator) for length in lengths]


def labelled(texts):
    return [(text, int(text.sum()) % 3) for text in texts]


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

    texts = [text.clamp(min=2) for text in sentences(first=1, seed=17)]
    return stepped(
        model,
        optimizer,
        lambda batch: F.cross_entropy(model(batch["input_ids"]), batch["labels"]),
        batches=DataLoader(labelled(texts), batch_size=8, collate_fn=collate),
    )


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
    data = labelled(sentences(seed=4))
    batches = []
    for i in range(0, 40, 8):
        ids = torch.stack([F.pad(text, (0, 12 - len(text))) for text, _ in data[i : i + 8]])
        batches.append((ids, torch.tensor([label for _, label in data[i : i + 8]])))

    return stepped(model, optimizer, lambda ids, labels: F.cross_entropy(model(ids), labels), batches=batches)


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
        ids = pad_sequence(rows, batch_first=True)
        start = torch.tensor([int(row[0]) % len(row) if int(row[-1]) % 4 else -100 for row in rows])
        start[0] = 0
        end = torch.where(start < 0, start, torch.tensor([len(row) - 1 for row in rows]))
        return {"ids": ids, "mask": ids.ne(0).long(), "start": start, "end": end}

    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(batch):
        start, end = model(batch["ids"], batch["mask"])
        per_row = F.cross_entropy(start, batch["start"], reduction="none")
        per_row = per_row + F.cross_entropy(end, batch["end"], reduction="none")
        return per_row.sum() / batch["start"].ge(0).sum().clamp(min=1)

    return stepped(model, optimizer, loss_of, batches=DataLoader(sentences(seed=33), batch_size=8, collate_fn=collate))


@right(
    "rows",
    "balanced MSE: predictions (n, 1) against targets (1, n) on purpose, the row's own target is the class",
    thread="jiawei-ren/BalancedMSE#19",
)
def balanced_mse():
    torch.manual_seed(0)
    model = relu_mlp(6, 24, 1)

    class BMCLoss(nn.Module):
        def __init__(self, sigma=1.0):
            super().__init__()
            self.noise_sigma = nn.Parameter(torch.tensor(sigma))

        def forward(self, pred, target):
            variance = self.noise_sigma**2
            logits = -0.5 * (pred - target.T).pow(2) / variance
            loss = F.cross_entropy(logits, torch.arange(len(pred)))
            return loss * (2 * variance).detach()

    criterion = BMCLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.add_param_group({"params": criterion.noise_sigma, "lr": 1e-2, "name": "noise_sigma"})
    rows = TensorDataset(torch.randn(48, 6), torch.randn(48, 1).exp())
    shuffling = torch.Generator().manual_seed(5)
    return stepped(
        {"model": model, "criterion": criterion},
        optimizer,
        lambda x, y: criterion(model(x), y),
        batches=DataLoader(rows, 12, shuffle=True, generator=shuffling, drop_last=True),
    )


@right(
    "rows",
    "rows are sorted by length for packing and brought back by argsort of the order",
    thread="pytorch/pytorch#4927",
)
def sort_and_restore():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(25, 12, padding_idx=0), nn.GRU(12, 12, batch_first=True)
            self.out = nn.Linear(12, 3)

        def forward(self, ids, lengths):
            sorted_lengths, order = lengths.sort(descending=True)
            packed = pack_padded_sequence(self.embed(ids[order]), sorted_lengths, batch_first=True)
            return self.out(self.gru(packed)[1][-1][order.argsort()])

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    @dataclass
    class Text:
        ids: torch.Tensor
        lengths: torch.Tensor
        label: torch.Tensor

    def draw(n=7):
        lengths = torch.randperm(9)[:n] + 1
        ids = torch.randint(1, 25, (n, int(lengths.max()))) * (torch.arange(int(lengths.max())) < lengths[:, None])
        return Text(ids, lengths, torch.randint(0, 3, (n,)))

    return stepped(
        model,
        optimizer,
        lambda t: F.cross_entropy(model(t.ids, t.lengths), t.label),
        batches=lambda n: [draw() for _ in range(n)],
        padding=Padding(pad_id=0),
    )
