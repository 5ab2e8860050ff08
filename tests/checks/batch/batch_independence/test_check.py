"""What ``batch_independence`` says of rows that interact: a cause, advice, or how to declare it."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.batch_independence.check import batch_independence
from pytest_trainloop.checks.batch.batch_independence.label_rows import LabelRows
from pytest_trainloop.checks.batch.batch_independence.meetings import meeting
from pytest_trainloop.checks.batch.batch_independence.passes import RowInteraction, RowPasses
from pytest_trainloop.checks.batch.batch_independence.shares import RowShares
from pytest_trainloop.checks.batch.batch_independence.unpaired import unpaired
from pytest_trainloop.errors import CannotDecide, Refused
from pytest_trainloop.recording.events import Place
from pytest_trainloop.tracing.forward_pass import Op
from tests.helpers.records import FakeEvidence


class Passes:
    def __init__(self, found):
        self.found = found

    def interaction(self):
        return self.found


def interaction(why, *names, rows_known=True):
    place = Place("net.py", 3, "x = mix(x)")
    ops = tuple(Op(n, name, print, (), {}, place, "body") for n, name in enumerate(names))
    return RowInteraction(0, 2, 5, rows_known, why, ops)


def named(found, *, declared=None, pairs=(), met=None, refused=None):
    labels = LabelRows(pairs=list(pairs), loss="cross_entropy", rows=5)
    evidence = FakeEvidence(
        None,
        shared={
            RowPasses: Passes(found),
            LabelRows.of: labels,
            meeting: met,
            RowShares.of: None,
            RowShares.tried: (None, refused),
            unpaired: None,
        },
    )
    evidence.declared = lambda name: declared if name == "rows_interact" else None
    return [(f.cause, f.level) for f in batch_independence(evidence)]


def test_rows_that_do_not_interact_pass():
    assert named(None) == []


def test_a_loop_that_takes_no_few_rows_is_not_passed():
    with pytest.raises(Refused, match="fit raised"):
        named(None, refused=Refused("fit raised ValueError: 12 rows expected on batches of this check"))


@pytest.mark.parametrize(
    ("why", "cause", "level"),
    [
        ("softmax", "softmax_over_rows", "fault"),
        ("normalised", "normalised_over_rows", "fault"),
        ("data_normalised", "normalised_over_rows", "advice"),
        ("views", "view_mixes_rows", "fault"),
        ("batch_first", "rows_as_positions", "fault"),
        ("unknown", "rows_interact", "advice"),
    ],
)
def test_the_operation_that_keeps_rows_apart_names_the_cause(why, cause, level):
    assert named(interaction(why, "roll")) == [(cause, level)]


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("data_normalised", "normalised_over_rows"),
        ("unknown", "rows_interact"),
        ("batch_norm", "rows_interact"),
    ],
)
def test_rows_that_are_declared_apart_must_be(why, cause):
    assert named(interaction(why, "roll"), declared=False) == [(cause, "fault")]


def test_statistics_of_a_batch_norm_are_no_finding():
    assert named(interaction("batch_norm", "batch_norm")) == []


def test_products_of_rows_may_be_meant_unless_it_is_declared_that_they_are_not():
    with pytest.raises(CannotDecide, match="declare rows_interact=True"):
        named(interaction("unknown", "matmul"))
    assert named(interaction("unknown", "matmul"), declared=False) == [("rows_interact", "fault")]


def test_what_may_be_positions_is_not_judged():
    with pytest.raises(CannotDecide, match="batch_dim=0 if they are rows"):
        named(interaction("softmax", "softmax", rows_known=False))


def test_rows_that_are_declared_to_interact_are_not_looked_at():
    with pytest.raises(CannotDecide, match="on purpose"):
        named(interaction("softmax", "softmax"), declared=True)


@pytest.mark.parametrize(
    ("pairs", "order"),
    [
        ([(0, 3), (3, 1), (1, 0)], "permuted"),
        ([(0, 0), (0, 1), (1, 2)], "swapped"),
        ([(0, 1), (1, 1), (2, 3)], "unknown"),
    ],
)
def test_rows_in_another_order_are_told_from_swapped_axes(pairs, order):
    assert LabelRows(pairs=pairs, rows=5).order == order


def test_labels_of_other_rows_come_first_unless_all_are_shifted_alike():
    found = interaction("softmax", "softmax")
    assert named(found, pairs=[(0, 0), (1, 3)]) == [("labels_of_other_rows", "fault")]
    assert named(found, pairs=[(1, 0), (2, 1), (0, 4)]) == [("softmax_over_rows", "fault")]
