"""Training and evaluation in the wrong mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import ConvNet, mlp
from tests.loops.pairs import pair


class Tagger(nn.Module):
    """A recurrent net with dropout, as loaded from a checkpoint: in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 16)

    def forward(self, ids):
        hidden, _ = self.lstm(self.dropout(self.embed(ids)))
        return self.head(self.dropout(hidden))

    @classmethod
    def from_pretrained(cls):
        return cls().eval()


# A model from `from_pretrained`, and no `train()` before the loop.


def train(model, optimizer, batches):
    for ids, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(ids).transpose(1, 2), targets).backward()
        optimizer.step()


def train_in_mode(model, optimizer, batches):
    model.train()
    train(model, optimizer, batches)


def tagger(train):
    def make():
        model = Tagger.from_pretrained()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


pair(
    "pretrained_left_in_eval",
    "train_mode",
    "trained_in_eval",
    culprits=("dropout",),
    where="model(ids)",
    faulty=tagger(train),
    fixed=tagger(train_in_mode),
)


# `eval()` written where `train()` is meant, images with batch norm.


class Trainer:
    def __init__(self, model, mode):
        self.model, self.mode = model, mode
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch):
        return F.cross_entropy(self.model(batch["image"]), batch["label"])

    def fit(self, batches):
        self.mode(self.model)
        for batch in batches:
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def convolutional(mode):
    def make():
        trainer = Trainer(nn.Sequential(nn.Dropout(0.1), ConvNet()), mode)
        images, labels = data.images()
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch={"image": images, "label": labels},
            fit=trainer.fit,
        )

    return make


pair(
    "eval_called_for_train",
    "train_mode",
    "trained_in_eval",
    culprits=("1.features.1", "0"),
    where="model.eval()",
    faulty=convolutional(lambda model: model.eval()),
    fixed=convolutional(lambda model: model.train()),
)


# Validation every few steps, and no way back.


@torch.no_grad()
def validate(model, batches):
    model.eval()
    losses = [F.cross_entropy(model(x), y).item() for x, y in batches]
    return sum(losses) / len(losses)


def train_and_validate(model, optimizer, batches, held_out, after):
    model.train()
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 4 == 0:
            validate(model, held_out)
            after(model)


def classifier(after):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        held_out = [data.labelled(seed=5)]
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train_and_validate(model, optimizer, batches, held_out, after),
        )

    return make


pair(
    "validation_leaves_eval_on",
    "train_mode",
    "eval_left_on",
    culprits=("2",),
    where="model.eval()",
    faulty=classifier(lambda model: None),
    fixed=classifier(lambda model: model.train()),
)


# A trainer that goes on by an epoch with each call, and leaves the mode of its validation.


def epoch_by_epoch(before):
    def make():
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {"epoch": 0}

        def fit(batches, epochs):
            while state["epoch"] < epochs:
                before(model)
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                validate(model, [data.labelled(seed=5)])
                state["epoch"] += 1

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: fit(batches, state["epoch"] + 1),
        )

    return make


pair(
    "epoch_ends_in_evaluation_mode",
    "train_mode",
    "eval_left_on",
    culprits=("2",),
    change="validate(model, [data.labelled(seed=5)])",
    faulty=epoch_by_epoch(lambda model: None),
    fixed=epoch_by_epoch(lambda model: model.train()),
)


# Encoder and decoder switched one by one; only the encoder is switched back.


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(0.2))
        self.decoder = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 6))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def train_seq2seq(model, optimizer, batches, back):
    for epoch_step, x in enumerate(batches):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if epoch_step % 3 == 2:
            model.encoder.eval()
            model.decoder.eval()
            with torch.no_grad():
                F.l1_loss(model(x), x).item()
            for part in back(model):
                part.train()


def seq2seq(back):
    def make():
        model = Seq2Seq()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table()[0],
            fit=lambda batches: train_seq2seq(model, optimizer, batches, back),
        )

    return make


pair(
    "decoder_not_switched_back",
    "train_mode",
    "eval_left_on",
    culprits=("decoder.0",),
    faulty=seq2seq(lambda model: [model.encoder]),
    fixed=seq2seq(lambda model: [model.encoder, model.decoder]),
)


# Validation with dropout on and batch statistics of the validation data.


def train_and_score(model, optimizer, batches, held_out, evaluating):
    scores = []
    images, labels = held_out
    for step, (x, y) in enumerate(batches, start=1):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 5 == 0:
            if evaluating:
                model.eval()
            with torch.inference_mode():
                scores.append((model(images).argmax(1) == labels).float().mean().item())
    return scores


def scored(evaluating):
    def make():
        model = nn.Sequential(nn.Dropout(0.1), ConvNet())
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.images(),
            fit=lambda batches: train_and_score(model, optimizer, batches, data.images(seed=3), evaluating),
        )

    return make


pair(
    "scored_in_training_mode",
    "train_mode",
    "evaluated_in_train",
    culprits=("1.features.1", "0"),
    where="scores.append",
    faulty=scored(evaluating=False),
    fixed=scored(evaluating=True),
)


# `evaluate` declared; it forgets the mode.


def evaluate(model, batch):
    x, y = batch
    with torch.no_grad():
        return F.mse_loss(model(x), y).item()


def evaluate_in_mode(model, batch):
    was = model.training
    model.eval()
    try:
        return evaluate(model, batch)
    finally:
        model.train(was)


def regression(evaluate):
    def make():
        model = nn.Sequential(mlp(6, 24, 24), nn.Dropout(0.2), nn.Linear(24, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.table(),
            fit=fit,
            evaluate=lambda: evaluate(model, data.table(seed=7)),
        )

    return make


pair(
    "evaluate_keeps_training_mode",
    "train_mode",
    "evaluated_in_train",
    culprits=("1",),
    faulty=regression(evaluate),
    fixed=regression(evaluate_in_mode),
)
