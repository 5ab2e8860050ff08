"""Teachers: in eval mode, in a list, behind hooks, generating the data, or the student's own past."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops import plain
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def soft_loss(student, teacher, y, temperature=3.0, alpha=0.7):
    soft = F.kl_div((student / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="batchmean")
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student, y)


def train_distilled(student, teacher, optimizer, batches):
    student.train()
    teacher.eval()
    for x, y in batches:
        with torch.no_grad():
            aim = teacher(x)
        optimizer.zero_grad()
        soft_loss(student(x), aim, y).backward()
        optimizer.step()


@odd(
    notes="the teacher is declared beside the student, requires grad, runs under no_grad in eval mode, and "
    "nobody holds it; frozen= says so"
)
def distillation_declared_teacher() -> TrainLoop:
    student, teacher = relu_mlp(8, 8, 4), relu_mlp(8, 24, 4)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        frozen=("teacher.",),
        fit=lambda batches: train_distilled(student, teacher, optimizer, batches),
    )


class SelfDistilled(nn.Module):
    """Keeps its teacher in a list so that state_dict(), parameters() and train() do not see it."""

    def __init__(self, teacher):
        super().__init__()
        self.net = relu_mlp(8, 12, 4)
        self.teachers = [teacher.eval()]

    def forward(self, x, y):
        with torch.no_grad():
            aim = self.teachers[0](x)
        return soft_loss(self.net(x), aim, y)


@odd(notes="a module in a plain list, on purpose: the teacher is not registered and must not be trained")
def teacher_hidden_in_a_plain_list() -> TrainLoop:
    model = SelfDistilled(relu_mlp(8, 24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return plain.loop(model, points(), lambda model, batch: model(batch[0], batch[1]), optimizer)


class FeatureTap:
    """Collects a layer's output through a forward hook."""

    def __init__(self, layer):
        self.value = None
        layer.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.value = output


class HintTrainer:
    """FitNets: match a hidden layer of the teacher through a regressor, both read by hooks."""

    def __init__(self, student, teacher):
        self.student, self.teacher, self.regressor = student, teacher, nn.Linear(12, 24)
        self.taps = FeatureTap(student[0]), FeatureTap(teacher[0])
        self.optimizer = torch.optim.Adam([*student.parameters(), *self.regressor.parameters()], lr=5e-3)

    def fit(self, batches):
        for x, y in batches:
            with torch.no_grad():
                self.teacher(x)
            loss = F.cross_entropy(self.student(x), y)
            loss = loss + F.mse_loss(self.regressor(self.taps[0].value), self.taps[1].value)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@odd(
    notes="the loss is made of tensors that forward hooks put aside; "
    "a regressor outside the model is trained with it (FitNets)"
)
def hints_collected_by_forward_hooks() -> TrainLoop:
    student, teacher = relu_mlp(8, 12, 4), relu_mlp(8, 24, 4).eval().requires_grad_(False)
    trainer = HintTrainer(student, teacher)
    return TrainLoop(
        model={"student": student, "regressor": trainer.regressor},
        optimizer=trainer.optimizer,
        batch=points(),
        fit=trainer.fit,
    )


def train_born_again(student, batches, generation=8):
    teacher, optimizer = None, torch.optim.Adam(student.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches, 1):
        logits = student(x)
        if teacher is None:
            loss = F.cross_entropy(logits, y)
        else:
            with torch.no_grad():
                aim = teacher(x)
            loss = soft_loss(logits, aim, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % generation == 0:
            teacher = copy.deepcopy(student).eval()
            for layer in student:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
            optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)


@odd(
    notes="weights are drawn anew in the middle of the loop, with a new optimizer, so the loss jumps up "
    "(born-again networks)"
)
def born_again_networks() -> TrainLoop:
    student = relu_mlp(8, 16, 4)
    return TrainLoop(
        model=student,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_born_again(student, batches),
    )


def train_deep_ensemble(members, optimizers, batches):
    for x, y in batches:
        losses = [F.cross_entropy(member(x), y) for member in members]
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@odd(
    notes="the losses of independent networks are added and backpropagated at once, each with its own "
    "optimizer (ensemble)"
)
def deep_ensemble_summed_losses() -> TrainLoop:
    members = nn.ModuleList([relu_mlp(8, 12, 4) for _ in range(3)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1 * (i + 1)) for i, m in enumerate(members)]
    return TrainLoop(
        model=members,
        optimizer=optimizers,
        batch=points(),
        fit=lambda batches: train_deep_ensemble(members, optimizers, batches),
    )


def train_continual(model, optimizer, batches, switch=6, strength=1.0):
    """Elastic weight consolidation: the squared gradients of the first task hold the weights in the second."""
    anchor, fisher = None, [torch.zeros_like(p) for p in model.parameters()]
    for step, (x, y) in enumerate(batches):
        if step == switch:
            anchor = [p.detach().clone() for p in model.parameters()]
        target = y if anchor is None else (y + 1) % 4
        loss = F.cross_entropy(model(x), target)
        if anchor is not None:
            pulls = zip(fisher, model.parameters(), anchor, strict=True)
            loss = loss + strength * sum((f * (p - a).square()).sum() for f, p, a in pulls)
        optimizer.zero_grad()
        loss.backward()
        if anchor is None:
            for f, p in zip(fisher, model.parameters(), strict=True):
                f.add_(p.grad.square(), alpha=1 / switch)
        optimizer.step()


@odd(
    notes="the task changes in mid-run and the loss jumps; gradients are read and squared by hand beside the step (EWC)"
)
def elastic_weight_consolidation() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_continual(model, optimizer, batches),
    )
