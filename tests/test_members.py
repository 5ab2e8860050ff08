"""What is registered in a module, whatever the project makes of the methods of ``nn.Module``."""

import pytest
import torch
from torch import nn

from pytest_trainloop.core import members
from tests.loops.unusual.overridden_methods import LayersAsModules, Learner


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rest = nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.rest
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_parameter("none", None)
        self.none_module = None
        self.register_module("empty", None)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mean", self.rest[1].running_mean)

    def forward(self, x):
        return self.rest(x)


@pytest.mark.parametrize("build", [Tied, lambda: torch.jit.trace(Tied().eval(), torch.randn(2, 4))])
@pytest.mark.parametrize("name", ["named_parameters", "named_buffers", "named_modules"])
@pytest.mark.parametrize("duplicates", [True, False])
def test_they_are_those_of_torch_in_the_order_of_torch(build, name, duplicates):
    module = build()
    for prefix in ("", "model"):
        expected = list(getattr(nn.Module, name)(module, prefix=prefix, remove_duplicate=duplicates))
        found = list(getattr(members, name)(module, prefix, remove_duplicate=duplicates))
        assert [path for path, _ in found] == [path for path, _ in expected]
        if build is Tied:
            assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))


def test_children_and_what_a_module_holds_itself():
    module = Tied()
    assert list(members.children(module)) == list(module.children())
    assert list(members.named_children(module)) == list(module.named_children())
    assert list(members.modules(module)) == list(module.modules())
    assert [n for n, _ in members.named_buffers(module, recurse=False)] == ["seen", "mean"]
    assert list(members.parameters(module, recurse=False)) == []


def test_overridden_methods_are_not_called():
    learner, layers = Learner(), LayersAsModules()
    assert [n for n, _ in members.named_parameters(learner)] == ["vars.0", "vars.1"]
    assert len(list(members.modules(layers))) == 1 + 1 + 2
