"""Statistics that move more than once a step, on purpose or without harm, under checkpoints and without."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import points


class Checkpointed(nn.Module):
    """A classifier whose body, with its norm, is recomputed."""

    def __init__(self, norm, recompute=True):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 16), nn.Sequential(norm, nn.Tanh()), nn.Linear(16, 4)
        self.recompute = recompute

    def forward(self, x):
        h = self.stem(x)
        h = checkpoint(self.body, h, use_reentrant=False) if self.recompute else self.body(h)
        return self.head(h)


def classifier(model, fit=None, batch=None, loss_of=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    loss_of = loss_of or (lambda item: F.cross_entropy(model(item[0]), item[1]))

    def plain(batches):
        for item in batches:
            optimizer.zero_grad()
            loss_of(item).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=batch or points(), fit=fit(optimizer) if fit else plain)


@odd(notes="the momentum of a norm under a checkpoint is made for two updates a step")
def momentum_made_for_the_recomputation(checkpoint=True) -> TrainLoop:
    return classifier(Checkpointed(nn.BatchNorm1d(16, momentum=1 - 0.9**0.5), recompute=checkpoint))


@odd(notes="a cumulative average counts every batch twice under a checkpoint, and stays the same average")
def cumulative_average_under_a_checkpoint() -> TrainLoop:
    return classifier(Checkpointed(nn.BatchNorm1d(16, momentum=None)))


@odd(notes="a frozen norm under a checkpoint: its statistics do not move")
def frozen_norm_under_a_checkpoint() -> TrainLoop:
    model = Checkpointed(nn.BatchNorm1d(16))

    def fit(optimizer):
        def run(batches):
            model.train()
            model.body[0].eval()
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return run

    return classifier(model, fit)


@odd(notes="a norm that keeps no statistics, under a checkpoint")
def norm_without_statistics_under_a_checkpoint() -> TrainLoop:
    return classifier(Checkpointed(nn.BatchNorm1d(16, track_running_stats=False)))


@odd(notes="statistics are measured anew after training, as weight averaging needs it: what they were does not count")
def statistics_measured_anew_at_the_end() -> TrainLoop:
    model = Checkpointed(nn.BatchNorm1d(16))

    def fit(optimizer):
        def run(batches):
            seen = []
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen.append(x)
            if seen:
                torch.optim.swa_utils.update_bn(seen[:2], model)

        return run

    return classifier(model, fit)


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, one, two):
        a, b = self.body(one), self.body(two)
        return -(
            F.cosine_similarity(self.predictor(a), b.detach()).mean()
            + F.cosine_similarity(self.predictor(b), a.detach()).mean()
        )


@odd(notes="SimSiam: two views go through one encoder and one predictor with batch norms")
def two_views_through_batch_norms() -> TrainLoop:
    model = SimSiam()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 8, generator=generator)
    views = (x + 0.1 * torch.randn(16, 8, generator=generator), x + 0.1 * torch.randn(16, 8, generator=generator))
    return classifier(model, batch=views, loss_of=lambda item: model(*item))


@odd(notes="a mean teacher inside the loop is a copy in training mode: its norms see the batch as the student's do")
def mean_teacher_with_batch_norms() -> TrainLoop:
    student = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            out = student(x)
            optimizer.zero_grad()
            (F.cross_entropy(out, y) + 0.1 * F.mse_loss(out.softmax(-1), wanted)).backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)

    return TrainLoop(model={"student": student, "teacher": teacher}, optimizer=optimizer, batch=points(), fit=fit)
