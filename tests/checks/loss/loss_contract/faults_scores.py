"""What is given to a loss where scores are due."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# The last layer of the model is a softmax, and the trainer uses nn.CrossEntropyLoss.


class Classifier(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.trunk = mlp(6, 32, 3)
        self.last = last

    def forward(self, features):
        return self.last(self.trunk(features))


class Trainer:
    def __init__(self, model, criterion):
        self.model = model
        self.criterion = criterion
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(self, batch):
        return self.criterion(self.model(batch["features"]), batch["label"])

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(batch).backward()
            self.optimizer.step()


def classifier(last):
    def make():
        trainer = Trainer(Classifier(last()), nn.CrossEntropyLoss())
        features, labels = data.labelled()
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch={"features": features, "label": labels},
            fit=trainer.fit,
        )

    return make


pair(
    "relu_as_last_layer",
    "loss_contract",
    "activation_on_logits",
    culprits=("relu in last",),
    faulty=classifier(nn.ReLU),
    fixed=classifier(nn.Identity),
)
pair(
    "dropout_on_the_scores",
    "loss_contract",
    "dropout_on_logits",
    culprits=("dropout in last",),
    mentions=("p=0.3",),
    faulty=classifier(lambda: nn.Dropout(0.3)),
    fixed=classifier(nn.Identity),
)
pair(
    "log_softmax_before_cross_entropy",
    "loss_contract",
    "log_probabilities_as_logits",
    level="advice",
    culprits=("log_softmax in last",),
    faulty=classifier(lambda: nn.LogSoftmax(dim=-1)),
    fixed=classifier(nn.Identity),
)


# A softmax written out, cast and flattened on its way to the loss; two steps of it through a mask.


def segmenter(scores_of):
    def make():
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        images, _ = data.images()
        masks = (images[:, 0] > -0.5).long() + (images[:, 0] > 0.5).long()

        def step(batch):
            images, masks = batch
            scores = scores_of(model(images)).permute(0, 2, 3, 1).reshape(-1, 3)
            return F.cross_entropy(scores[masks.flatten() >= 0].to(images.dtype), masks.flatten())

        return TrainLoop(
            model=model, optimizer=optimizer, batch=(images, masks), fit=lambda b: train(optimizer, b, step)
        )

    return make


def by_hand(scores):
    powers = torch.exp(scores - scores.amax(1, keepdim=True))
    return powers / powers.sum(1, keepdim=True)


pair(
    "softmax_written_out_over_channels",
    "loss_contract",
    "probabilities_as_logits",
    where="return F.cross_entropy(scores",
    faulty=segmenter(by_hand),
    fixed=segmenter(lambda scores: scores - scores.amax(1, keepdim=True)),
)


# The loss is written by hand, and the model gives probabilities already.


def by_gathering(prepare, last):
    def make():
        model = Classifier(last())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

        def step(batch):
            features, labels = batch
            logp = prepare(model(features))
            return -logp.gather(1, labels[:, None]).squeeze(1).mean()

        return TrainLoop(
            model=model, optimizer=optimizer, batch=data.labelled(), fit=lambda b: train(optimizer, b, step)
        )

    return make


pair(
    "log_softmax_over_the_rows_gathered",
    "loss_contract",
    "wrong_axis",
    where="faulty=by_gathering(lambda s: F.log_softmax(s, dim=0), nn.Identity),",
    faulty=by_gathering(lambda s: F.log_softmax(s, dim=0), nn.Identity),
    fixed=by_gathering(lambda s: F.log_softmax(s, dim=1), nn.Identity),
)


# Cosines and their temperature.


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(6, 32, 16), mlp(10, 32, 16)

    def forward(self, left, right):
        return F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)


def contrastive(loss_of):
    def make():
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.views(),
            fit=lambda b: train(optimizer, b, lambda batch: loss_of(*model(*batch))),
        )

    return make


def info_nce(scores):
    return (scores.logsumexp(1) - scores.diagonal()).mean()


pair(
    "info_nce_by_hand_times_the_temperature",
    "loss_contract",
    "temperature_inverted",
    faulty=contrastive(lambda a, b: info_nce(torch.einsum("id,jd->ij", a, b) * 0.1)),
    fixed=contrastive(lambda a, b: info_nce(torch.einsum("id,jd->ij", a, b) / 0.1)),
)


# Two classes on one score.


def detector(last, criterion):
    def make():
        trainer = Trainer(Classifier(last()), criterion)
        features, labels = data.labelled()
        hot = F.one_hot(labels, 3).to(features.dtype)
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch={"features": features, "label": hot},
            fit=trainer.fit,
        )

    return make


class WrittenOut(nn.Module):
    def forward(self, scores):
        return 1 / (1 + torch.exp(-scores))


pair(
    "sigmoid_written_out_before_with_logits",
    "loss_contract",
    "probabilities_as_logits",
    faulty=detector(WrittenOut, nn.BCEWithLogitsLoss()),
    fixed=detector(WrittenOut, nn.BCELoss()),
)
pair(
    "relu_before_with_logits",
    "loss_contract",
    "activation_on_logits",
    faulty=detector(nn.ReLU, nn.BCEWithLogitsLoss()),
    fixed=detector(nn.Identity, nn.BCEWithLogitsLoss()),
)


# Probabilities, their logarithms and nll_loss.

pair(
    "nll_loss_on_scores",
    "loss_contract",
    "logits_as_log_probabilities",
    culprits=("nll_loss",),
    where="return F.nll_loss(scores, labels)",
    faulty=lambda: nll(lambda s: s),
    fixed=lambda: nll(lambda s: F.log_softmax(s, dim=1)),
)
pair(
    "nll_loss_on_probabilities",
    "loss_contract",
    "probabilities_as_log_probabilities",
    culprits=("nll_loss",),
    faulty=lambda: nll(lambda s: F.softmax(s, dim=1)),
    fixed=lambda: nll(lambda s: F.softmax(s, dim=1).log()),
)
pair(
    "nll_loss_on_a_log_softmax_over_rows",
    "loss_contract",
    "wrong_axis",
    faulty=lambda: nll(lambda s: F.log_softmax(s, dim=0)),
    fixed=lambda: nll(lambda s: F.log_softmax(s, dim=-1)),
)


def nll(prepare):
    model = ConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch):
        scores, labels = prepare(model(batch[0])), batch[1]
        return F.nll_loss(scores, labels)

    return TrainLoop(model=model, optimizer=optimizer, batch=data.images(), fit=lambda b: train(optimizer, b, step))
