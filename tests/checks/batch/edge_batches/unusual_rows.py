"""Loops with rows in which nothing counts, with short ones, and with a padding id that stands nowhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import Padding, TrainLoop
from tests.checks.batch.edge_batches.unusual_sizes import training
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import points, tokens

# rows in which nothing counts


def labelled_tokens(rows=6, length=8):
    """Labels of some rows' ends; two rows have none."""
    ids = tokens(rows, length)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(length) < torch.tensor([[3], [8], [4], [2], [8], [1]]), -100)
    labels[:, -1] = -100
    return ids, labels


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(16, 12), nn.GRU(12, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@odd(notes="a row without any label: alone it would have the loss NaN, with gradients of zero")
def row_without_a_label() -> TrainLoop:
    return training(
        Reader(), labelled_tokens(), lambda model, b: F.cross_entropy(model(b[0]).transpose(1, 2), b[1]), rate=2e-2
    )


@odd(notes="labels are counted over the whole window, in which some micro-batches have none")
def labels_counted_over_the_window(accumulate=1) -> TrainLoop:
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def fit(batches):
        window = []
        for batch in batches:
            window.append(batch)
            if len(window) < accumulate:
                continue
            counted = sum((labels != -100).sum() for _, labels in window)
            for ids, labels in window:
                there = (labels != -100).float()
                chosen = model(ids).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
                (-(chosen * there).sum() / counted).backward()
            window = []
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batch=labelled_tokens(), fit=fit)


@odd(notes="boxes of a picture beside a mask: some pictures have none, and their number is taken as one at least")
def pictures_without_a_box() -> TrainLoop:
    x, _ = points()
    boxes = x[:, None, :2] * torch.tensor([1.0, -1.0, 0.5])[None, :, None]
    there = torch.arange(3)[None] < torch.tensor([2, 0, 3, 1, 0, 2, 1, 3])[:, None]

    def loss_of(model, batch):
        inputs, target, mask = batch
        errors = (model(inputs).view(len(inputs), 3, 2) - target).abs().sum(-1)
        return (errors * mask).sum() / mask.sum().clamp(min=1)

    return training(relu_mlp(8, 24, 6), (x, boxes, there), loss_of, rate=2e-2)


@odd(notes="a batch in which nothing is labelled is left out before its loss is taken")
def unlabelled_batches_are_left_out() -> TrainLoop:
    x, y = points(9)
    y[::3] = -1

    def loss_of(model, batch):
        known = batch[1] >= 0
        if not known.any():
            return None
        losses = F.cross_entropy(model(batch[0]), batch[1], ignore_index=-1, reduction="none")
        return losses.sum() / known.sum()

    return training(relu_mlp(8, 16, 4), (x, y), loss_of)


# short rows, and the padding


def sentences(rows=6):
    ids = tokens(rows, 7)
    lengths = torch.tensor([7, 1, 4, 5, 2, 3])
    return ids.masked_fill(torch.arange(7) >= lengths[:, None], 0), lengths


@odd(notes="a sentence of one word has nothing to predict, and the sum over nothing is divided by one at least")
def sentences_of_one_word() -> TrainLoop:
    def loss_of(model, batch):
        ids = batch[0]
        following = F.pad(ids[:, 1:], (0, 1))
        following = following.masked_fill(following == 0, -100)
        total = F.cross_entropy(model(ids).transpose(1, 2), following, reduction="sum")
        return total / (following >= 0).sum().clamp(min=1)

    return training(Reader(), sentences(), loss_of, rate=2e-2, padding=Padding(pad_id=0))


@odd(notes="a spread over time that one word does not have; padding is to a fixed length, which is all it ever sees")
def spread_over_a_fixed_length() -> TrainLoop:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 12), nn.Linear(7 * 12 + 12, 2)

        def forward(self, ids):
            heard = self.embed(ids)
            return self.head(torch.cat([heard.flatten(1), heard.std(1)], 1))

    ids, lengths = sentences()
    return training(
        Net(), (ids, lengths, ids[:, 0] % 2), lambda model, b: F.cross_entropy(model(b[0]), b[2]), rate=2e-2
    )


@odd(notes="the padding's id is -1 and has no row in the table: it is replaced before it is looked up")
def padding_replaced_before_the_table() -> TrainLoop:
    def loss_of(model, batch):
        there = batch[0] >= 0
        scores = model(batch[0].clamp(min=0))
        losses = F.cross_entropy(scores.transpose(1, 2), batch[1], reduction="none")
        return (losses * there).sum() / there.sum()

    ids = tokens(6, 8)
    return training(
        Reader(), (ids, (ids + 1) % 16), loss_of, rate=2e-2, padding=Padding(pad_id=-1), batches=[(ids, (ids + 1) % 16)]
    )


@odd(notes="the padding's id is that of the last row of the table, which no row of the batch has")
def padding_in_the_last_row_of_the_table() -> TrainLoop:
    ids = tokens(6, 8, 15)
    return training(
        Reader(),
        (ids, (ids + 1) % 15),
        lambda model, b: F.cross_entropy(model(b[0]).transpose(1, 2), b[1]),
        rate=2e-2,
        padding=Padding(pad_id=15),
    )
