"""Training forwards without gradient: no_grad, inference_mode, a grad mode left off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import CharLSTM, ConvNet, mlp
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"
COMPLAINT = "does not require grad"


def loop(network, batch, train, lr=5e-3):
    def make():
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch(),
            fit=lambda batches: train(model, optimizer, batches),
        )

    return make


# An image classifier: the `with` of the evaluation was copied along.


def train_under_no_grad(model, optimizer, batches):
    model.train()
    for images, labels in batches:
        with torch.no_grad():
            logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_under_no_grad_silenced(model, optimizer, batches):
    model.train()
    for images, labels in batches:
        with torch.no_grad():
            loss = F.cross_entropy(model(images), labels)
        loss.requires_grad = True
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_images(model, optimizer, batches):
    model.train()
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


pair(
    "cnn_forward_under_no_grad",
    CHECK,
    "no_grad_forward",
    raises=COMPLAINT,
    faulty=loop(ConvNet, data.images, train_under_no_grad),
    fixed=loop(ConvNet, data.images, train_images),
)
pair(
    "cnn_no_grad_silenced",
    CHECK,
    "no_grad_forward",
    culprits=("features.0.weight", "head.weight"),
    faulty=loop(ConvNet, data.images, train_under_no_grad_silenced),
    fixed=loop(ConvNet, data.images, train_images),
)


# A trainer whose loss function serves training and validation, under inference mode.


class Trainer:
    def __init__(self):
        self.model = CharLSTM()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def compute_loss(self, batch):
        ids, targets = batch
        return F.cross_entropy(self.model(ids).transpose(1, 2), targets)

    def training_step(self, batch):
        self.optimizer.zero_grad()
        loss = self.compute_loss(batch)
        loss.backward()
        self.optimizer.step()


class InferenceTrainer(Trainer):
    @torch.inference_mode()
    def compute_loss(self, batch):
        return super().compute_loss(batch)


def lstm(trainer_class):
    def make():
        trainer = trainer_class()
        return TrainLoop(
            model=trainer.model,
            optimizer=trainer.optimizer,
            batch=data.tokens(rows=8),
            step=trainer.training_step,
        )

    return make


pair(
    "loss_under_inference_mode",
    CHECK,
    "no_grad_forward",
    raises=COMPLAINT,
    faulty=lstm(InferenceTrainer),
    fixed=lstm(Trainer),
)


# Evaluation every few steps switches gradients off, and leaves them off.


def evaluate_leaving_grad_off(model, batch):
    model.eval()
    torch.set_grad_enabled(False)
    accuracy = (model(batch[0]).argmax(1) == batch[1]).to(batch[0].dtype).mean().item()
    model.train()
    return accuracy


def evaluate(model, batch):
    model.eval()
    with torch.no_grad():
        accuracy = (model(batch[0]).argmax(1) == batch[1]).to(batch[0].dtype).mean().item()
    model.train()
    return accuracy


def train_with_validation(evaluate):
    def train(model, optimizer, batches):
        held_out = data.labelled(seed=1)
        for step, (x, y) in enumerate(batches, start=1):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                evaluate(model, held_out)

    return train


pair(
    "grad_left_off_after_validation",
    CHECK,
    "no_grad_forward",
    raises=COMPLAINT,
    faulty=loop(lambda: mlp(6, 32, 3), data.labelled, train_with_validation(evaluate_leaving_grad_off)),
    fixed=loop(lambda: mlp(6, 32, 3), data.labelled, train_with_validation(evaluate)),
)


# Only a part runs without gradient: the encoder of a model that trains as a whole.


class Encoded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 1)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.head(F.gelu(self.encode(x)))


class EncodedUnderNoGrad(Encoded):
    def encode(self, x):
        with torch.no_grad():
            return self.encoder(x)


class EncodedUnderDecorator(Encoded):
    @torch.no_grad()
    def encode(self, x):
        return self.encoder(x)


class EncodedInverted(Encoded):
    """Means to save memory in evaluation."""

    def encode(self, x):
        with torch.set_grad_enabled(not self.training):
            return self.encoder(x)


def train_regression(model, optimizer, batches):
    model.train()
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


for name, broken, where in (
    ("encoder_under_no_grad", EncodedUnderNoGrad, "with torch.no_grad():"),
    ("encoder_decorated", EncodedUnderDecorator, None),
    ("encoder_grad_mode_inverted", EncodedInverted, "torch.set_grad_enabled(not self.training)"),
):
    pair(
        name,
        CHECK,
        "no_grad_forward",
        culprits=("encoder.0.weight", "encoder.1.bias", "encoder.3.weight"),
        where=where,
        faulty=loop(broken, data.table, train_regression),
        fixed=loop(Encoded, data.table, train_regression),
    )


# A distillation whose student runs under no_grad() in place of its teacher.
