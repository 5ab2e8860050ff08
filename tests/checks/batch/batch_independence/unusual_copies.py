"""Copies of rows that meet other rows on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.plain import loop


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@odd(notes="all pairs of texts and images, by as many copies as there are rows; the pairs of one row are the positives")
def every_text_with_every_image():
    class Match(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = mlp(11, 24, 1)

        def forward(self, image, text):
            rows = len(text)
            pairs = torch.cat([image.repeat(rows, 1), text.repeat_interleave(rows, dim=0)], dim=1)
            return self.score(pairs).view(rows, rows)

    def loss_of(model, batch):
        return F.cross_entropy(model(*batch), torch.arange(len(batch[0])))

    return loop(Match(), (drawn(8, 6), drawn(8, 5, seed=1)), loss_of)


@odd(notes="distances between rows of one tensor are to be kept: copies of one batch beside copies of each row")
def distances_between_some_rows():
    def apart(t):
        return (t.repeat(3, 1) - t.repeat_interleave(3, dim=0)).square().sum(-1)

    def loss_of(model, batch):
        x, y = batch
        told = model(x)
        return F.cross_entropy(told, y) + 0.1 * (apart(told) - apart(x)).square().mean()

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="each row is ranked against its neighbour in what two sources give, and so are their grades")
def neighbours_of_two_sources_are_ranked():
    def loss_of(model, batch):
        told = model(torch.cat([batch["ours"], batch["theirs"]])).squeeze(-1)
        grades = torch.cat([batch["our_grades"], batch["their_grades"]])
        sign = (grades[::2] - grades[1::2]).sign()
        return F.softplus(-sign * (told[::2] - told[1::2])).mean()

    batch = {"ours": drawn(10, 6), "theirs": drawn(10, 6, seed=1)}
    grades = {"our_grades": drawn(10, seed=2), "their_grades": drawn(10, seed=3)}
    return loop(mlp(6, 16, 1), {**batch, **grades}, loss_of)


@odd(notes="all copies are laid out one way: whole batches one after the other, as beam search does")
def copies_batch_by_batch():
    def loss_of(model, batch):
        x, y = batch
        noisy = x.repeat(3, 1) + 0.1 * drawn(3 * len(x), x.shape[1]).to(x.dtype)
        return F.cross_entropy(model(noisy), y.repeat(3))

    return loop(mlp(6, 24, 3), data.labelled(), loss_of)


@odd(notes="items of other users, in random order, are the negatives of a weighted loss")
def negatives_by_a_permutation():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = mlp(6, 16, 4), mlp(5, 16, 4)

    def loss_of(model, batch):
        users, items, weights = batch
        told = model.user(users)
        liked = (told * model.item(items)).sum(-1)
        other = (told * model.item(items[torch.randperm(len(items))])).sum(-1)
        return (weights * F.softplus(other - liked)).mean()

    generator = torch.Generator().manual_seed(2)
    return loop(Towers(), (drawn(7, 6), drawn(7, 5, seed=1), torch.rand(7, generator=generator)), loss_of)
