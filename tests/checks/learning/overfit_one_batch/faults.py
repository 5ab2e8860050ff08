"""Loops whose one fixed batch is not learned: the model cannot use its input, or what moves the weights is at fault."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import GPT, lm_loss, mlp
from tests.loops.pairs import pair


def train(optimizer, batches, loss_of):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()


# A mask that is set where tokens are, where it should be set where padding is: attention sees nothing but padding.


class Pooled(nn.Module):
    def __init__(self, hide):
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.score = nn.Linear(24, 1)
        self.head = nn.Linear(24, 3)
        self.hide = hide

    def forward(self, ids):
        x = self.embed(ids)
        weights = self.score(x).squeeze(-1).masked_fill(self.hide(ids), -1e9).softmax(1)
        return self.head((weights.unsqueeze(-1) * x).sum(1))


def pooled(hide):
    def make():
        model = Pooled(hide)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = (data.tokens(rows=12, vocab=15)[0] + 1).masked_fill(torch.arange(12) > 8, 0)
        batch = {"input_ids": ids, "labels": torch.arange(12) % 3}
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch,
            fit=lambda batches: train(
                optimizer, batches, lambda b: F.cross_entropy(model(b["input_ids"]), b["labels"])
            ),
        )

    return make


# A schedule that is meant for epochs, stepped after every batch.


def language_model(per_batch):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        def fit(batches):
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                lm_loss(model, batch).backward()
                optimizer.step()
                if per_batch or number % 200 == 199:
                    schedule.step()

        return TrainLoop(model=model, optimizer=optimizer, scheduler=schedule, batch=data.tokens(), fit=fit)

    return make


pair(
    "epoch_schedule_stepped_per_batch",
    "overfit_one_batch",
    "lr_decays_too_early",
    culprits=("lr",),
    where="optimizer.step()",
    change="StepLR(optimizer, step_size=1, gamma=0.5)",
    faulty=language_model(per_batch=True),
    fixed=language_model(per_batch=False),
)


# A bound on the gradients that was meant for something else, in a project with a trainer of its own.


class Trainer:
    """A project's own trainer: a clip, a step for each batch."""

    def __init__(self, bound, clip=nn.utils.clip_grad_norm_):
        self.model = mlp(6, 32, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.bound = bound
        self.clip = clip

    def training_step(self, batch):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.clip(self.model.parameters(), self.bound)
        self.optimizer.step()


def clipped(bound, clip=nn.utils.clip_grad_norm_):
    def make():
        trainer = Trainer(bound, clip)
        return TrainLoop(
            model=trainer.model, optimizer=trainer.optimizer, batch=data.labelled(), step=trainer.training_step
        )

    return make


pair(
    "clip_far_below_the_gradient",
    "overfit_one_batch",
    "gradients_clipped_away",
    culprits=("clip_grad_norm_",),
    where="self.clip(self.model.parameters(), self.bound)",
    faulty=clipped(1e-4),
    fixed=clipped(1.0),
)

pair(
    "clip_of_each_entry_far_below_the_gradient",
    "overfit_one_batch",
    "gradients_clipped_away",
    culprits=("clip_grad_value_",),
    where="self.clip(self.model.parameters(), self.bound)",
    faulty=clipped(1e-5, nn.utils.clip_grad_value_),
    fixed=clipped(1.0, nn.utils.clip_grad_value_),
)


# An optimizer of the project's own that turns its step round: it climbs.


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, sign):
        super().__init__(params, {"lr": lr})
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.add_(mean, alpha=self.sign * group["lr"])


def own_optimizer(sign):
    def make():
        model = mlp(6, 32, 3)
        optimizer = Momentum(model.parameters(), lr=0.1, sign=sign)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, lambda b: F.cross_entropy(model(b[0]), b[1])),
        )

    return make


pair(
    "own_optimizer_that_climbs",
    "overfit_one_batch",
    "not_learning",
    culprits=("optimizer",),
    faulty=own_optimizer(1.0),
    fixed=own_optimizer(-1.0),
)


# Four saturating layers under plain gradient descent: the class shares are learned at once, then nothing for long.


def plateau(activation):
    def make():
        layers = [
            nn.Linear(6, 16),
            *(layer for _ in range(3) for layer in (activation(), nn.Linear(16, 16))),
            activation(),
        ]
        model = nn.Sequential(*layers, nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.labelled(),
            fit=lambda batches: train(optimizer, batches, lambda b: F.cross_entropy(model(b[0]), b[1])),
        )

    return make


pair(
    "plateau_of_saturated_layers",
    "overfit_one_batch",
    "learns_slowly",
    level="advice",
    culprits=("lr",),
    faulty=plateau(nn.Sigmoid),
    fixed=plateau(nn.Tanh),
)


