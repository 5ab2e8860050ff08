"""Something is zeroed, but not what steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# Sequence to sequence with an optimizer each for encoder and decoder (the classic tutorial).


class Encoder(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        return self.gru(self.embed(ids))[1]


class Decoder(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids, state):
        return self.out(self.gru(self.embed(ids), state)[0])


def train_pair_one_zeroed_twice(encoder, decoder, encoder_optimizer, decoder_optimizer, batches):
    for source, target in batches:
        encoder_optimizer.zero_grad()
        encoder_optimizer.zero_grad()
        logits = decoder(target[:, :-1], encoder(source))
        loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:])
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()


def train_pair(encoder, decoder, encoder_optimizer, decoder_optimizer, batches):
    for source, target in batches:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        logits = decoder(target[:, :-1], encoder(source))
        loss = F.cross_entropy(logits.transpose(1, 2), target[:, 1:])
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()


def seq2seq(train):
    def make():
        encoder, decoder = Encoder(), Decoder()
        optimizers = [torch.optim.Adam(m.parameters(), lr=5e-3) for m in (encoder, decoder)]
        return TrainLoop(
            model={"encoder": encoder, "decoder": decoder},
            optimizer=optimizers,
            batch=data.tokens(rows=6),
            fit=lambda batches: train(encoder, decoder, *optimizers, batches),
        )

    return make


pair(
    "seq2seq_encoder_zeroed_twice",
    "step_order",
    "wrong_object_zeroed",
    culprits=("decoder.out.weight",),
    faulty=seq2seq(train_pair_one_zeroed_twice),
    fixed=seq2seq(train_pair),
)


# Distillation: the teacher, which never trains, is zeroed.


class Distiller:
    def __init__(self, student, teacher, temperature=2.0):
        self.student, self.teacher, self.temperature = student, teacher.eval(), temperature
        self.optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)

    def loss(self, x, y):
        logits = self.student(x)
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.temperature, dim=-1)
        distilled = F.kl_div(F.log_softmax(logits / self.temperature, dim=-1), soft, reduction="batchmean")
        return F.cross_entropy(logits, y) + 0.1 * distilled

    def train_step(self, x, y):
        self.student.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()

    def fit(self, batches):
        for x, y in batches:
            self.train_step(x, y)


class DistillerZeroingTheTeacher(Distiller):
    def train_step(self, x, y):
        self.teacher.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()


def distillation(distiller_class):
    def make():
        distiller = distiller_class(mlp(6, 16, 3), mlp(6, 48, 3).requires_grad_(False))
        return TrainLoop(
            model=distiller.student, optimizer=distiller.optimizer, batch=data.labelled(), fit=distiller.fit
        )

    return make


pair(
    "distillation_teacher_zeroed",
    "step_order",
    "wrong_object_zeroed",
    faulty=distillation(DistillerZeroingTheTeacher),
    fixed=distillation(Distiller),
)


# A loss scale of the project's own: the batch whose gradients overflow is left out, and its gradients stay.


class OwnScaler:
    def __init__(self, optimizer, early):
        self.optimizer, self.early, self.scale = optimizer, early, 2.0**24

    def overflown(self):
        groups = self.optimizer.param_groups
        return not all(p.grad.isfinite().all() for group in groups for p in group["params"])

    def step(self, loss):
        if self.early:
            self.optimizer.zero_grad()
        (loss * self.scale).backward()
        if self.overflown():
            self.scale /= 16
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad.div_(self.scale)
        self.optimizer.step()
        if not self.early:
            self.optimizer.zero_grad()


def own_scaler(early):
    def make():
        model = mlp(6, 24, 3)
        scaler = OwnScaler(torch.optim.AdamW(model.parameters(), lr=5e-3), early)

        def fit(batches):
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.float16):
                    logits = model(x)
                scaler.step(F.cross_entropy(logits.float(), y))

        return TrainLoop(model=model, optimizer=scaler.optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "overflown_gradients_that_stay",
    "step_order",
    "not_zeroed",
    culprits=("zero_grad()",),
    where=".backward()",
    faulty=own_scaler(early=False),
    fixed=own_scaler(early=True),
)
