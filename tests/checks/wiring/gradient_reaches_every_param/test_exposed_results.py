"""Which unused results have a good reason to be there, on tiny loops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.exposed_results import ExposedResults
from pytest_trainloop.runs.evidence import Evidence

POOLER = ["encoder.pooler.weight", "encoder.pooler.bias"]


class Encoder(nn.Module):
    """Gives out its hidden states, and a pooled result beside them."""

    def __init__(self, form):
        super().__init__()
        self.body, self.pooler = nn.Linear(3, 4), nn.Linear(4, 4)
        self._form = form

    def forward(self, x):
        hidden = self.body(x)
        return self._form(hidden, torch.tanh(self.pooler(hidden)))


class Model(nn.Module):
    """Uses the hidden states only; ``give`` decides what it returns."""

    def __init__(self, form, use, give):
        super().__init__()
        self.encoder, self.head = Encoder(form), nn.Linear(4, 1)
        self._use, self._give = use, give

    def forward(self, x):
        given = self.encoder(x)
        return self._give(self.head(self._use(given)), given)


def pair(hidden, pooled):
    return hidden, pooled


def named(hidden, pooled):
    return {"last_hidden_state": hidden, "pooler_output": pooled}


def dropped(hidden, pooled):
    return hidden


def first(given):
    return given[0]


def exposed(make_model, names=POOLER, *, loss=None):
    def make():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = loss or (lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.randn(6, 3), torch.randn(6, 1)), loss=probe)

    evidence = Evidence(make)
    evidence.run()
    return evidence.shared(ExposedResults).among(names)


@pytest.mark.parametrize(("form", "use"), [(pair, first), (named, lambda given: given["last_hidden_state"])])
def test_a_component_may_give_out_more_than_its_user_takes(form, use):
    assert exposed(lambda: Model(form, use, lambda out, given: out)) == set(POOLER)


def test_a_result_that_nobody_gives_out_has_no_reason():
    assert exposed(lambda: Model(dropped, lambda given: given, lambda out, given: out)) == set()


def first_loss(model, batch):
    return F.mse_loss(model(batch[0])[0], batch[1])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head1, self.head2 = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.head1(hidden), self.head2(hidden)


def test_a_second_head_of_the_model_may_rest_in_this_batch():
    names = ["head2.weight", "head2.bias"]
    assert exposed(TwoHeads, names, loss=first_loss) == set(names)


def test_the_last_bias_of_an_energy_is_differentiated_away():
    def force(model, batch):
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    assert exposed(make, ["2.bias"], loss=force) == {"2.bias"}