# The best weights so far are written back after every step; the best are those of the start.


def keeping_the_best(restore):
    def make():
        model = mlp(6, 32, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        best = {name: value.clone() for name, value in model.state_dict().items()}

        def fit(batches):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if restore:
                    model.load_state_dict(best)

        return TrainLoop(model=model, optimizer=optimizer, batch=data.labelled(), fit=fit)

    return make


pair(
    "weights_put_back_after_every_step",
    "overfit_one_batch",
    "update_undone",
    culprits=("weights",),
    where="optimizer.step()",
    faulty=keeping_the_best(restore=True),
    fixed=keeping_the_best(restore=False),
)


# A decay that was meant as a factor per epoch.


def decayed(amount):
    def make():
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=amount)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=data.tokens(),
            fit=lambda batches: train(optimizer, batches, lambda b: lm_loss(model, b)),
        )

    return make


pair(
    "decay_that_drowns_the_gradient",
    "overfit_one_batch",
    "weight_decay_dominates",
    culprits=("weight_decay",),
    where="optimizer.step()",
    faulty=decayed(300.0),
    fixed=decayed(0.01),
)


# Pixels are divided as whole numbers: every image is black.


def pixels(scale):
    def make():
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        images, labels = data.images(rows=16)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=((images * 50 + 120).clamp(0, 254).to(torch.uint8), labels),
            fit=lambda batches: train(optimizer, batches, lambda b: F.cross_entropy(model(scale(b[0])), b[1])),
        )

    return make


pair(
    "pixels_divided_as_whole_numbers",
    "input_dependence",
    "inputs_ignored",
    culprits=("batch[0]",),
    faulty=pixels(lambda x: (x // 255).to(torch.get_default_dtype())),
    fixed=pixels(lambda x: x.to(torch.get_default_dtype()) / 255),
)


# Features are averaged over the rows, not over the positions.


class Averaged(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.embed, self.head, self.axis = nn.Embedding(16, 32), nn.Linear(32, 3), axis

    def forward(self, ids):
        hidden = self.embed(ids)
        pooled = hidden.mean(self.axis)
        return self.head(pooled if self.axis == 1 else pooled.mean(0).expand(len(ids), -1))


def averaged(axis):
    def make():
        model = Averaged(axis)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = (data.tokens(rows=12, vocab=16)[0], torch.arange(12) % 3)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch,
            fit=lambda batches: train(optimizer, batches, lambda b: F.cross_entropy(model(b[0]), b[1])),
        )

    return make


pair(
    "words_averaged_over_the_rows",
    "overfit_one_batch",
    "input_unused",
    culprits=("model",),
    faulty=averaged(0),
    fixed=averaged(1),
)


# A loss over the examples that still violate a margin, of which none is left once the batch is learned.


class Embedder(nn.Module):
    def __init__(self, average):
        super().__init__()
        self.trunk, self.average = mlp(20, 48, 16), average

    def forward(self, x, who):
        z = F.normalize(self.trunk(x), dim=-1)
        near, same = z @ z.T, who[:, None] == who[None, :]
        violation = F.relu(near[:, None, :] - near[:, :, None] + 0.2)
        valid = (same & ~torch.eye(len(who), dtype=torch.bool))[:, :, None] & ~same[:, None, :]
        return self.average(violation, valid & (violation > 0))


def faces(average, skip=False):
    def make():
        model = Embedder(average)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for x, who in batches:
                loss = model(x, who)
                if skip and not loss.isfinite():
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        def draw():
            who = torch.arange(5).repeat_interleave(4)
            return torch.randn(5, 20)[who] + 0.7 * torch.randn(20, 20), who

        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=draw(),
            batches=lambda n: (draw() for _ in range(n)),
            fit=fit,
            rows_interact=True,
        )

    return make


pair(
    "mean_over_the_triplets_that_are_left",
    "overfit_one_batch",
    "nan_once_learned",
    culprits=("mean",),
    where="faulty=faces(lambda violation, active: violation[active].mean())",
    faulty=faces(lambda violation, active: violation[active].mean()),
    fixed=faces(lambda violation, active: violation[active].sum() / max(1, int(active.sum()))),
)
pair(
    "sum_over_the_count_of_what_is_left",
    "overfit_one_batch",
    "nan_once_learned",
    culprits=("div",),
    where="(violation * active).sum() / active.sum()",
    faulty=faces(lambda violation, active: (violation * active).sum() / active.sum()),
    fixed=faces(lambda violation, active: (violation * active).sum() / active.sum().clamp_min(1)),
)
