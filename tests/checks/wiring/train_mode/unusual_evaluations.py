"""Forward passes beside those that train: looks in either mode, whose results are used in ways that are no score."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.random_data import images, points


def dropping(width=8, classes=4):
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes))


def normed(classes=4):
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes)
    )


@odd(notes="the clean pass in evaluation mode and the noisy one in training mode go into one loss, both with gradients")
def looking_clean_and_noisy():
    model = dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def fit(batches):
        for x, y in batches:
            model.eval()
            clean = model(x)
            model.train()
            noisy = model(x)
            apart = F.kl_div(noisy.log_softmax(1), clean.softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            (F.cross_entropy(clean, y) + apart).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="rollouts and updates of a policy both run in evaluation mode, so that the ratio of both starts at one")
def looking_policy_alike_in_both():
    policy = dropping(6, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def fit(batches):
        for states in batches:
            policy.eval()
            with torch.no_grad():
                old = torch.distributions.Categorical(logits=policy(states))
                actions = old.sample()
                chosen = old.log_prob(actions)
                reward = torch.sin(states.sum(1)) * actions
                advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
            for _ in range(2):
                now = torch.distributions.Categorical(logits=policy(states))
                ratio = (now.log_prob(actions) - chosen).exp()
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return TrainLoop(model=policy, optimizer=optimizer, batch=torch.randn(12, 6), fit=fit)


@odd(notes="a policy with dropout acts in training mode for a replay buffer that is learned from much later")
def looking_acting_for_a_buffer():
    policy = dropping(6, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    batch = (torch.randn(12, 6), torch.randint(3, (12,)))

    def fit(batches):
        buffer = []
        for i, (states, labels) in enumerate(batches):
            if i % 3 == 0:
                with torch.no_grad():
                    buffer.append((states, torch.distributions.Categorical(logits=policy(states)).sample()))
            loss = F.cross_entropy(policy(states), labels)
            if len(buffer) > 20:
                loss = loss + 0.1 * F.cross_entropy(policy(buffer[0][0]), buffer[0][1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=policy, optimizer=optimizer, batch=batch, fit=fit)


@odd(notes="validation in evaluation mode with gradients left on; nothing is backpropagated from it")
def looking_validated_with_gradients_on():
    model = dropping()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out, labels = points(12)

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i % 3 == 2:
                model.eval()
                (model(held_out).argmax(1) == labels).float().mean().item()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="a rate that waits for a plateau of the validation loss, measured in evaluation mode after each epoch")
def looking_validated_for_a_plateau():
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    held_out, labels = images()

    def fit(batches):
        for i, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i % 3 == 2:
                model.eval()
                with torch.no_grad():
                    plateau.step(F.cross_entropy(model(held_out), labels).item())
                model.train()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit)


@odd(notes="a fixed perceptual net beside the model stays in evaluation mode, with gradients through it")
def looking_through_a_perceptual_net():
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))
    seen = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, _ in batches:
            made = model(x + 0.1 * torch.randn_like(x))
            optimizer.zero_grad()
            (F.l1_loss(made, x) + F.mse_loss(seen(made), seen(x))).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit)


@odd(notes="teachers kept in a plain list, copies of the student in evaluation mode, give targets by their mean")
def looking_at_a_list_of_teachers():
    student = dropping()
    teachers = [copy.deepcopy(student).eval().requires_grad_(False) for _ in range(2)]
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                target = torch.stack([teacher(x).softmax(1) for teacher in teachers]).mean(0)
            made = student(x)
            optimizer.zero_grad()
            (F.cross_entropy(made, y) + F.cross_entropy(made, target)).backward()
            optimizer.step()

    return TrainLoop(model=student, optimizer=optimizer, batch=points(12), fit=fit)


@odd(notes="the generator is in evaluation mode while the critic learns, and the critic while the generator does")
def looking_gan_roles_by_mode():
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    by_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    by_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def fit(batches):
        for real in batches:
            generator.eval()
            critic.train()
            fake = generator(torch.randn(len(real), 4)).detach()
            by_critic.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
            by_critic.step()
            generator.train()
            critic.eval()
            by_generator.zero_grad()
            F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean().backward()
            by_generator.step()

    return TrainLoop(
        model=[generator, critic], optimizer=[by_generator, by_critic], batch=torch.randn(12, 2) + 1.0, fit=fit
    )
