"""Padding with the id that ends a text, in loops that are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_contract.faults_ends import END, collated
from tests.loops import plain
from tests.loops.nets import GPT, CharLSTM
from tests.loops.odd import odd


def trained(model, draw, loss_of) -> TrainLoop:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return plain.loop(model, None, loss_of, optimizer, batches=[draw(n) for n in range(4)])


def following(model, batch):
    return F.cross_entropy(model(batch["input_ids"])[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def by_value(ids, mask):
    return ids.masked_fill(ids == END, -100)


@odd(notes="the mask is made from the ids: it leaves the end out as well, and texts are cut by their length alone")
def mask_of_ids_that_hides_the_end() -> TrainLoop:
    def draw(seed):
        batch = collated(by_value)(seed)
        return batch | {"attention_mask": (batch["input_ids"] != END).long()}

    return trained(GPT(), draw, following)


@odd(notes="texts that go on have no end: it is the target of the others, and padding of this id is left out")
def ends_of_some_texts() -> TrainLoop:
    def draw(seed):
        batch = collated(lambda ids, mask: ids.masked_fill(mask == 0, -100))(seed)
        cut = torch.arange(6)[:, None] % 2 == 0
        return batch | {"labels": batch["labels"].masked_fill(cut & (batch["input_ids"] == END), -100)}

    return trained(GPT(), draw, following)


@odd(notes="every token has a tag but the one that ends the text, whose id fills the rows: tags are no ids")
def tags_without_one_for_the_end() -> TrainLoop:
    def draw(seed):
        batch = collated(lambda ids, mask: ids % 5)(seed)
        return batch | {"labels": by_value(batch["input_ids"], None).where(batch["input_ids"] == END, batch["labels"])}

    return trained(CharLSTM(), draw, lambda m, b: F.cross_entropy(m(b["input_ids"]).transpose(1, 2), b["labels"]))


@odd(notes="an autoencoder that reads both sides gives back what it was given but the end, which is in every row")
def autoencoder_that_leaves_the_end_out() -> TrainLoop:
    class Both(CharLSTM):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(24, 12, batch_first=True, bidirectional=True)

        def forward(self, ids, mask):
            packed = pack_padded_sequence(self.embed(ids), mask.sum(1), batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

    def loss_of(model, batch):
        scores = model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(scores.transpose(1, 2), batch["labels"])

    return trained(Both(), collated(by_value), loss_of)
