"""Right likelihoods, robust and evidential losses, and distillation, that resemble a textbook form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.loss_formula.unusual_fields import trained
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd


def rows():
    x = torch.randn(10, 6)
    return x, x[:, :2] + 0.3 * torch.randn(10, 2)


def halves(model, x):
    return model(x).chunk(2, 1)


def made_of(loss_of):
    return trained(lambda model, b: loss_of(*halves(model, b[0]), b[1]), rows())


@odd(notes="the variance is a softplus, and its logarithm is taken after a floor was added")
def normal_with_a_softplus_variance():
    def loss_of(mean, raw, y):
        variance = F.softplus(raw) + 1e-3
        return 0.5 * (variance.log() + (y - mean).square() / variance).mean()

    return made_of(loss_of)


@odd(notes="the variance without a gradient weighs each row's likelihood (beta-NLL)")
def likelihood_weighted_by_its_variance():
    def loss_of(mean, log_var, y):
        variance = log_var.exp()
        return (variance.detach() ** 0.5 * 0.5 * (log_var + (y - mean).square() / variance)).mean()

    return made_of(loss_of)


class Evidence(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = relu_mlp(6, 16, 8)

    def forward(self, x):
        return self.net(x)


@odd(notes="evidential regression: a Student density, with a regulariser that multiplies an error by the evidence")
def evidential_regression():
    def loss_of(model, b):
        x, y = b
        gamma, nu, alpha, beta = model(x).chunk(4, 1)
        nu, alpha, beta = F.softplus(nu) + 0.01, F.softplus(alpha) + 1.01, F.softplus(beta) + 0.01
        two = 2 * beta * (1 + nu)
        nll = 0.5 * torch.log(torch.pi / nu) - alpha * torch.log(two)
        nll = nll + (alpha + 0.5) * torch.log(nu * (y - gamma).square() + two)
        nll = nll + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)
        return (nll + 0.01 * (y - gamma).abs() * (2 * nu + alpha)).mean()

    return trained(loss_of, rows(), model=Evidence())


@odd(notes="a Huber loss by hand: quadratic near 0, and the threshold is a factor further out")
def huber_by_hand():
    def loss_of(mean, other, y):
        size = (y - mean).abs()
        near = size.clamp(max=0.5)
        return (0.5 * near.square() + 0.5 * (size - near) + 0.1 * (other - y).square()).mean()

    return made_of(loss_of)


@odd(notes="a Student density with heavy tails: the logarithm of one plus squares over the spread")
def heavy_tails():
    def loss_of(mean, log_scale, y):
        return (log_scale + 2.0 * torch.log1p(((y - mean) / log_scale.exp()).square() / 3.0)).mean()

    return made_of(loss_of)


@odd(notes="distillation: soft targets at a temperature, multiplied by its square, beside the labels")
def distilled_at_a_temperature():
    teacher = relu_mlp(6, 16, 4).requires_grad_(False)
    student = relu_mlp(6, 16, 4)

    def loss_of(_, b):
        x, y = b
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, 1)
        scores = student(x)
        far = -(soft * F.log_softmax(scores / 4, 1)).sum(1).mean()
        return 0.7 * 16 * far + 0.3 * F.cross_entropy(scores, y)

    made = trained(loss_of, (torch.randn(10, 6), torch.arange(10) % 4), model=student)
    return TrainLoop(model=[student, teacher], optimizer=made.optimizer, batch=made.batch, fit=made.fit, frozen=("1.",))


@odd(notes="ties of event times by Efron's way: shares of the tied risks are taken from the sum")
def tied_events():
    def loss_of(model, b):
        risk, time, event = model(b["x"])[:, 0], b["time"], b["event"]
        total = 0.0
        for at in time[event > 0].unique():
            tied = (time == at) & (event > 0)
            at_risk, of_tied = risk[time >= at].exp().sum(), risk[tied].exp().sum()
            for i in range(int(tied.sum())):
                total = total - torch.log(at_risk - i / int(tied.sum()) * of_tied)
            total = total + risk[tied].sum()
        return -total / event.sum()

    batch = {"x": torch.randn(10, 6), "time": torch.arange(10) // 2 + 1.0, "event": (torch.arange(10) % 3 != 0).float()}
    return trained(loss_of, batch)


@odd(notes="Tweedie: both terms are powers of the rate, and the first has a negative factor")
def tweedie():
    def loss_of(model, b):
        x, y = b
        log_rate = model(x)[:, 0]
        return (-y * torch.exp(log_rate * -0.5) / -0.5 + torch.exp(log_rate * 0.5) / 0.5).mean()

    return trained(loss_of, (torch.randn(10, 6), torch.rand(10).mul(3).floor()))


@odd(notes="counts with many zeros: the logarithm of a mixture, and the Poisson term only above 0")
def counts_with_many_zeros():
    def loss_of(model, b):
        x, y = b
        log_rate, gate = model(x)[:, :2].unbind(1)
        none = torch.logaddexp(F.logsigmoid(gate), F.logsigmoid(-gate) - log_rate.exp())
        some = F.logsigmoid(-gate) + y * log_rate - log_rate.exp() - torch.lgamma(y + 1)
        return -torch.where(y == 0, none, some).mean()

    return trained(loss_of, (torch.randn(10, 6), torch.rand(10).mul(4).floor()))


@odd(notes="quantiles with a penalty where they cross: differences of outputs are kept above 0")
def quantiles_that_may_not_cross():
    def loss_of(model, b):
        x, y = b
        out = model(x)[:, :3]
        error = y[:, :1] - out
        share = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
        crossed = F.relu(out[:, :-1] - out[:, 1:])
        return torch.max(share * error, (share - 1) * error).mean() + crossed.mean()

    return trained(loss_of, rows())
