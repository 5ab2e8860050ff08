"""Losses that are computed with a history and not backpropagated, on purpose: logged, kept, off, or for later."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import mlp
from tests.loops.odd import odd
from tests.loops.random_data import points


class Joint(nn.Module):
    """A classifier that also reconstructs its input."""

    def __init__(self):
        super().__init__()
        self.encoder, self.kind, self.decoder = mlp(8, 24, 12), nn.Linear(12, 4), nn.Linear(12, 8)

    def forward(self, x):
        hidden = torch.tanh(self.encoder(x))
        return self.kind(hidden), self.decoder(hidden)


def classifier(fit_of):
    model = Joint()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=lambda b: fit_of(model, optimizer, b))


def stepped(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@odd(notes="a second measure of the same output is logged, with a history since nobody switched gradients off")
def absolute_error_logged_beside_the_squared() -> TrainLoop:
    log = []

    def fit(model, optimizer, batches):
        for x, y in batches:
            kind, image = model(x)
            mae = F.l1_loss(image, x)
            log.append(mae.item())
            stepped(optimizer, F.cross_entropy(kind, y) + F.mse_loss(image, x))

    return classifier(fit)


@odd(notes="all measures are gathered in a dict, of which the loop backpropagates two")
def losses_in_a_dict_of_which_one_is_a_metric() -> TrainLoop:
    def fit(model, optimizer, batches):
        for x, y in batches:
            kind, image = model(x)
            losses = {"kind": F.cross_entropy(kind, y), "image": F.mse_loss(image, x)}
            losses["margin"] = F.multi_margin_loss(kind, y)
            stepped(optimizer, losses["kind"] + losses["image"])

    return classifier(fit)


@odd(notes="a term is switched off by its weight in this configuration: `if weight` leaves it out")
def term_switched_off_by_its_weight() -> TrainLoop:
    def fit(model, optimizer, batches, smooth_weight=0.0):
        for x, y in batches:
            kind, image = model(x)
            smooth = F.smooth_l1_loss(image, x)
            loss = F.cross_entropy(kind, y) + F.mse_loss(image, x)
            if smooth_weight > 0:
                loss = loss + smooth_weight * smooth
            stepped(optimizer, loss)

    return classifier(fit)


class WithOwnLoss(Joint):
    """Like a library's model, it returns a loss of its own beside the scores."""

    def forward(self, x, labels=None):
        kind, image = super().forward(x)
        return SimpleNamespace(loss=F.cross_entropy(kind, labels), logits=kind, image=image)


@odd(notes="the model returns a loss of its own, and the loop takes the scores to weigh classes and smooth labels")
def own_loss_in_place_of_the_one_that_the_model_returns() -> TrainLoop:
    model = WithOwnLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(batches):
        for x, y in batches:
            out = model(x, labels=y)
            loss = F.cross_entropy(out.logits, y, label_smoothing=0.05) + F.mse_loss(out.image, x)
            stepped(optimizer, loss)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="the loss on held-out rows is computed with gradients on, and only compared with the best so far")
def validation_loss_with_a_history() -> TrainLoop:
    def fit(model, optimizer, batches):
        best = float("inf")
        for x, y in batches:
            held_out = F.cross_entropy(model(x[:2])[0], y[:2])
            best = min(best, float(held_out))
            kind, image = model(x[2:])
            stepped(optimizer, F.cross_entropy(kind, y[2:]) + F.mse_loss(image, x[2:]))

    return classifier(fit)


def split_in_two(model, criterion):
    """pygcn and pyGAT: after each step the model is evaluated, without no_grad(), on the nodes that it is not trained
    on."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def fit(batches):
        for x, y in batches:
            model.train()
            optimizer.zero_grad()
            criterion(model(x)[::2], y[::2]).backward()
            optimizer.step()
            model.eval()
            loss_val = criterion(model(x)[1::2], y[1::2])
            assert loss_val.item() < 1e6

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="the loss of a validation in evaluation mode has a history, since nobody switched gradients off")
def validation_in_evaluation_mode_with_a_history() -> TrainLoop:
    layers = nn.Linear(8, 16), nn.ELU(), nn.Dropout(0.5), nn.Linear(16, 4), nn.LogSoftmax(1)
    return split_in_two(nn.Sequential(*layers), F.nll_loss)


@odd(notes="an energy-based critic raises the error of fakes up to a margin, and lowers that of real examples (EBGAN)")
def error_of_fakes_raised_up_to_a_margin() -> TrainLoop:
    generator, critic = mlp(4, 16, 8), mlp(8, 4, 8)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    pixelwise = nn.MSELoss()

    def fit(batches):
        for real, _ in batches:
            fake = generator(torch.randn(len(real), 4))
            stepped(of_generator, pixelwise(critic(fake), fake.detach()))
            of_real = pixelwise(critic(real), real)
            of_fakes = pixelwise(critic(fake.detach()), fake.detach())
            loss = of_real
            if (10.0 - of_fakes.data).item() > 0:
                loss += 10.0 - of_fakes
            stepped(of_critic, loss)

    return TrainLoop(model=[generator, critic], optimizer=[of_generator, of_critic], batch=points(), fit=fit)
