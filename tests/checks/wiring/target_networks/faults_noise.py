"""Teachers and references that give targets in training mode."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.random_data import fresh, points


def dropping():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


class Distilled(nn.Module):
    """A student with its teacher; ``quiet`` keeps the teacher in evaluation mode whatever the whole is in."""

    def __init__(self, quiet):
        super().__init__()
        self.student, self.teacher, self.quiet = relu_mlp(8, 12, 4), dropping(), quiet
        self.teacher.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        if self.quiet:
            self.teacher.eval()
        return self

    def forward(self, x, y, temperature=2.0):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / temperature, dim=1)
        scores = self.student(x)
        distilled = F.kl_div(F.log_softmax(scores / temperature, dim=1), soft, reduction="batchmean")
        return F.cross_entropy(scores, y) + temperature**2 * distilled


class DistilledFromItself(Distilled):
    def __init__(self, quiet):
        super().__init__(quiet)
        self.student = copy.deepcopy(self.teacher).requires_grad_(True).train()


def distilling(quiet, kind=Distilled):
    def make():
        model = kind(quiet)
        optimizer = torch.optim.Adam(model.student.parameters(), lr=3e-3)

        def fit(batches):
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                model(x, y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


pair(
    "teacher_switched_on_with_its_student",
    "target_networks",
    "dropout_in_targets",
    culprits=("teacher",),
    where="soft = F.softmax(self.teacher(x)",
    faulty=distilling(quiet=False),
    fixed=distilling(quiet=True),
    quick=True,
)


# https://github.com/yxuansu/TaCL/issues/11: a teacher that is copied where the model is made.

pair(
    "teacher_copied_and_switched_on",
    "target_networks",
    "dropout_in_targets",
    culprits=("teacher",),
    faulty=distilling(quiet=False, kind=DistilledFromItself),
    fixed=distilling(quiet=True, kind=DistilledFromItself),
)


class Policy(nn.Module):
    def __init__(self, vocabulary=12, width=16):
        super().__init__()
        self.embed, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.2)
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.drop(self.rnn(self.drop(self.embed(ids)))[0]))


def log_probability(model, ids):
    scores = model(ids[:, :-1]).log_softmax(-1)
    return scores.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)


def answers(rows=8, length=6):
    return torch.randint(12, (rows, length)), torch.randint(12, (rows, length))


def preferring(reference_of):
    def make():
        policy = Policy()
        reference = reference_of(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

        def fit(batches, beta=0.4):
            policy.train()
            for chosen, rejected in batches:
                with torch.no_grad():
                    before = log_probability(reference, chosen) - log_probability(reference, rejected)
                now = log_probability(policy, chosen) - log_probability(policy, rejected)
                optimizer.zero_grad()
                (-F.logsigmoid(beta * (now - before)).mean()).backward()
                optimizer.step()

        return TrainLoop(model=policy, optimizer=optimizer, batch=answers(), batches=fresh(answers), fit=fit)

    return make


pair(
    "reference_policy_with_dropout",
    "target_networks",
    "dropout_in_targets",
    culprits=("reference",),
    faulty=preferring(copy.deepcopy),
    fixed=preferring(lambda policy: copy.deepcopy(policy).eval()),
)


def computed_ahead(quiet):
    def make():
        policy = Policy()
        chosen, rejected = answers(24)
        policy.train(not quiet) if quiet else None
        with torch.no_grad():
            before = log_probability(policy, chosen) - log_probability(policy, rejected)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

        def taken(n):
            for _ in range(n):
                rows = torch.randperm(24)[:8]
                yield {"chosen": chosen[rows], "rejected": rejected[rows], "reference": before[rows]}

        def fit(batches, beta=0.4):
            policy.train()
            for batch in batches:
                now = log_probability(policy, batch["chosen"]) - log_probability(policy, batch["rejected"])
                optimizer.zero_grad()
                (-F.logsigmoid(beta * (now - batch["reference"])).mean()).backward()
                optimizer.step()

        return TrainLoop(model=policy, optimizer=optimizer, batch=next(taken(1)), batches=taken, fit=fit)

    return make


pair(
    "reference_computed_ahead_with_dropout",
    "target_networks",
    "dropout_in_targets",
    culprits=("reference",),
    where="scores = model(ids[:, :-1]).log_softmax(-1)",
    faulty=computed_ahead(quiet=False),
    fixed=computed_ahead(quiet=True),
)
