"""Which unused results have a good reason to be there, and which tensor of a batch is a target that no loss reads."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.check import gradient_reaches_every_param
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.unused import unread_target
from pytest_trainloop.runs.evidence import Evidence

ROWS = torch.arange(6.0)


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
    def __init__(self, form):
        super().__init__()
        self.encoder, self.head = Encoder(form), nn.Linear(4, 1)

    def forward(self, x):
        given = self.encoder(x)
        return self.head(given[0] if isinstance(given, tuple) else given["last_hidden_state"])


@pytest.mark.parametrize(
    ("form", "level"),
    [
        (lambda hidden, pooled: (hidden, pooled), "advice"),
        (lambda hidden, pooled: {"last_hidden_state": hidden, "pooler_output": pooled}, "advice"),
        (lambda hidden, pooled: (hidden,), "fault"),
    ],
    ids=["tuple", "dict", "dropped"],
)
def test_a_component_may_give_out_more_than_its_user_takes(form, level):
    def make():
        model = Model(form)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = (torch.randn(6, 3), torch.randn(6, 1))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))

    (finding,) = gradient_reaches_every_param(Evidence(make))
    assert (finding.cause, finding.level) == ("parameter_unused", level)
    assert finding.culprits == ("encoder.pooler.weight", "encoder.pooler.bias")


def test_the_last_bias_of_an_energy_is_differentiated_away():
    def force(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def make():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters()), batch=torch.randn(6, 3), loss=force
        )

    advised = [f for f in gradient_reaches_every_param(Evidence(make)) if "2.bias" in f.culprits]
    assert [f.level for f in advised] == ["advice"]


def fitting(results, *, weighed=False, **more):
    def loss(model, batch):
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["radius"]).mean() if weighed else losses.mean()

    def make():
        model = nn.Sequential(OrderedDict(trunk=nn.Linear(3, 4), radius_head=nn.Linear(4, 4)))
        batch = {"x": torch.randn(6, 3), "y": torch.arange(6) % 4, **more}
        return TrainLoop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch=batch, loss=loss)

    return unread_target(Evidence(make), ["radius_head.weight", "radius_head.bias"], results)


@pytest.mark.parametrize(
    ("results", "values", "found"),
    [
        ({(6, 1)}, ROWS, "radius"),
        ({(6,)}, ROWS[:, None], "radius"),
        ({(6, 8)}, ROWS.long(), "radius"),
        ({(6, 8, 5)}, ROWS.long()[:, None].expand(6, 5).clone(), "radius"),
        ({(6, 4)}, ROWS.long(), ""),  # ids beyond the classes of the result
        ({(6, 2)}, ROWS, ""),
        ({(6, 1)}, torch.ones(6), ""),  # rows that are equal show nothing
        (set(), ROWS, ""),
    ],
)
def test_a_target_has_the_shape_of_the_result(results, values, found):
    assert fitting(results, radius=values) == found


@pytest.mark.parametrize(("name", "found"), [("mean_radius", "mean_radius"), ("camera", ""), ("label", "")])
def test_a_target_bears_a_word_of_the_head(name, found):
    assert fitting({(6, 1)}, **{name: ROWS}) == found


def test_what_the_loss_reads_is_no_forgotten_target():
    assert fitting({(6, 1)}, weighed=True, radius=ROWS + 1) == ""
