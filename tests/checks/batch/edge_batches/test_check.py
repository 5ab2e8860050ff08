"""Which batches are a fault, which are advice and which are nobody's business, from what the runs say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pytest_trainloop.checks.batch.edge_batches import embedding_range, length_one, squeeze_proof
from pytest_trainloop.checks.batch.edge_batches.check import edge_batches
from pytest_trainloop.checks.batch.edge_batches.last_batch import Ending
from pytest_trainloop.checks.batch.edge_batches.length_one import ShortRow
from pytest_trainloop.checks.batch.edge_batches.runs import Edges, Outcome
from pytest_trainloop.checks.batch.edge_batches.squeeze_proof import SqueezedRow
from pytest_trainloop.checks.batch.edge_batches.squeezes import SqueezeCall
from pytest_trainloop.compositions.composition import Composition
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.events import Place
from pytest_trainloop.recording.record import Record
from tests.helpers.records import FakeEvidence

UNKNOWN, DROPS = Ending(), Ending(drops=True)
LEAVES_ONE = Ending(last=(12,), batch_size=4, data=13)
LEAVES_ANY = Ending(last=(12,), batch_size=4, data=13, shuffles=True)
LEAVES_TWO = Ending(last=(12, 13), batch_size=4, data=14)

FINE = Outcome("1 row", Record())
RAISED = Outcome("1 row", Record(), raised="ValueError: Expected more than 1 value per channel")
BY_THE_LOOP = Outcome("1 row", Record(), raised="ValueError: at least two rows", raised_by_loop=True)
NAN = Outcome("1 row", Record(), nonfinite=("weight", "bias"))
NAN_LOSS = Outcome("1 row", Record(), nonfinite_loss=True)


def lost(raised="RuntimeError: size mismatch"):
    call = SqueezeCall((1, 8, 1), frozenset({0, 2}), "squeeze()", Place("net.py", 3, "x.squeeze()"))
    return SqueezedRow((call,), raised, "", 0.125, 1.0, (0.5, 0.5))


@dataclass
class Answered:
    """What the check asks of the runs, answered at once."""

    ending: Ending = UNKNOWN
    one_row: Outcome = FINE
    squeezed: SqueezedRow | None = None
    last: Outcome | None = None
    empty: Outcome | None = None
    may_be_empty: bool = False
    short: ShortRow | None = None
    nothing_counts_in: dict[int, int] = field(default_factory=dict)
    count: int = 4
    first: Composition = field(default_factory=lambda: Composition((2,)))

    def leftover(self):
        return self.last

    def nothing_counts(self):
        return self.empty


@pytest.fixture(autouse=True)
def no_runs(monkeypatch):
    monkeypatch.setattr(squeeze_proof, "proven", lambda edges: edges.squeezed)
    monkeypatch.setattr(length_one, "shortest", lambda edges: edges.short)
    monkeypatch.setattr(embedding_range, "beyond_table", lambda edges: None)


def given(**said):
    return FakeEvidence(None, shared={Edges.of: Answered(**said)})


def named(**said):
    return [(f.cause, f.level) for f in edge_batches(given(**said))]


def test_all_is_well():
    assert named() == []


@pytest.mark.parametrize(
    ("ending", "level"),
    [(UNKNOWN, "advice"), (LEAVES_ONE, "fault"), (LEAVES_ANY, "fault"), (LEAVES_TWO, "advice"), (DROPS, None)],
)
def test_a_lost_row_by_what_the_loader_leaves(ending, level):
    expected = [("row_axis_squeezed", level)] if level else []
    assert named(one_row=RAISED, squeezed=lost(), ending=ending) == expected


def test_a_lost_row_that_nothing_raises_on():
    assert named(one_row=RAISED, squeezed=lost(raised=""), ending=UNKNOWN) == [("row_axis_squeezed", "fault")]


def test_a_lost_row_explains_the_leftover_batch():
    assert named(one_row=RAISED, squeezed=lost(), last=RAISED, ending=LEAVES_ONE) == [("row_axis_squeezed", "fault")]


def test_a_gradient_that_is_another_one_is_told_with_its_factor():
    (found,) = edge_batches(given(squeezed=lost(raised="")))
    assert "nothing is raised" in found.summary
    assert "(1, 8, 1) becomes (8,)" in found.measured
    assert "0.125 times as long" in found.measured


@pytest.mark.parametrize(("last", "named_it"), [(RAISED, True), (NAN, True), (FINE, False), (BY_THE_LOOP, False)])
def test_the_loaders_last_batch(last, named_it):
    assert named(last=last, ending=LEAVES_ONE) == ([("leftover_batch", "fault")] if named_it else [])


@pytest.mark.parametrize("one", [RAISED, NAN])
def test_one_row_that_breaks_the_loop_decides_nothing(one):
    with pytest.raises(CannotDecide, match="nothing says whether one comes"):
        named(one_row=one)


@pytest.mark.parametrize("ending", [DROPS, LEAVES_TWO, LEAVES_ONE])
def test_one_row_that_does_not_come_or_was_judged_is_not_asked_for(ending):
    assert named(one_row=RAISED, ending=ending) == []


def test_what_the_loop_raises_by_itself_is_its_answer():
    with pytest.raises(CannotDecide, match=r"the loop refuses a batch of one row: fit raises \w+"):
        named(one_row=BY_THE_LOOP)


@pytest.mark.parametrize(
    ("empty", "may_be", "level"),
    [
        (NAN, True, "fault"),
        (NAN, False, "advice"),
        (NAN_LOSS, True, "advice"),
        (NAN_LOSS, False, None),
        (FINE, True, None),
        (RAISED, True, None),
    ],
)
def test_a_batch_in_which_nothing_counts(empty, may_be, level):
    expected = [("nan_when_all_ignored", level)] if level else []
    assert named(empty=empty, may_be_empty=may_be, nothing_counts_in={1: 3}) == expected


def test_nothing_counts_comes_before_length_one():
    assert named(empty=NAN, short=ShortRow(NAN, 1)) == [("nan_when_all_ignored", "advice")]


@pytest.mark.parametrize(("ending", "level"), [(LEAVES_ANY, "fault"), (LEAVES_ONE, "advice"), (UNKNOWN, "advice")])
def test_length_one(ending, level):
    assert named(short=ShortRow(NAN, 1), ending=ending) == [("nan_at_length_one", level)]


@pytest.mark.parametrize("outcome", [FINE, RAISED, NAN_LOSS])
def test_length_one_that_loses_no_weights(outcome):
    assert named(short=ShortRow(outcome, 1), ending=LEAVES_ANY) == []


def test_a_loader_that_drops_gives_no_single_row():
    assert named(empty=NAN, may_be_empty=True, short=ShortRow(NAN, 1), ending=DROPS) == []
