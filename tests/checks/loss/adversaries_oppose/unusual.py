"""Several optimizers whose steps pull in one direction on purpose, and games whose directions depend on the score."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def pictures():
    return points()[0]


def two(first, second, fit, *, batch=pictures, rates=(2e-3, 2e-3)):
    optimizers = [torch.optim.Adam(m.parameters(), lr=r) for m, r in zip((first, second), rates, strict=True)]
    return TrainLoop(
        model={"first": first, "second": second},
        optimizer=optimizers,
        batch=batch(),
        batches=fresh(batch),
        fit=lambda batches: fit(first, second, *optimizers, batches),
    )


def stepped(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def alternate(encoder, decoder, opt_encoder, opt_decoder, batches):
    for x in batches:
        stepped(opt_decoder, F.mse_loss(decoder(encoder(x).detach()), x))
        stepped(opt_encoder, F.mse_loss(decoder(encoder(x)), x))


@odd(notes="two optimizers step in turn, and both lower one loss: encoder and decoder by alternating minimisation")
def encoder_and_decoder_in_turn():
    return two(relu_mlp(8, 16, 4), relu_mlp(4, 16, 8), alternate)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2))
        self.real, self.kind = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.real(h), self.kind(h)


def auxiliary(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        kind = x[:, :3].argmax(1)
        made = generator(torch.cat([torch.randn(len(x), 4), F.one_hot(kind, 3).to(x.dtype)], 1))
        on_data, kind_of_data = critic(x)
        on_made, kind_of_made = critic(made.detach())
        loss = F.softplus(-on_data).mean() + F.softplus(on_made).mean()
        stepped(opt_d, loss + F.cross_entropy(kind_of_data, kind) + F.cross_entropy(kind_of_made, kind))
        score, seen = critic(made)
        stepped(opt_g, F.softplus(-score).mean() + F.cross_entropy(seen, kind))


@odd(notes="critic and generator lower the same auxiliary class loss on what is made (AC-GAN)")
def auxiliary_classes_are_shared():
    return two(relu_mlp(7, 16, 8), TwoHeads(), auxiliary)


class ScoreWithFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2))
        self.head = nn.Linear(16, 1)
        nn.init.constant_(self.head.bias, -3.0)

    def forward(self, x):
        h = self.trunk(x)
        return self.head(h), [h]


def matched(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        stepped(opt_d, (1 - critic(x)[0]).square().mean() + critic(made.detach())[0].square().mean())
        (score, of_made), (_, of_data) = critic(made), critic(x)
        stepped(opt_g, (1 - score).square().mean() + (of_made[0].mean(0) - of_data[0].mean(0).detach()).abs().sum())


@odd(notes="least squares from scores far below both targets, given with features (HiFi-GAN)")
def critic_that_gives_features_too():
    return two(relu_mlp(4, 16, 8), ScoreWithFeatures(), matched)


def three_labels(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        stepped(opt_d, (critic(x) - 1).square().mean() + (critic(made.detach()) + 1).square().mean())
        stepped(opt_g, critic(made).square().mean())


@odd(notes="least squares with labels -1 and 1, and 0 for the generator: below -1 both steps push the same way")
def least_squares_with_three_labels():
    return two(relu_mlp(4, 16, 8), relu_mlp(8, 16, 1), three_labels)


def relativistic(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        stepped(opt_d, F.softplus(critic(made.detach()) - critic(x)).mean())
        stepped(opt_g, F.softplus(critic(x) - critic(made)).mean())


@odd(notes="both steps score data and made pictures; the generator pushes data down (relativistic GAN)")
def relativistic_pairing():
    return two(relu_mlp(4, 16, 8), relu_mlp(8, 16, 1), relativistic)


def labels_turned_for_all(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        stepped(opt_d, F.softplus(critic(x)).mean() + F.softplus(-critic(made.detach())).mean())
        stepped(opt_g, F.softplus(critic(made)).mean())


@odd(notes="data are labelled 0 and what is made 1, in all three losses: turned labels, consistently")
def labels_turned_consistently():
    return two(relu_mlp(4, 16, 8), relu_mlp(8, 16, 1), labels_turned_for_all)


def adapt(extractor, domain, opt_f, opt_d, batches):
    for source, target in batches:
        of_source, of_target = extractor(source), extractor(target)
        loss = F.softplus(-domain(of_source.detach())).mean() + F.softplus(domain(of_target.detach())).mean()
        stepped(opt_d, loss)
        stepped(opt_f, F.softplus(-domain(extractor(target))).mean())


@odd(notes="both sides of the critic come from the network that plays against it: features of two domains")
def two_domains_of_one_extractor():
    return two(relu_mlp(8, 16, 4), relu_mlp(4, 16, 1), adapt, batch=lambda: (pictures(), pictures() + 1.0))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(12, 16, 1)

    def forward(self, x, z):
        return self.net(torch.cat([x, z], 1))


def information(encoder, statistic, opt_e, opt_t, batches):
    for x in batches:
        z = encoder(x).detach()
        stepped(opt_t, F.softplus(statistic(x, z[torch.randperm(len(z))])).mean() + F.softplus(-statistic(x, z)).mean())
        stepped(opt_e, F.softplus(-statistic(x, encoder(x))).mean())


@odd(notes="the encoder raises the score that the statistic raises as well: both maximise mutual information")
def mutual_information_in_turn():
    return two(relu_mlp(8, 16, 4), Pairs(), information)


def joint(generator, critic, opt_g, opt_d, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        loss = critic(made).square().mean() + (critic(x) - 1).square().mean()
        opt_g.zero_grad()
        opt_d.zero_grad()
        loss.backward()
        opt_g.step()
        opt_d.step()


@odd(notes="two optimizers step with the gradients of one backward pass")
def one_backward_for_two_optimizers():
    return two(relu_mlp(4, 16, 8), relu_mlp(8, 16, 1), joint)


def energy(generator, model, opt_g, opt_e, batches):
    for x in batches:
        made = generator(torch.randn(len(x), 4))
        stepped(opt_e, model(x).mean() - model(made.detach()).mean() + 0.1 * model(x).square().mean())
        stepped(opt_g, model(made).mean())


@odd(notes="the generator lowers what the model raises for made points: an energy, low on data")
def generator_of_an_energy():
    return two(relu_mlp(4, 16, 8), relu_mlp(8, 16, 1), energy)
