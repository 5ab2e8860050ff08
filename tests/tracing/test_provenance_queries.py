"""What a tensor was computed by, and where its entries lie in a layer's output."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pytest_trainloop.tracing.provenance import Lineage, name_of
from pytest_trainloop.tracing.provenance_queries import across_rows, behind, constant, is_sigmoid, layout


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


@pytest.fixture
def scores():
    return torch.randn(6, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("compute", "op", "scale"),
    [
        (lambda s: s.softmax(-1).view(3, 2, 4).transpose(1, 2).contiguous(), "softmax", 1.0),
        (lambda s: F.dropout(torch.softmax(s, 1).float(), 0.1) / 0.5, "softmax", 2.0),
        (lambda s: nn.Softmax(dim=1)(s).clamp(1e-6, 1)[1:, :2], "softmax", 1.0),
        (lambda s: (torch.tanh(s / 30) * 30).masked_fill(s > 0, 0.0), "tanh", 30.0),
        (lambda s: F.relu(s, inplace=False).flatten() + 1e-6, "relu", 1.0),
        (lambda s: s.sigmoid().unsqueeze(0).permute(0, 2, 1), "sigmoid", 1.0),
    ],
)
def test_a_squash_is_found_behind_what_moves_scales_and_drops(scores, compute, op, scale):
    found = behind(node_of(compute, scores)[0])
    assert found is not None
    assert found.node.op == op
    assert found.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "compute", [lambda s: s.softmax(-1) @ torch.ones(4, 4), lambda s: s.softmax(-1) * s, lambda s: s.softmax(-1).log()]
)
def test_a_squash_is_not_found_behind_what_makes_something_else_of_it(scores, compute):
    assert behind(node_of(compute, scores)[0]).node.op != "softmax"


def test_an_operation_in_place_gives_its_tensor_a_new_past(scores):
    def compute(s):
        z = s * 1.0
        z = torch.sigmoid(z)
        z /= 0.25
        return z

    found = behind(node_of(compute, scores)[0])
    assert (found.node.op, found.scale) == ("sigmoid", 4.0)


@pytest.mark.parametrize(
    "compute", [torch.sigmoid, lambda s: 1 / (1 + torch.exp(-s)), lambda s: (1 + (-s).exp()).reciprocal()]
)
def test_a_sigmoid_is_known_written_out(scores, compute):
    assert is_sigmoid(node_of(compute, scores)[0])


@pytest.mark.parametrize("compute", [lambda s: 1 / (2 + torch.exp(-s)), lambda s: 1 / (1 + s), torch.tanh])
def test_nothing_else_is_a_sigmoid(scores, compute):
    assert not is_sigmoid(node_of(compute, scores)[0])


def test_a_number_that_trains_is_told_from_a_constant(scores):
    learned = nn.Parameter(torch.tensor(0.07))
    assert behind(node_of(lambda s: s * learned, scores)[0]).learned
    assert not behind(node_of(lambda s: s * torch.tensor(0.07), scores)[0]).learned
    assert behind(node_of(lambda s: s * torch.tensor(0.07), scores)[0]).scale == pytest.approx(0.07)


def test_bounds_of_clamps_are_kept(scores):
    found = behind(node_of(lambda s: s.clamp(min=0).clamp_max(1.0), scores)[0])
    assert (found.low, found.high) == (0.0, 1.0)
    open_above = behind(node_of(lambda s: torch.clamp(s, min=-5), scores)[0])
    assert (open_above.low, open_above.high) == (-5.0, math.inf)


LINEAR = nn.Linear(5, 4)
HIDDEN = torch.randn(3, 8, 5)


@pytest.mark.parametrize(
    ("move", "classes_together", "positions_together"),
    [
        (lambda s: s.transpose(1, 2), True, False),
        (lambda s: s.permute(0, 2, 1).contiguous(), True, False),
        (lambda s: s.reshape(-1, 4), True, False),
        (lambda s: s[:, :-1].flatten(0, 1), True, False),
        (lambda s: s.view(3, 4, 8), False, True),  # eight positions in four classes: every other position
        (lambda s: s[:, :6].reshape(3, 4, 6), False, False),
        (lambda s: s, False, True),  # the class axis of cross_entropy runs over positions
    ],
)
def test_the_axis_of_the_classes_is_followed_through_moves(move, classes_together, positions_together):
    at = layout(node_of(lambda x: move(LINEAR(x)), HIDDEN)[0])
    assert constant(at.position, 1) is classes_together
    assert constant(at.feature, 1) is positions_together
    assert at.features == 4
    assert at.leading == (3, 8)


def test_an_index_on_the_way_is_told():
    kept = torch.tensor([0, 2])
    assert layout(node_of(lambda x: LINEAR(x)[:, kept], HIDDEN)[0]).picked
    assert not layout(node_of(lambda x: LINEAR(x)[:, 1:5], HIDDEN)[0]).picked


def test_where_two_layers_are_added_no_layout_is_given():
    other = nn.Linear(5, 4)
    assert layout(node_of(lambda x: LINEAR(x) + other(x), HIDDEN)[0]) is None


def test_a_move_that_numbers_cannot_make_gives_no_layout():
    assert layout(node_of(lambda x: LINEAR(x).view(torch.float32), HIDDEN)[0]) is None


def test_large_scores_are_followed_without_a_copy_of_their_size():
    at = layout(node_of(lambda x: LINEAR(x).flatten(0, 1), torch.randn(64, 256, 5))[0])
    assert at.position.untyped_storage().size() == 64 * 256 * 8


@pytest.mark.parametrize(("dim", "over_rows"), [(0, True), (1, False)])
def test_a_softmax_over_rows_is_told_from_one_over_classes(dim, over_rows):
    node, _ = node_of(lambda x: LINEAR(x).log_softmax(dim), torch.randn(6, 5))
    assert across_rows(node) is over_rows


def test_a_softmax_of_similarities_over_either_axis_is_none_over_rows():
    node, _ = node_of(lambda x: (LINEAR(x) @ LINEAR(x).T).log_softmax(0), torch.randn(6, 5))
    assert not across_rows(node)
