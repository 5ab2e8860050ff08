"""Calls of an ``autograd.Function`` whose result is thrown away, in loops that are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.loss.every_term_trains.faults import loop
from tests.checks.loss.every_term_trains.faults_functions import WithTerm
from tests.loops.nets import mlp
from tests.loops.odd import odd


class InPlace(WithTerm):
    @staticmethod
    def forward(ctx, x, term):
        ctx.size = term.shape
        ctx.mark_dirty(x)
        return x


class Probe(torch.autograd.Function):
    """Writes down what it is given, and gives nothing a gradient but its first argument."""

    seen = torch.zeros(1)

    @staticmethod
    def forward(ctx, x, number):
        Probe.seen.fill_(float(number))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope, None


def two_layers():
    return nn.Sequential(nn.Linear(6, 24), nn.Linear(24, 3))


@odd(notes="the function writes to its first argument in place: what is read afterwards has the term's gradient")
def term_given_in_place() -> TrainLoop:
    def loss_of(model, x, y):
        hidden = model[0](x).mul(1.0)
        penalty = 0.01 * model[1].weight.square().mean()
        InPlace.apply(hidden, penalty)
        return F.cross_entropy(model[1](hidden.tanh()), y)

    return loop(loss_of, two_layers)()


@odd(notes="a function that only writes a number down gives it no gradient: its result is of no use")
def number_for_a_probe() -> TrainLoop:
    def loss_of(model, x, y):
        scores = model(x)
        Probe.apply(scores, scores.abs().mean())
        return F.cross_entropy(scores, y)

    return loop(loss_of)()


@odd(notes="the term is added to the loss, and a function that could give it a gradient is called for its side effect")
def term_added_and_given() -> TrainLoop:
    def loss_of(model, x, y):
        scores = model(x)
        penalty = 0.01 * scores.square().mean()
        WithTerm.apply(scores, penalty)
        return F.cross_entropy(scores, y) + penalty

    return loop(loss_of)()


@odd(notes="the term is of a gate that no optimizer holds")
def term_of_a_gate_that_is_kept() -> TrainLoop:
    gate = nn.Linear(6, 2)

    def loss_of(model, x, y):
        shares = gate(x).softmax(-1)
        WithTerm.apply(shares, shares.mean(0).square().sum())
        return F.cross_entropy(model(x) * shares.detach()[:, :1], y)

    return loop(loss_of, lambda: mlp(6, 24, 3))()
