"""Which form agrees with what a small loop computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.formulas.catalogue import FORMS
from pytest_trainloop.formulas.cut import other
from pytest_trainloop.formulas.search import matches
from pytest_trainloop.loop import TrainLoop
from pytest_trainloop.runs.evidence import Evidence
from pytest_trainloop.tracing.loss_tape import Tapes


def found(loss_of, outputs=1, classes=2):
    """The matches in the first step, the largest value first."""

    def make():
        x = torch.randn(8, 5)
        y = torch.arange(8) % classes
        net = nn.Linear(5, outputs)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def fit(batches):
            for a, b in batches:
                optimizer.zero_grad()
                out = net(a)
                loss_of(out.squeeze(1) if outputs == 1 else out, b).backward()
                optimizer.step()

        return TrainLoop(model=net, optimizer=optimizer, batch=(x, y), fit=fit)

    tapes = Evidence(make).shared(Tapes.of)
    return list(matches(tapes.slices[0], FORMS))


def named(matched):
    return [(m.form.name, m.reading.direction, m.reading.mistake and m.reading.mistake.cause) for m in matched]


def dice(p, t, weight=1.0):
    return 1 - weight * 2 * (p * t).sum() / (p.sum() + t.sum() + 1e-7)


@pytest.mark.parametrize(
    ("loss_of", "name"),
    [
        (lambda z, y: dice(z.sigmoid(), y), "the overlap of two masks (Dice, Jaccard, Tversky)"),
        (lambda z, y: -(y * z.sigmoid().log() + (1 - y) * (1 - z.sigmoid()).log()).mean(), "binary cross entropy"),
        (lambda z, y: (F.softplus(z) - y * z).sum(), "binary cross entropy of scores"),
        (lambda z, y: F.relu(1 - (2 * y - 1) * z).mean(), "hinge loss"),
    ],
)
def test_a_right_form_is_named_and_is_a_cost(loss_of, name):
    assert named(found(lambda z, y: loss_of(z, y.to(z.dtype)))) == [(name, 1, None)]


def test_a_form_inside_of_another_loss_is_found_with_its_direction():
    matched = found(lambda z, y: torch.exp(3 * dice(z.sigmoid(), y.to(z.dtype))))
    assert named(matched) == [("the overlap of two masks (Dice, Jaccard, Tversky)", 1, None)]


def test_what_agrees_with_no_form_has_no_match():
    assert found(lambda z, y: (z.sin() * (1 + y)).square().mean()) == []


def test_a_loss_that_a_further_tensor_of_the_batch_reaches_has_no_match():
    def loss(z, y):
        p, t = z.sigmoid(), y.to(z.dtype)
        weight = 1 + torch.arange(8, dtype=z.dtype) * (y + 1)
        return 1 - (2 * weight * p * t).sum() / (p.sum() + t.sum())

    assert found(loss) == []


def test_values_drawn_anew_are_of_the_same_kind():
    binary = torch.tensor([0.0, 1, 1, 0, 0, 1], dtype=torch.float64)
    assert set(other(binary, 1).tolist()) <= {0.0, 1.0}
    whole = torch.tensor([3, 5, 9])
    assert other(whole, 1).dtype is whole.dtype
    assert 3 <= int(other(whole, 2).min()) <= int(other(whole, 2).max()) <= 9
    shares = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64)
    assert bool(((other(shares, 3) >= 0.2) & (other(shares, 3) <= 0.7)).all())
    assert float(other(shares, 4, bound=3.0).abs().max()) <= 3
    assert torch.equal(other(torch.ones(4), 5), torch.ones(4))
    assert other(torch.tensor([True, False]), 6).dtype is torch.bool
