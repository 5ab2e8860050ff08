"""What a backpropagated value was computed by, and the same calls with other values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, terms
from pytest_trainloop.instruments.tracing.loss_tape import Tapes
from pytest_trainloop.runs.evidence import Evidence
from tests.loops import plain


def slices(loss_of, batch=None, model=None):
    def make():
        net = model() if model else nn.Linear(3, 2)
        return plain.loop(net, batch or (torch.randn(4, 3), torch.randn(4, 2)), loss_of)

    return Evidence(make).shared(Tapes.of).slices


def test_a_slice_reaches_from_the_last_layer_and_the_batch_to_the_root():
    first, second = slices(lambda net, b: (net(b[0]) - b[1]).square().mean())
    assert [c.name for c in first.calls] == ["sub", "square", "mean"]
    assert [v.parameters for v in first.trained(first.root)] == [("bias", "weight")]
    assert [v.path for v in first.from_batch(first.root)] == [(1,)]
    assert (first.step, second.step) == (0, 1)


def test_calls_are_made_again_with_other_values():
    found = slices(lambda net, b: (net(b[0]) - b[1]).square().mean())[0]
    (output,), (target,) = found.trained(found.root), found.from_batch(found.root)
    given = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    (again,) = found.replay({output.number: given}, [found.root])
    expected = (given - target.tensor).square().mean()
    assert torch.equal(again, expected)
    assert torch.equal(*(torch.autograd.grad(v, given)[0] for v in (again, expected)))


def written(net, batch):
    out = net(batch[0])
    weights = torch.ones(4, 2)
    weights[1:] = 2
    weights *= out.detach().abs()
    return (weights * out).sum()


def test_writes_are_made_again_on_copies():
    found = slices(written)[0]
    (output,) = found.trained(found.root)
    other = torch.randn(4, 2, dtype=torch.float64)
    expected = (other.abs() * other * torch.tensor([[1.0], [2], [2], [2]], dtype=torch.float64)).sum()
    for _ in range(2):
        assert torch.equal(found.replay({output.number: other}, [found.root])[0], expected)


def through_a_view(net, batch):
    out = net(batch[0]).clone()
    column = out[:, 0]
    column *= 2
    return out.sum()


def test_a_write_by_way_of_a_view_is_not_made_again():
    found = slices(through_a_view)[0]
    (output,) = found.trained(found.root)
    with pytest.raises(CannotReplay, match="overwrites"):
        found.replay({output.number: output.tensor}, [found.root])


def test_terms_come_with_their_factors():
    def loss(net, batch):
        out = net(batch[0])
        parts = [out.square().mean(), out.abs().sum()]
        return torch.stack(parts).mean() / 2 - 0.25 * F.mse_loss(out, batch[1])

    found = slices(loss)[0]
    named = {found.call_of(t.number).name: t.factor for t in terms(found, found.root)}
    assert named == {"mean": 0.25, "sum": 0.25, "mse_loss": -0.25}


def test_a_temperature_is_part_of_the_slice_and_no_layer():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = nn.Linear(3, 2), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.net(x) * self.scale.exp()

    found = slices(lambda net, b: F.mse_loss(net(b[0]), b[1]), model=Scaled)[0]
    assert [v.op for v in found.trained(found.root)] == ["linear"]
    assert [c.name for c in found.calls] == ["mul", "mse_loss"]


def test_every_value_that_is_backpropagated_has_its_slice():
    def loss(net, batch):
        (gradient,) = torch.autograd.grad(net(batch[0]).sum(), net.weight, create_graph=True)
        return gradient.square().sum() + net(batch[0]).mean()

    assert [s.values[s.root].op for s in slices(loss)] == ["sum", "add", "sum", "add"]
