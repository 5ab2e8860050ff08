"""Rows without labels, rows of length one, and a padding id that the table does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.checks.batch.edge_batches.faults_rows import CHECK, Trainer, epochs
from tests.loops import data
from tests.loops.nets import GPT
from tests.loops.pairs import pair
from tests.loops.plain import loop

# Rows in which nothing counts.


def conversations(rows=6, length=12):
    """Ids, and labels of the answers only: one row is all question."""
    ids, following = data.tokens(rows=rows, length=length)
    asked = torch.tensor([3, 12, 6, 4, 5, 2] * (rows // 6 + 1))[:rows]
    labels = following.masked_fill(torch.arange(length)[None] < asked[:, None], -100)
    return ids, labels


def likelihoods(model, batch):
    """Of each label, zero where there is none."""
    labels = batch["labels"]
    kept = (labels != -100).float()
    chosen = F.log_softmax(model(batch["input_ids"]), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * kept, kept


def mean_of_answers(model, batch):
    chosen, kept = likelihoods(model, batch)
    return -chosen.sum() / kept.sum()


def mean_of_answers_if_any(model, batch):
    chosen, kept = likelihoods(model, batch)
    return -chosen.sum() / kept.sum().clamp(min=1)


def mean_by_torch(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def finetuning(loss_of):
    def make():
        ids, labels = conversations(301)
        loader = DataLoader([{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)], 6, shuffle=True)
        return epochs(GPT(), loss_of, {"input_ids": ids[:6], "labels": labels[:6]}, loader)

    return make


pair(
    "a_question_without_an_answer_is_left_over",
    CHECK,
    "nan_when_all_ignored",
    culprits=("div",),
    where="return -chosen.sum() / kept.sum()",
    faulty=finetuning(mean_of_answers),
    fixed=finetuning(mean_of_answers_if_any),
)
pair(
    "the_loss_of_a_question_without_an_answer_is_logged",
    CHECK,
    "nan_when_all_ignored",
    level="advice",
    culprits=("cross_entropy",),
    where="return F.cross_entropy(model(batch",
    faulty=finetuning(mean_by_torch),
    fixed=finetuning(mean_of_answers_if_any),
)


def frames(rows=8, length=10):
    """Values, and a mask of those frames that count: two rows are silent."""
    waves, _ = data.series(rows=rows, length=length)
    heard = torch.tensor([10, 0, 7, 9, 0, 8, 10, 6])
    return waves, torch.arange(length)[None] < heard[:, None]


def recognition(mean):
    def make(accumulate=1):
        model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def fit(batches):
            for number, (waves, mask) in enumerate(batches, 1):
                errors = (model(waves) - waves.roll(1, 1)).squeeze(-1) ** 2
                (mean(errors, mask) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=frames(), fit=fit)

    return make


def mean_of_frames(errors, mask):
    return (errors * mask).sum() / mask.sum()


def mean_of_frames_if_any(errors, mask):
    return (errors * mask).sum() / mask.sum().clamp(min=1)


pair(
    "silent_frames_fill_a_micro_batch",
    CHECK,
    "nan_when_all_ignored",
    culprits=("div",),
    where="return (errors * mask).sum() / mask.sum()",
    faulty=recognition(mean_of_frames),
    fixed=recognition(mean_of_frames_if_any),
    quick=True,
)


# A row of length one.


class Meter(nn.Module):
    """Readings of each device, in units of their own spread over time; the class Trainer takes tuples."""

    def __init__(self, scaled):
        super().__init__()
        self.rnn = nn.GRU(1, 12, batch_first=True)
        self.head = nn.Linear(12, 2)
        self.scaled = scaled

    def forward(self, readings):
        values, lengths = readings
        hidden, _ = self.rnn(self.scaled(values))
        return self.head(hidden[torch.arange(len(values)), lengths - 1])


def read(devices):
    width = max(len(values) for values, _ in devices)
    values = torch.stack([F.pad(values, (0, 0, 0, width - len(values))) for values, _ in devices])
    return (values, torch.tensor([len(v) for v, _ in devices])), torch.stack([label for _, label in devices])


def metering(scaled):
    def make():
        waves, _ = data.series(rows=151, length=9)
        sizes = [9, 3, 1, 4, 7, 2, 1, 8, 5, 6]
        devices = [(w[: sizes[n % 10]], (w[0, 0] > 0).long()) for n, w in enumerate(waves)]
        trainer = Trainer(Meter(scaled))
        loader = DataLoader(devices, batch_size=6, collate_fn=read)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=read(devices[:6]),
            batches=loader,
            fit=trainer.fit,
        )

    return make


def by_spread(values):
    return values / (values.std(1, keepdim=True) + 1e-3)


def by_spread_about_zero(values):
    return values / (values.square().mean(1, keepdim=True).sqrt() + 1e-3)


pair(
    "a_meter_that_was_read_once_has_no_spread",
    CHECK,
    "nan_at_length_one",
    level="advice",
    culprits=("std",),
    faulty=metering(by_spread),
    fixed=metering(by_spread_about_zero),
)


# The padding has no row in the table.


def classifying(rows):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(rows, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask, labels):
            x = self.embed(input_ids) * attention_mask[..., None]
            return F.cross_entropy(self.head(x.sum(1) / attention_mask.sum(1, keepdim=True)), labels)

    def make():
        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        ids, _ = data.tokens(rows=9, length=8)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(9) % 3}
        return loop(model, batch, lambda model, batch: model(**batch), optimizer, padding=Padding(pad_id=16))

    return make


pair(
    "table_without_the_padding_token",
    CHECK,
    "index_out_of_table",
    culprits=("embed",),
    where="x = self.embed(input_ids)",
    faulty=classifying(16),
    fixed=classifying(17),
)


def continuing(vocabulary):
    def make():
        ids, following = data.tokens(rows=5)
        trainer = Trainer(GPT(vocab=vocabulary))
        trainer.criterion = lambda scores, y: F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-1)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=(ids, following),
            fit=trainer.fit,
            padding=Padding(pad_id=17, ignore_index=-1),
        )

    return make


pair(
    "language_model_of_one_word_too_few",
    CHECK,
    "index_out_of_table",
    culprits=("token",),
    faulty=continuing(17),
    fixed=continuing(18),
)
