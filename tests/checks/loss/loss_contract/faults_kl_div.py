"""Distillation: what kl_div is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.loops import data
from tests.loops.nets import mlp
from tests.loops.pairs import pair


class Distiller:
    """A student that is to give what a teacher gives."""

    def __init__(self, divergence):
        self.teacher = mlp(6, 16, 5).eval().requires_grad_(False)
        for layer in (self.teacher[0], self.teacher[2]):
            torch.nn.init.normal_(layer.weight, std=1.0)
        self.student = mlp(6, 32, 5)
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=1e-2)
        self.divergence = divergence

    def fit(self, batches):
        for features, _labels in batches:
            with torch.no_grad():
                teacher = self.teacher(features)
            loss = self.divergence(self.student(features), teacher)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def distilled(divergence):
    def make():
        distiller = Distiller(divergence)
        return TrainLoop(
            model={"student": distiller.student, "teacher": distiller.teacher},
            optimizer=distiller.optimizer,
            batch=data.labelled(classes=5),
            fit=distiller.fit,
            frozen=("teacher",),
        )

    return make


def kl(student, teacher, reduction="batchmean", **kwargs):
    return F.kl_div(student, teacher, reduction=reduction, **kwargs)


def log(scores):
    return F.log_softmax(scores, dim=-1)


def prob(scores):
    return F.softmax(scores, dim=-1)


def kl_pair(name, cause, faulty, fixed=lambda s, t: kl(log(s), prob(t)), *, mentions=(), level="fault"):
    pair(
        name,
        "loss_contract",
        cause,
        mentions=mentions,
        level=level,
        faulty=distilled(faulty),
        fixed=distilled(fixed),
    )


kl_pair(
    "probabilities_of_the_student_into_kl_div",
    "probabilities_as_log_probabilities",
    lambda s, t: kl(prob(s), prob(t)),
)
kl_pair("scores_of_the_student_into_kl_div", "logits_as_log_probabilities", lambda s, t: kl(s, prob(t)))
kl_pair(
    "logarithms_as_targets",
    "log_target_mismatch",
    lambda s, t: kl(log(s), log(t)),
    lambda s, t: kl(log(s), log(t), log_target=True),
)
kl_pair(
    "probabilities_with_log_target",
    "log_target_mismatch",
    lambda s, t: kl(log(s), prob(t), log_target=True),
)
kl_pair(
    "scores_of_the_teacher_into_kl_div",
    "logits_as_probabilities",
    lambda s, t: kl(log(s), t),
)
kl_pair(
    "arguments_of_kl_div_swapped",
    "arguments_swapped",
    lambda s, t: kl(prob(t), log(s)),
)
kl_pair(
    "mean_over_all_entries_of_kl_div",
    "mean_over_elements",
    lambda s, t: kl(log(s), prob(t), "mean"),
    level="advice",
)
kl_pair(
    "scores_times_the_temperature",
    "temperature_inverted",
    lambda s, t: kl(log(s * 4.0), prob(t * 4.0)) * 16,
    lambda s, t: kl(log(s / 4.0), prob(t / 4.0)) * 16,
)
kl_pair(
    "student_over_rows_teacher_over_classes",
    "wrong_axis",
    lambda s, t: kl(F.log_softmax(s, dim=0), prob(t)),
)
kl_pair(
    "both_sides_over_the_rows",
    "wrong_axis",
    lambda s, t: kl(F.log_softmax(s, dim=0), F.softmax(t, dim=0)),
)
