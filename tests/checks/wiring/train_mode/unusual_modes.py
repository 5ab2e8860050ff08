"""Modes that look wrong and are meant."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import curves, images, points


def dropping(width=8, classes=4):
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, classes))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@odd(notes="batch norms are in evaluation mode all through fine-tuning: batches are too small for statistics")
def mode_norms_in_eval():
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            model.train()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit)


@odd(notes="trained in evaluation mode, and nothing in the model acts by mode")
def mode_eval_without_effect():
    model = relu_mlp(8, 16, 4).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="fit trains to the end, tests, and leaves the model ready to be used; a resumed run is in training mode")
def mode_left_for_use():
    model = dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-2)

    def fit(batches, epochs=1):
        for epoch in range(epochs):
            for x, y in batches:
                step(model, optimizer, x, y)
            if epoch == epochs - 1:
                with torch.no_grad():
                    (model.eval()(points()[0]).argmax(1) == points()[1]).float().mean().item()

    def save(path):
        torch.save([model.state_dict(), torch.get_rng_state()], path)

    def load(path):
        state, random = torch.load(path)
        model.load_state_dict(state)
        torch.set_rng_state(random)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit, save=save, load=load)


@odd(notes="dropout of rate 0 in evaluation mode: switched or not, it passes everything on")
def mode_eval_with_dropout_of_zero():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 4)).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="uncertainty by dropout: the evaluation averages passes with dropout on, on purpose (declared by no one)")
def mode_monte_carlo_dropout_for_the_targets():
    model = dropping()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                spread = torch.stack([model(x).softmax(1) for _ in range(3)]).var(0).sum(1)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y, reduction="none") * (1 + spread)).mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="pseudo-labels come from passes in evaluation mode, between two passes in training mode")
def mode_pseudo_labels_in_eval():
    model = dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            model.eval()
            with torch.no_grad():
                guessed = model(x + 0.05).argmax(1)
            model.train()
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(x + 0.05), guessed)).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="adversarial examples are made in evaluation mode with gradients, and trained on in training mode")
def mode_adversary_in_eval():
    model = dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            model.eval()
            moved = x.clone().requires_grad_(True)
            (direction,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
            model.train()
            step(model, optimizer, x + 0.05 * direction.sign(), y)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="statistics of batch norm are measured anew in training mode without gradients, before each validation")
def mode_statistics_refreshed():
    model = convolutional()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        seen = []
        for i, (x, y) in enumerate(batches, start=1):
            model.train()
            seen.append(x)
            step(model, optimizer, x, y)
            if i % 4 == 0:
                with torch.no_grad():
                    for earlier in seen:
                        model(earlier)
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(x), y).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit)


@odd(notes="a teacher in training mode gives the targets, with dropout of its own (mean teacher)")
def mode_teacher_in_training():
    student = dropping()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                target = teacher(x)
            loss = F.cross_entropy(student(x), y) + 0.1 * F.mse_loss(student(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)

    return TrainLoop(model=[student, teacher], optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="validation in evaluation mode inside fit, and the mode it had is put back by a context")
def mode_put_back_by_context():
    import contextlib

    model = dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    @contextlib.contextmanager
    def evaluating():
        was = {m: m.training for m in model.modules()}
        model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            for module, training in was.items():
                module.training = training

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            step(model, optimizer, x, y)
            if i % 3 == 0:
                with evaluating():
                    F.cross_entropy(model(x), y).item()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


class Staged(nn.Module):
    """Keeps its first part in evaluation mode whatever ``train`` is told."""

    def __init__(self):
        super().__init__()
        self.first, self.second = dropping(8, 16), dropping(16, 4)

    def train(self, mode=True):
        super().train(mode)
        self.first.eval()
        return self

    def forward(self, x):
        return self.second(self.first(x))


@odd(notes="the model's own train() keeps the dropout of its first part off; that part trains all the same")
def mode_kept_by_its_own_train():
    model = Staged()
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for i, (x, y) in enumerate(batches, start=1):
            model.train()
            step(model, optimizer, x, y)
            if i % 4 == 0:
                model.eval()
                with torch.no_grad():
                    model(x)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="dropout is switched off for good half-way through training, by its module (curriculum)")
def mode_dropout_switched_off_later():
    model = dropping()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            if i == 6:
                model[2].eval()
            step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="a policy collects its episodes in training mode without gradients, and learns from them")
def mode_rollout_in_training():
    policy = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def fit(batches):
        for states, _ in batches:
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=policy(states)).sample()
            rewards = (actions == (states[:, 0] > 0)).to(states.dtype)
            chosen = F.log_softmax(policy(states), 1).gather(1, actions[:, None])[:, 0]
            optimizer.zero_grad()
            (-(rewards - rewards.mean()) * chosen).mean().backward()
            optimizer.step()

    return TrainLoop(model=policy, optimizer=optimizer, batch=curves(), fit=fit)


@odd(notes="evaluate switches to evaluation mode, uses batches of one, and puts the mode back")
def mode_evaluate_declared():
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    held_out = images()

    def evaluate():
        was = model.training
        model.eval()
        with torch.no_grad():
            right = [int(model(x[None]).argmax(1) == y) for x, y in zip(*held_out, strict=True)]
        model.train(was)
        return sum(right) / len(right)

    def fit(batches):
        model.train()
        for x, y in batches:
            step(model, optimizer, x, y)

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit, evaluate=evaluate)
