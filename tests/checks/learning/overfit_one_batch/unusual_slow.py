"""Loops that learn slowly on purpose, or on a plateau that they leave later."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.learning.overfit_one_batch.faults import faces
from tests.loops import data
from tests.loops.nets import mlp, relu_mlp
from tests.loops.odd import odd


def loop(model, batch, loss_of, optimizer, schedule=None):
    def fit(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(model, item).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, scheduler=schedule)


def classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def regressed(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


@odd(notes="a pretrained model is tuned at a hundredth of the usual rate: the loss falls a little at every step")
def fine_tuned_at_a_low_rate() -> TrainLoop:
    generator = torch.Generator().manual_seed(3)
    model = mlp(6, 24, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return loop(model, data.labelled(), classified, torch.optim.AdamW(model.parameters(), lr=2e-5))


@odd(notes="the rate warms up over ten thousand steps, of which a short run sees the first hundreds")
def warm_up_of_ten_thousand_steps() -> TrainLoop:
    model = relu_mlp(6, 24, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10_000))
    return loop(model, data.labelled(), classified, optimizer, schedule)


@odd(notes="plain gradient descent without momentum, on features of unequal size")
def plain_descent_on_unequal_features() -> TrainLoop:
    x, y = data.table()
    model = relu_mlp(6, 24, 1)
    scale = torch.tensor([1.0, 0.3, 0.1, 1.0, 0.3, 0.1])
    return loop(model, (x * scale, y), regressed, torch.optim.SGD(model.parameters(), lr=0.02))


@odd(notes="a margin that most rows already keep: what is left of the hinge falls slowly")
def hinge_that_is_nearly_met() -> TrainLoop:
    x, y = data.labelled(classes=2)
    model = nn.Linear(6, 1)
    sign = (2 * y - 1).to(x.dtype)[:, None]
    with torch.no_grad():
        model.weight.copy_((x * sign).mean(0, keepdim=True))

    def loss_of(model, batch):
        return F.relu(1 - batch[1] * model(batch[0])).mean() + 0.5

    return loop(model, (x, sign), loss_of, torch.optim.SGD(model.parameters(), lr=1e-3))


@odd(notes="labels of which a third are wrong, smoothed by a half: no model comes far below where it starts")
def noisy_labels_smoothed_by_a_half() -> TrainLoop:
    x, y = data.labelled(rows=48)
    noisy = torch.where(torch.arange(48) % 3 == 0, (y + 1) % 3, y)
    model = nn.Linear(6, 3)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.5)

    return loop(model, (x, noisy), loss_of, torch.optim.SGD(model.parameters(), lr=0.05))


class Gated(nn.Module):
    """A zero-initialised branch carries what is learned: nothing moves until the gate has opened."""

    def __init__(self):
        super().__init__()
        self.body, self.gate, self.head = mlp(6, 24, 24), nn.Parameter(torch.zeros(24)), nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.gate * torch.tanh(self.body(x)))


@odd(notes="a gate at zero opens over the first hundred steps")
def gate_that_opens_slowly() -> TrainLoop:
    model = Gated()
    return loop(model, data.table(), regressed, torch.optim.Adam(model.parameters(), lr=1e-3))


@odd(notes="the mean over no triplet is NaN once all are learned: such a batch is left out openly")
def batches_without_a_triplet_are_left_out() -> TrainLoop:
    return faces(lambda violation, active: violation[active].mean(), skip=True)()


@odd(notes="the mean over no entry is replaced by 0, in a way that keeps its gradient at 0 too")
def mean_of_nothing_is_replaced() -> TrainLoop:
    return faces(lambda violation, active: torch.nan_to_num(violation[active].sum() / active.sum().clamp_min(1)))()
