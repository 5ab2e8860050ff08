"""What a tensor was computed by, and where its entries lie in a layer's output, asked of the tape."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop.instruments.tracing.tape import Tape
from pytest_trainloop.instruments.tracing.tape_queries import across_rows, behind, constant, is_sigmoid, layout
from pytest_trainloop.recording.watch import Watch

LINEAR = nn.Linear(5, 4)
HIDDEN = torch.randn(3, 8, 5)


@contextlib.contextmanager
def value_of(compute, *given):
    """The value of what is computed, while its tensors live."""
    tape = Tape()
    with Watch({"": LINEAR}, []) as watch, contextlib.ExitStack() as stack:
        for context in tape.contexts(watch):
            stack.enter_context(context)
        out = compute(*given)
        with watch.suspended():
            yield tape.of(out)


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
        (lambda s: torch.sigmoid(s * 1.0).div_(0.25), "sigmoid", 4.0),
    ],
)
def test_a_squash_is_found_behind_what_moves_scales_and_drops(scores, compute, op, scale):
    with value_of(compute, scores) as value:
        found = behind(value)
    assert found.op == op
    assert found.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    "compute", [lambda s: s.softmax(-1) @ torch.ones(4, 4), lambda s: s.softmax(-1) * s, lambda s: s.softmax(-1).log()]
)
def test_a_squash_is_not_found_behind_what_makes_something_else_of_it(scores, compute):
    with value_of(compute, scores) as value:
        assert behind(value).op != "softmax"


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (torch.sigmoid, True),
        (lambda s: 1 / (1 + torch.exp(-s)), True),
        (lambda s: (1 + (-s).exp()).reciprocal(), True),
        (lambda s: 1 / (2 + torch.exp(-s)), False),
        (lambda s: 1 / (1 + s), False),
        (torch.tanh, False),
    ],
)
def test_a_sigmoid_is_known_written_out(scores, compute, expected):
    with value_of(compute, scores) as value:
        assert is_sigmoid(value) is expected


def test_a_number_that_trains_is_no_constant(scores):
    learned = nn.Parameter(torch.tensor(0.07))
    with value_of(lambda s: s * learned, scores) as value:
        assert behind(value).learned
    with value_of(lambda s: s * torch.tensor(0.07), scores) as value:
        found = behind(value)
        assert (found.learned, found.scale) == (False, pytest.approx(0.07))


@pytest.mark.parametrize(
    ("compute", "low", "high"),
    [
        (lambda s: s.clamp(min=0).clamp_max(1.0), 0.0, 1.0),
        (lambda s: torch.clamp(s, min=-5), -5.0, math.inf),
        (lambda s: s.clamp_min(2), 2.0, math.inf),
        (lambda s: s.clamp_max(max=3), -math.inf, 3.0),
    ],
)
def test_bounds_of_clamps_are_kept(scores, compute, low, high):
    with value_of(compute, scores) as value:
        found = behind(value)
    assert (found.low, found.high) == (low, high)


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
    with value_of(lambda x: move(LINEAR(x)), HIDDEN) as value:
        at = layout(value)
    assert constant(at.position, 1) is classes_together
    assert constant(at.feature, 1) is positions_together
    assert at.features == 4
    assert at.leading == (3, 8)


def test_an_index_on_the_way_is_noted():
    kept = torch.tensor([0, 2])
    with value_of(lambda x: LINEAR(x)[:, kept], HIDDEN) as value:
        assert layout(value).picked
    with value_of(lambda x: LINEAR(x)[:, 1:5], HIDDEN) as value:
        assert not layout(value).picked


@pytest.mark.parametrize(
    "compute", [lambda x: LINEAR(x) + nn.Linear(5, 4)(x), lambda x: LINEAR(x).view(torch.float32).view(torch.int32)]
)
def test_no_layout_where_two_layers_are_added_or_numbers_cannot_make_a_move(compute):
    with value_of(compute, HIDDEN) as value:
        assert layout(value) is None


def test_large_scores_are_followed_without_a_copy_of_their_size():
    with value_of(lambda x: LINEAR(x).flatten(0, 1), torch.randn(64, 256, 5)) as value:
        assert layout(value).position.untyped_storage().size() == 64 * 256 * 8


@pytest.mark.parametrize(("dim", "over_rows"), [(0, True), (1, False)])
def test_a_softmax_over_rows_is_none_over_classes(dim, over_rows):
    with value_of(lambda x: LINEAR(x).log_softmax(dim), torch.randn(6, 5)) as value:
        assert across_rows(value) is over_rows


def test_a_softmax_of_similarities_over_either_axis_is_none_over_rows():
    with value_of(lambda x: (LINEAR(x) @ LINEAR(x).T).log_softmax(0), torch.randn(6, 5)) as value:
        assert not across_rows(value)
