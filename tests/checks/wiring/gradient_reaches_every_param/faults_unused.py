"""Modules that run, but whose result never reaches the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import Block, ConvNet, lm_loss
from tests.loops.pairs import pair

CHECK = "gradient_reaches_every_param"


def loop(network, batch, loss, lr=5e-3, **declared):
    def make():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

        def fit(batches):
            model.train()
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch(),
            batches=lambda n: [batch() for _ in range(n)],
            fit=fit,
            **declared,
        )

    return make


def unused(name, culprits, broken, whole, batch, loss, *, broken_loss=None, level="fault", mentions=(), **options):
    pair(
        name,
        CHECK,
        "parameter_unused",
        level=level,
        culprits=culprits,
        mentions=mentions,
        faulty=loop(broken, batch, broken_loss or loss, **options),
        fixed=loop(whole, batch, loss, **options),
    )


# A language model: the last norm is called, and its result dropped.


class LM(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(12, width)
        self.block = Block(width, 2)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        nn.init.normal_(self.token.weight, std=0.1)
        nn.init.normal_(self.position.weight, std=0.1)

    def embed(self, ids):
        return self.token(ids) + self.position(torch.arange(ids.shape[1]))

    def forward(self, ids):
        x = self.block(self.embed(ids))
        x = self.norm(x)
        return self.head(x)


class LMDroppingNorm(LM):
    def forward(self, ids):
        x = self.block(self.embed(ids))
        self.norm(x)
        return self.head(x)


unused("norm_result_dropped", ("norm.weight", "norm.bias"), LMDroppingNorm, LM, data.tokens, lm_loss, lr=3e-3)


# Two heads, one loss.


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.label_head = nn.Linear(24, 3)
        self.radius_head = nn.Linear(24, 1)

    def forward(self, x):
        hidden = self.trunk(x)
        return {"label": self.label_head(hidden), "radius": self.radius_head(hidden).squeeze(-1)}


def clusters():
    x, labels = data.labelled()
    return {"x": x, "label": labels, "radius": x.norm(dim=-1) / x.norm(dim=-1).mean()}


def without_radius():
    return {name: values for name, values in clusters().items() if name != "radius"}


def label_only(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out["label"], batch["label"])


def label_and_radius(model, batch):
    out = model(batch["x"])
    return F.cross_entropy(out["label"], batch["label"]) + F.mse_loss(out["radius"], batch["radius"])


def radius_term_lost(model, batch):
    out = model(batch["x"])
    losses = [F.cross_entropy(out["label"], batch["label"])]
    losses.append(F.mse_loss(out["radius"], batch["radius"]))
    return sum(losses[:-1])


unused(
    "second_head_left_out",
    ("radius_head.weight", "radius_head.bias"),
    TwoHeads,
    TwoHeads,
    clusters,
    label_and_radius,
    broken_loss=label_only,
)
pair(
    "second_term_left_out",  # the head is unused because its term is dropped
    "every_term_trains",
    "term_left_out",
    culprits=("radius_head.weight", "radius_head.bias"),
    where="losses.append(F.mse_loss",
    faulty=loop(TwoHeads, clusters, radius_term_lost),
    fixed=loop(TwoHeads, clusters, label_and_radius),
)


class LabelHead(TwoHeads):
    """Without the head that its task does not need."""

    def __init__(self):
        super().__init__()
        del self.radius_head

    def forward(self, x):
        return {"label": self.label_head(self.trunk(x))}


unused(
    "head_of_another_task_in_a_loop_that_declares_what_is_frozen",
    ("radius_head.weight", "radius_head.bias"),
    TwoHeads,
    LabelHead,
    without_radius,
    label_only,
    frozen=(),
)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


# An auxiliary classifier that is built and never called: advice.


class Auxiliary(ConvNet):
    def __init__(self):
        super().__init__()
        self.auxiliary = nn.Linear(48, 4)


class AuxiliaryCalled(Auxiliary):
    def forward(self, x):
        hidden = self.features(x).flatten(1)
        return self.head(hidden) + 0.3 * self.auxiliary(hidden)


unused(
    "auxiliary_never_called_and_not_frozen",
    ("auxiliary.weight", "auxiliary.bias"),
    Auxiliary,
    AuxiliaryCalled,
    data.images,
    classify,
    frozen=(),
)


# A trial before training makes a table of prototypes, and the model keeps it.


class Prototypes(nn.Module):
    def __init__(self, keeps):
        super().__init__()
        self.classes, self.encoder, self.table = nn.Embedding(3, 8), nn.Linear(6, 8), None
        with torch.no_grad():
            self(torch.zeros(1, 6))
        self.table = self.table if keeps else None

    def forward(self, x):
        table = self.classes.weight.tanh() if self.table is None else self.table
        if not torch.is_grad_enabled():
            self.table = table
        return self.encoder(x) @ table.T


def largest_of_three():
    x = torch.randn(24, 6)
    return x, x[:, :3].argmax(1)


unused(
    "table_made_in_a_trial_before_training",
    ("classes.weight",),
    lambda: Prototypes(keeps=True),
    lambda: Prototypes(keeps=False),
    largest_of_three,
    lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    level="advice",
)
