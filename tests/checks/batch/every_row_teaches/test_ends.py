import contextlib
from types import SimpleNamespace

import pytest
import torch

from pytest_trainloop.checks.batch.every_row_teaches.cuts import cuts, with_fractions
from pytest_trainloop.checks.batch.every_row_teaches.ends import ends_of
from pytest_trainloop.checks.batch.every_row_teaches.zero_losses import equal_inputs
from pytest_trainloop.recording.events import Place
from pytest_trainloop.tracing.call_log import Call, Calls, Value

WEIGHT = torch.arange(3.0, requires_grad=True)


class Watch:
    """What the mode asks of a run's watch."""

    backward, record = None, SimpleNamespace(begun=False)

    def __init__(self):
        self.thread = SimpleNamespace(suspended=0, stepping=0)

    @contextlib.contextmanager
    def suspended(self):
        self.thread.suspended += 1
        yield
        self.thread.suspended -= 1


def calls_of(step, *batch):
    calls = Calls()
    with calls.watching(Watch()), calls:
        calls.take(0, batch)
        step(*batch)
    return calls


def ends(step, one, other):
    return ends_of(calls_of(step, one), calls_of(step, other))


ROWS = torch.arange(12.0).reshape(4, 3)
OTHER = torch.cat([ROWS[:3], ROWS[:1]])


def test_a_root_is_followed_back_to_the_batch():
    calls = calls_of(lambda x: (x * WEIGHT).sum().backward(), ROWS)
    (root,) = calls.roots
    assert [v.of_batch for v in root.origins() if v.of_batch] == ["batch[0]"]
    assert root.made_by.name == "sum"
    assert root.history


def test_rows_that_a_tensor_is_iterated_over_come_from_it():
    calls = calls_of(lambda x: [(row * WEIGHT).sum() for row in x], ROWS)
    assert sum(c.name == "mul" and any(v.of_batch for v in c.inputs[0].origins()) for c in calls.calls) == 4


@pytest.mark.parametrize(
    ("step", "behind_model"),
    [
        (lambda x: (x[:3] * WEIGHT).sum().backward(), False),
        (lambda x: (x * WEIGHT)[:3].sum().backward(), True),
        (lambda x: (x * WEIGHT).split(3)[0].sum().backward(), True),
    ],
)
def test_rows_end_where_they_are_cut_off(step, behind_model):
    found = ends(step, ROWS, OTHER)
    assert found.behind_model is behind_model
    assert "step" not in str(found.place) or found.place.line


@pytest.mark.parametrize(
    "step",
    [
        lambda x: ((x * WEIGHT).sum(1) * torch.tensor([1.0, 1.0, 1.0, 0.0])).sum().backward(),
        lambda x: (x * WEIGHT)[torch.tensor([True, True, True, False])].sum().backward(),
        lambda x: (x * WEIGHT).sum(1)[torch.tensor([0, 1, 2])].sum().backward(),
        lambda x: ((x[:3] * WEIGHT).sum().backward(), (x.detach() @ torch.ones(3)).tolist()),
    ],
    ids=["mask", "boolean index", "computed index", "read by python"],
)
def test_rows_that_end_by_values_are_not_judged(step):
    assert ends(step, ROWS, OTHER) is None


def call(name, given, made, *, fractions=False, floating=False):
    dtype = torch.float32 if floating else torch.int64
    one = Value(shape=(3,), zeros=given, whole=not fractions, dtype=torch.float32 if fractions else torch.int64)
    return Call(0, name, Place("a.py", 1), (), (), (one,), (Value(shape=(3,), zeros=made, whole=True, dtype=dtype),))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (call("__rfloordiv__", 0, 1), True),
        (call("floor_divide", 1, 1), False),
        (call("long", 0, 2, fractions=True), True),
        (call("to", 0, 2), False),
        (call("to", 0, 2, fractions=True, floating=True), False),
        (call("floor", 0, 2, fractions=True), False),
    ],
)
def test_what_cuts_numbers_to_zero(made, expected):
    assert cuts(made) is expected


def test_the_fractions_of_a_reversed_division_are_those_of_the_number():
    divided = with_fractions(call("__rfloordiv__", 0, 1))(torch.Tensor.__rfloordiv__, (torch.tensor([2, 4]), 3), {})
    assert divided.tolist() == [1.5, 0.75]


def test_equal_inputs_keep_what_has_one_number_for_each_row():
    x, y = torch.randn(4, 3), torch.arange(4)
    one, other, labels = equal_inputs((x, x + 1, y))
    assert torch.equal(one, x[:1].expand(4, 3))
    assert torch.equal(other, one)
    assert torch.equal(labels, y)
