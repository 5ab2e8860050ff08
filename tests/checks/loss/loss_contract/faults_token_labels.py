"""Padding that counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, CharLSTM
from tests.loops.pairs import pair

PAD = 0


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


def loop(model, batch, loss_of, **fields):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=batch,
        fit=lambda b: train(optimizer, b, lambda x: loss_of(model, x)),
        **fields,
    )


def sentences(rows=6, length=12):
    """Ids from 1 to 15, padded on the right, and a tag for each token."""
    ids, _ = data.tokens(rows=rows, length=length, vocab=15)
    ids = ids + 1
    lengths = torch.tensor([length - 2 * (n % 4) for n in range(rows)])
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids % 5) * mask, "lengths": lengths}


class Tagger(CharLSTM):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(16, 24, padding_idx=padding_idx)
        self.head = nn.Linear(24, 5)


def tagging(labels_of, keys, padding_idx=None, **kwargs):
    def make():
        batch = sentences()
        batch = {key: batch[key] for key in ("input_ids", "labels", *keys)}

        def loss_of(model, batch):
            scores = model(batch["input_ids"])
            return F.cross_entropy(scores.flatten(0, 1), labels_of(batch).flatten(), **kwargs)

        return loop(Tagger(padding_idx), batch, loss_of)

    return make


def ignoring(batch):
    return batch["labels"].masked_fill(batch["input_ids"] == PAD, -100)


def as_they_are(batch):
    return batch["labels"]


for title, keys, index in (
    ("attention_mask", ("attention_mask",), None),
    ("lengths", ("lengths",), None),
    ("padding_idx", (), PAD),
):
    pair(
        f"padded_tags_count_known_by_{title}",
        "loss_contract",
        "padding_counted",
        culprits=("ignore_index=-100",),
        mentions=("are padding", "without"),
        where="return F.cross_entropy(scores.flatten(0, 1), labels_of(batch).flatten(), **kwargs)",
        faulty=tagging(as_they_are, keys, index),
        fixed=tagging(ignoring, keys, index),
    )
pair(
    "another_label_is_ignored_than_that_of_padding",
    "loss_contract",
    "ignore_index_mismatch",
    faulty=tagging(as_they_are, ("attention_mask",), ignore_index=-1),
    fixed=tagging(
        lambda b: b["labels"].masked_fill(b["attention_mask"] == 0, -1), ("attention_mask",), ignore_index=-1
    ),
)


def tags_from_one(batch):
    """Tags 1 to 4, and 0 at padded positions only."""
    return (batch["labels"] % 4 + 1) * batch["attention_mask"]


pair(
    "another_label_is_ignored_than_that_of_padding_alone",
    "loss_contract",
    "ignore_index_mismatch",
    faulty=tagging(tags_from_one, ("attention_mask",), ignore_index=-1),
    fixed=tagging(tags_from_one, ("attention_mask",), ignore_index=PAD),
)


# A language model that learns to say padding after padding, from labels that are rolled: behind a text of full
# length its own first token follows.


def language(loss_of, **fields):
    def make():
        ids = torch.cat([sentences()["input_ids"], torch.zeros(6, 1, dtype=torch.long)], 1)
        return loop(GPT(), {"ids": ids}, lambda model, batch: loss_of(model, batch["ids"]), **fields)

    return make


def rolled(kept):
    def loss_of(model, ids):
        ids = ids[:, :-1]
        labels = ids.roll(-1, 1)
        if kept:
            labels = labels.masked_fill((ids == PAD) | (labels == PAD), -100)
            labels[:, -1] = -100
        return F.cross_entropy(model(ids).transpose(1, 2), labels)

    return loss_of


pair(
    "labels_rolled_over_declared_padding",
    "loss_contract",
    "padding_counted",
    faulty=language(rolled(kept=False), padding=Padding(pad_id=PAD)),
    fixed=language(rolled(kept=True), padding=Padding(pad_id=PAD)),
)


# A collate function that sorts the texts by length, and leaves the labels where they were.


def texts(rows=6):
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 12, (rows,), generator=draw).tolist()
    ids = [torch.randint(1, 16, (n,), generator=draw) for n in lengths]
    return [(one, one % 4 + 1) for one in ids]


def collate(rows, *, together, filled=-100):
    if together:
        rows = sorted(rows, key=lambda row: len(row[0]), reverse=True)
    ids, labels = zip(*rows, strict=True)
    ids = sorted(ids, key=len, reverse=True)
    pad = nn.utils.rnn.pad_sequence
    ids = pad(ids, batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": pad(labels, True, filled)}


def tagging_texts(*, together, filled=-100):
    def make():
        def loss_of(model, batch):
            return F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), batch["labels"])

        batch = collate(texts(), together=together, filled=filled)
        return loop(Tagger(PAD), batch, loss_of, padding=Padding(pad_id=PAD))

    return make


pair(
    "texts_sorted_by_length_and_labels_not",
    "loss_contract",
    "labels_misplaced",
    culprits=("target",),
    faulty=tagging_texts(together=False),
    fixed=tagging_texts(together=True),
)
pair(
    "texts_sorted_by_length_and_labels_filled_with_a_tag",
    "loss_contract",
    "labels_misplaced",
    faulty=tagging_texts(together=False, filled=0),
    fixed=tagging_texts(together=True, filled=-100),
)
