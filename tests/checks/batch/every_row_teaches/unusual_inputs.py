"""Right loops that read one input twice and another one never, and whole numbers that weigh something."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


@odd(notes="an input passes twice, since dropout makes two views of it, and another one is for other runs: advice")
def two_views_by_dropout() -> TrainLoop:
    anchor, positive = data.views(left=6, right=6)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 4))

    def loss_of(model, batch):
        one, other = (F.normalize(model(batch["anchor"]), dim=1) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))

    return loop(model, {"anchor": anchor, "positive": positive}, loss_of, rows_interact=True)


@odd(notes="one network reads an input twice, and the batch has nothing like it that is not read")
def input_that_passes_twice() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + 0.1 * model(x).square().mean()

    return loop(mlp(6, 16, 3), data.labelled(), loss_of)


@odd(notes="a language model shifts its ids itself; the labels of the batch are for another trainer")
def labels_for_another_trainer() -> TrainLoop:
    ids, labels = data.tokens()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)

        def forward(self, ids):
            return self.head(self.embed(ids))

    def loss_of(model, batch):
        ids = batch["input_ids"]
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loop(Model(), {"input_ids": ids, "labels": labels}, loss_of)


@odd(notes="the two networks of a comparison read one view, and another is kept for the evaluation")
def student_and_teacher_of_one_view() -> TrainLoop:
    left, right = data.views(left=6, right=6)
    model = nn.ModuleDict({"one": mlp(6, 16, 4), "two": mlp(6, 16, 4)})

    def loss_of(model, batch):
        return F.mse_loss(model["one"](batch["left"]), batch["left"][:, :4]) + F.l1_loss(
            model["two"](batch["left"]), batch["left"][:, 2:]
        )

    return loop(model, {"left": left, "right": right}, loss_of)


@odd(notes="a checkerboard by an integer division masks half of the features")
def checkerboard_by_integer_division() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        board = (torch.arange(x.shape[1]) // 2 % 2).to(x.dtype)
        return F.mse_loss(model(x * board), y)

    return loop(mlp(6, 16, 1), data.table(), loss_of)


@odd(notes="the weight of a class is its level, and levels are counted from 0")
def weights_by_levels() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        levels = torch.tensor([0, 1, 2]).to(x.dtype)
        return (F.cross_entropy(model(x), y, reduction="none") * levels[y]).mean()

    return loop(mlp(6, 16, 3), data.labelled(), loss_of)


@odd(notes="stochastic depth: whole rows of a branch are floored to 0")
def rows_of_a_branch_floored_to_zero() -> TrainLoop:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = self.first(x).tanh()
            kept = (0.8 + torch.rand(len(x), 1, dtype=x.dtype)).floor() if self.training else 0.8
            return self.head(x + kept / 0.8 * self.branch(x).tanh())

    return loop(Model(), data.labelled(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@odd(notes="a number that is the same for the whole batch stands in every row, and the first is read")
def number_of_the_batch_in_every_row() -> TrainLoop:
    x, y = data.table()

    def loss_of(model, batch):
        x, y, scale = batch
        return F.mse_loss(model(x) * scale[0], y)

    return loop(mlp(6, 16, 1), (x, y, torch.full((16,), 2.0)), loss_of)


@odd(notes="outputs are compared with the first row's, by their differences to it")
def differences_to_the_first_row() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        output = model(x)
        return F.mse_loss(output - output[0], y - y[0]) + 0.1 * output.square().mean()

    return loop(mlp(6, 16, 1), data.table(), loss_of, rows_interact=True)


@odd(notes="a loop over rows takes each row's own target")
def targets_row_by_row() -> TrainLoop:
    def loss_of(model, batch):
        x, y = batch
        return torch.stack([(model(x[i : i + 1]) - y[i]).square().mean() for i in range(len(x))]).mean()

    return loop(mlp(6, 16, 1), data.table(rows=6), loss_of)
