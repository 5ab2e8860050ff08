"""Targets, weights and probabilities of losses over two classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


def loop(model, batch, loss_of, lr=1e-2):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return TrainLoop(
        model=model, optimizer=optimizer, batch=batch, fit=lambda b: train(optimizer, b, lambda x: loss_of(model, x))
    )


# An autoencoder whose images were standardised, or stand at 0 to 255.


def autoencoder(prepare):
    def make():
        images, _ = data.images(rows=16)
        images = prepare(torch.sigmoid(2 * images).flatten(1))

        def loss_of(model, batch):
            return F.binary_cross_entropy_with_logits(model(batch), batch)

        return loop(mlp(64, 48, 64), images, loss_of)

    return make


pair(
    "standardised_images_as_targets",
    "loss_contract",
    "target_outside_unit",
    culprits=("target",),
    where="return F.binary_cross_entropy_with_logits(model(batch), batch)",
    faulty=autoencoder(lambda x: (x - 0.13) / 0.31),
    fixed=autoencoder(lambda x: x),
)


def spam(targets_of, loss=F.binary_cross_entropy_with_logits, scores_of=lambda s: s.squeeze(-1), **kwargs):
    def make():
        features, labels = data.labelled(classes=2)

        def loss_of(model, batch):
            return loss(scores_of(model(batch[0])), targets_of(batch[1].to(batch[0].dtype)), **kwargs)

        return loop(mlp(6, 32, 1), (features, labels), loss_of)

    return make


pair(
    "soft_margin_with_zeros",
    "loss_contract",
    "signs_expected",
    culprits=("target",),
    faulty=spam(lambda y: y, F.soft_margin_loss),
    fixed=spam(lambda y: 2 * y - 1, F.soft_margin_loss),
)
pair(
    "scores_into_bce",
    "loss_contract",
    "logits_as_probabilities",
    raises="between 0 and 1",
    culprits=("binary_cross_entropy",),
    faulty=spam(lambda y: y, F.binary_cross_entropy),
    fixed=spam(lambda y: y, F.binary_cross_entropy, lambda s: torch.sigmoid(s.squeeze(-1))),
)
pair(
    "sigmoid_saturates_at_once",
    "loss_contract",
    "probabilities_saturated",
    faulty=spam(lambda y: y, F.binary_cross_entropy, lambda s: torch.sigmoid(1000 * s.squeeze(-1) + 300)),
    fixed=spam(lambda y: y, F.binary_cross_entropy, lambda s: torch.sigmoid(s.squeeze(-1))),
)
pair(
    "labels_as_integers_into_bce",
    "loss_contract",
    "target_dtype",
    raises="Float",
    faulty=spam(lambda y: y.long(), F.binary_cross_entropy, lambda s: torch.sigmoid(s.squeeze(-1))),
    fixed=spam(lambda y: y, F.binary_cross_entropy, lambda s: torch.sigmoid(s.squeeze(-1))),
)
pair(
    "column_of_scores_against_a_row_of_labels",
    "loss_contract",
    "target_shape",
    raises="size",
    faulty=spam(lambda y: y, scores_of=lambda s: s),
    fixed=spam(lambda y: y[:, None], scores_of=lambda s: s),
)
pair(
    "weight_of_rows_against_a_column",
    "loss_contract",
    "weight_shape",
    raises="broadcast",
    culprits=("weight",),
    faulty=spam(lambda y: y[:, None], scores_of=lambda s: s, weight=torch.linspace(0.5, 1.5, 16)),
    fixed=spam(lambda y: y[:, None], scores_of=lambda s: s, weight=torch.linspace(0.5, 1.5, 16)[:, None]),
)


# One label in thirty is positive.


def rare(**kwargs):
    def make():
        features, _ = data.labelled(rows=120, classes=2)
        labels = (torch.arange(240).reshape(120, 2) % 30 == 7).to(features.dtype)

        def loss_of(model, batch):
            return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], **kwargs)

        return loop(mlp(6, 256, 2), (features, labels), loss_of)

    return make


pair(
    "one_label_in_thirty_is_positive",
    "loss_contract",
    "classes_imbalanced",
    level="advice",
    faulty=rare(),
    fixed=rare(pos_weight=torch.tensor(29.0)),
)


# Several labels for each row.


def margins(targets_of):
    def make():
        features, labels = data.labelled(classes=4)
        hot = F.one_hot(labels, 4)

        def loss_of(model, batch):
            return F.multilabel_margin_loss(model(batch[0]), batch[1])

        return loop(mlp(6, 32, 4), (features, targets_of(hot)), loss_of)

    return make


def as_lists(hot):
    lists = torch.full_like(hot, -1)
    lists[:, 0] = hot.argmax(1)
    return lists


pair(
    "zeros_and_ones_for_lists_of_classes",
    "loss_contract",
    "index_list_expected",
    culprits=("target",),
    faulty=margins(lambda hot: hot),
    fixed=margins(as_lists),
)


# Pairs that are alike or not, labelled 0 and 1.


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(6, 32, 8), mlp(10, 32, 8)

    def forward(self, left, right):
        return self.left(left), self.right(right)


def pairs(targets_of, loss):
    def make():
        left, right = data.views(rows=16)
        same = (torch.arange(16) % 2 == 0).to(left.dtype)
        right = torch.where(same[:, None] == 1, right, right.roll(3, 0))

        def loss_of(model, batch):
            a, b, same = batch
            return loss(*model(a, b), targets_of(same))

        return loop(Siamese(), (left, right, same), loss_of)

    return make


def hinged(a, b, target):
    return F.hinge_embedding_loss((a - b).square().sum(1), target)


for title, criterion in (("cosine", F.cosine_embedding_loss), ("hinge", hinged)):
    pair(
        f"{title}_pairs_labelled_zero_and_one",
        "loss_contract",
        "signs_expected",
        mentions=("expects 1 and -1",),
        faulty=pairs(lambda same: same, criterion),
        fixed=pairs(lambda same: 2 * same - 1, criterion),
    )
