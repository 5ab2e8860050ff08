"""Other steps in place of a loop's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.learning.loss_curve import Losses
from pytest_trainloop.checks.learning.reference_adam import Adam, ReferenceSteps, stay
from pytest_trainloop.runs.run import RunPlan, run

models: list[nn.Module] = []


def loop(kind=torch.optim.SGD, *, loss_of=None, wipe=True, sign=1.0, **settings):
    """Builds a loop; ``models`` keeps what was trained."""

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = kind(model.parameters(), **{"lr": 0.5, **settings})
        models.append(model)
        loss = loss_of or (lambda model, x, y: F.mse_loss(model(x), y))

        def fit(batches):
            for x, y in batches:

                def closure(x=x, y=y):
                    if wipe:
                        optimizer.zero_grad()
                    value = sign * loss(model, x, y)
                    value.backward()
                    return value

                if kind is torch.optim.LBFGS:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6, 1)), fit=fit)

    return make


def made(make, move, steps=9):
    instead = ReferenceSteps(move, "backward")
    record = run(make, RunPlan(contexts=instead.contexts, count=steps, enough=lambda r: r.rounds >= steps))
    return Losses(record).read(), instead


KINDS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS]


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_moves(kind):
    losses, _ = made(loop(kind), stay)
    assert losses == [losses[0]] * 9


@pytest.mark.parametrize("kind", KINDS)
def test_the_loops_own_settings_have_no_say(kind):
    made(loop(kind, wipe=False), Adam(1e-2))
    mine = models[-1]
    torch.manual_seed(0)
    built = loop()()
    built.model.load_state_dict(built.model.state_dict())
    optimizer = torch.optim.Adam(built.model.parameters(), lr=1e-2)
    for _ in range(9):
        optimizer.zero_grad()
        F.mse_loss(built.model(built.batch[0]), built.batch[1]).backward()
        optimizer.step()
    for a, b in zip(mine.parameters(), built.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_maximized_is_climbed():
    losses, _ = made(loop(sign=-1.0, maximize=True), Adam(1e-2))
    assert 0 < losses[-1] < losses[0]  # the root is the negative loss, and what is maximized is negated


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_tell_what_the_loss_changes_by(kind):
    losses, instead = made(loop(kind), Adam(3e-3), steps=41)
    assert instead.work[40] == pytest.approx(losses[40] - losses[0], rel=0.02)


def test_a_loss_that_is_half_cut_off_changes_by_twice_of_it():
    def loss_of(model, x, y):
        out = model(x)
        return ((out - y) * (out - y).detach()).mean()

    losses, instead = made(loop(loss_of=loss_of), Adam(3e-3), steps=41)
    assert instead.work[40] == pytest.approx((losses[40] - losses[0]) / 2, rel=0.05)


def test_weights_in_half_precision_are_moved_in_full():
    def make():
        model = nn.Linear(3, 1).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        models.append(model)

        def fit(batches):
            for x in batches:
                optimizer.zero_grad()
                model(x).float().square().mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(6, 3).bfloat16(), fit=fit)

    made(make, Adam(1e-4), steps=100)
    assert models[-1].weight.dtype is torch.bfloat16
    assert not models[-1].weight.eq(1).any()  # one step is below the spacing at 1, a hundred are not
