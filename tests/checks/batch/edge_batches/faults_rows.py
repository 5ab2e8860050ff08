"""What a loop meets once in an epoch: one row, and the loader's last batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops import data, plain
from tests.loops.nets import mlp
from tests.loops.pairs import pair

CHECK = "edge_batches"


# One row, and squeeze() without a dim.


class Pooled(nn.Module):
    """Features pooled to one pixel, which is then squeezed away."""

    def __init__(self, squeeze):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)
        self.squeeze = squeeze

    def forward(self, x):
        return self.head(self.squeeze(self.pool(self.features(x))))


def squeeze_all(x):
    return x.squeeze()


class Trainer:
    def __init__(self, model, rate=0.02):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, images, labels):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, batches):
        return [self.train_step(images, labels) for images, labels in batches]


def pooled(squeeze):
    def make():
        trainer = Trainer(Pooled(squeeze))
        return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batch=data.images(), fit=trainer.fit)

    return make


pair(
    "pooled_features_of_one_image_lose_their_row_normed",
    CHECK,
    "row_axis_squeezed",
    level="advice",
    culprits=("squeeze()",),
    where="return x.squeeze()",
    faulty=pooled(squeeze_all),
    fixed=pooled(lambda x: x.squeeze(-1).squeeze(-1)),
)


class Student(nn.Module):
    """As in transformers: the model gives its loss. The teacher's logits stand in the batch."""

    def __init__(self, squeeze):
        super().__init__()
        self.net = mlp(6, 24, 5)
        self.squeeze = squeeze

    def forward(self, inputs, teacher_logits):
        student = F.log_softmax(self.squeeze(self.net(inputs)), dim=-1)
        teacher = F.softmax(self.squeeze(teacher_logits), dim=-1)
        return {"loss": F.kl_div(student, teacher, reduction="batchmean"), "logits": student}


def distilled(squeeze):
    def make():
        model = Student(squeeze)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, _ = data.table(rows=8)
        teacher = torch.stack([x[:, :5].roll(1, 1) * 2, x[:, 1:]], 1)[:, :1]

        def fit(batches):
            for batch in batches:
                model(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()

        batch = {"inputs": x[:, None], "teacher_logits": teacher}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


pair(
    "batchmean_of_one_row_divides_by_the_classes",
    CHECK,
    "row_axis_squeezed",
    culprits=("squeeze()",),
    mentions=("0.2 times as long",),
    faulty=distilled(squeeze_all),
    fixed=distilled(lambda x: x.squeeze(1)),
)


# The loader's own last batch.


def epochs(model, loss_of, batch, loader, rate=0.01, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    return plain.loop(model, batch, loss_of, optimizer, batches=loader, **fields)


def with_batch_norm(drop_last):
    def make():
        x, y = data.labelled(rows=401)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        loader = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=drop_last)
        return epochs(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x[:8], y[:8]), loader)

    return make


pair(
    "batch_norm_meets_a_leftover_row",
    CHECK,
    "leftover_batch",
    culprits=("DataLoader",),
    faulty=with_batch_norm(drop_last=False),
    fixed=with_batch_norm(drop_last=True),
)


def policy(normalised):
    """Advantages normalised over the minibatch, which at times is one row."""

    def make():
        generator = torch.Generator().manual_seed(3)
        states, actions = data.labelled(rows=301, classes=4)
        returns = torch.randn(301, generator=generator) + (actions == 1)
        rows = [{"state": s, "action": a, "return": r} for s, a, r in zip(states, actions, returns, strict=True)]
        model = mlp(6, 24, 4)

        def loss_of(model, batch):
            chosen = F.log_softmax(model(batch["state"]), -1).gather(1, batch["action"][:, None])[:, 0]
            return -(normalised(batch["return"]) * chosen).mean()

        loader = DataLoader(rows, batch_size=12, shuffle=True, generator=generator)
        first = {name: torch.stack([row[name] for row in rows[:12]]) for name in rows[0]}
        return epochs(model, loss_of, first, loader, nondeterministic=False)

    return make


def by_deviation(advantages):
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


pair(
    "advantages_of_one_row_have_no_deviation",
    CHECK,
    "leftover_batch",
    culprits=("DataLoader", "std"),
    where="return (advantages - advantages.mean())",
    faulty=policy(by_deviation),
    fixed=policy(lambda a: by_deviation(a) if len(a) > 1 else a),
)
