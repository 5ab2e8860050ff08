"""What a tensor was computed by, and where its entries lie in a layer's output."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pytest_trainloop.instruments.tracing.provenance import Lineage, name_of
from pytest_trainloop.instruments.tracing.provenance_queries import layout


class Watch:
    """As much of a watch as lineage asks for."""

    @staticmethod
    def module_path():
        return "head"


class Traced(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.lineage = Lineage()
        self.kept = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunction():
            parents = self.lineage.before(name, args, kwargs)
            out = func(*args, **kwargs)
            self.lineage.note(Watch, func, name, args, kwargs, parents, out)
        self.kept.append(out)
        return out


def node_of(compute, *given):
    mode = Traced()
    with mode:
        out = compute(*given)
    return mode.lineage.of(out), out


LINEAR = nn.Linear(5, 4)
HIDDEN = torch.randn(3, 8, 5)


@pytest.mark.parametrize(
    "move",
    [
        lambda s: s.transpose(1, 2),
        lambda s: s.permute(0, 2, 1).contiguous().relu(),
        lambda s: (2 * s).clamp(min=0).transpose(1, 2).masked_fill(s.transpose(1, 2) > 1, 0.0),
    ],
)
def test_positions_are_followed_through_moves(move):
    at = layout(node_of(lambda x: move(LINEAR(x)), HIDDEN)[0])
    assert at.leading == (3, 8)
    row, position = at.coordinates(at.position[:, 0])
    assert row.tolist() == [[n] * 8 for n in range(3)]
    assert position.tolist() == [list(range(8))] * 3


def test_where_two_layers_are_added_no_layout_is_given():
    other = nn.Linear(5, 4)
    assert layout(node_of(lambda x: LINEAR(x) + other(x), HIDDEN)[0]) is None


def test_a_move_that_numbers_cannot_make_gives_no_layout():
    assert layout(node_of(lambda x: LINEAR(x).view(torch.float32), HIDDEN)[0]) is None


def test_large_scores_are_followed_without_a_copy_of_their_size():
    at = layout(node_of(lambda x: LINEAR(x).flatten(0, 1), torch.randn(64, 256, 5))[0])
    assert at.position.untyped_storage().size() == 64 * 256 * 8
