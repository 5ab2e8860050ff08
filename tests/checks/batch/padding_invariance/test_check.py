"""What ``padding_invariance`` says of comparisons that are given to it: a fault, or advice with the reason."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.padding_invariance.check import padding_invariance
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import Met, Seen
from pytest_trainloop.checks.batch.padding_invariance.runs import Compared, PaddingRuns
from pytest_trainloop.checks.batch.padding_invariance.slices import Part
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement
from pytest_trainloop.recording.events import Place
from tests.helpers.records import FakeEvidence

PART = Part((1,), 0, 8, 0, 4)
HERE = Place("train.py", 7, "loss.backward()")
APART = Agreement(1.1, 0.9, 0.3)


def compared(agreement=APART, part=PART):
    return Compared(part, part.trimmed(), agreement, (1.0, 1.1), 3)


def met(op, way="pooling", *, zeros=False):
    return Met(way, op, HERE, zeros)


class Runs:
    """Comparisons made beforehand: ``closing`` are the ways that, closed, make both gradients agree."""

    def __init__(self, found, closing=(), closed=(), *, cut=None, sure=True, varying=False, left=False, **seen):
        self._found, self._closing, self._cut = found, frozenset(closing), cut
        self._seen = Seen(closed=list(closed), **seen)
        self.by_lengths = True
        self.sure, self.varying, self.left, self.reason = sure, varying, left, "mask is 0 there"

    def first_difference(self):
        return self._found

    def require_comparable(self, found):
        pass

    def closes(self, found, ways):
        return found if self._closing and self._closing <= ways else None

    def seen(self, found, ways=frozenset()):
        return self._seen

    def touched(self, found):
        return self._seen.closed

    def cut(self, found, ways):
        return self._cut

    def backward(self, found):
        return "train.py:7   loss.backward()"

    def smallest(self, found, holds):
        return found if holds(found) else None


def said(runs, behind=()):
    evidence = FakeEvidence(None, shared={PaddingRuns.of: [runs]})
    evidence.root_causes = lambda _check: behind
    found = list(padding_invariance(evidence))
    assert len(found) <= 1
    return (found[0].cause, found[0].level) if found else None


def test_no_difference_is_no_finding():
    assert said(Runs(None)) is None


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (Runs(compared(), ["attention"], [met("softmax", "attention")]), ("padded_keys_attended", "fault")),
        (
            Runs(compared(), ["attention"], [met("softmax", "attention")], sure=False),
            ("padded_keys_attended", "advice"),
        ),
        (Runs(compared(), inverted=met("softmax", "attention")), ("padded_keys_attended", "fault")),
        (Runs(compared(), inverted=met("softmax", "attention"), sure=False), ("padded_keys_attended", "advice")),
        (Runs(compared(), ["pooling"], [met("mean")]), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [met("mean", zeros=True)]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [met("mean", zeros=True)], varying=True), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [met("amax")]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [met("mean")], met=[met("conv1d")]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [met("mean")], spread=True), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [met("mean")], target=True), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [met("gru")], behind=True), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [met("gru")]), ("padding_counts", "advice")),
        (Runs(compared(), ["pooling"], [met("gru")], behind=True, left=True), ("padding_counts", "advice")),
        (Runs(compared(), ["positions"], [met("embedding", "positions")]), ("positions_shifted", "advice")),
        (
            Runs(compared(), ["positions"], [met("embedding", "positions")], varying=True),
            ("positions_shifted", "fault"),
        ),
        (
            Runs(compared(), ["positions", "attention"], [met("softmax", "attention")]),
            ("padded_keys_attended", "fault"),
        ),
        (Runs(compared(Agreement(0.5, 1.0, 0.5))), ("mean_over_padding", "advice")),
        (Runs(compared(Agreement(3 / 7, 1.0, 0.5)), varying=True), ("mean_over_padding", "fault")),
        (Runs(compared(), cut=compared(Agreement(0.5, 1.0, 0.5))), ("padded_targets", "fault")),
        (Runs(compared(), cut=compared(Agreement(0.5, 1.0, 0.5)), sure=False), ("padded_targets", "advice")),
        (Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0))), ("padded_targets", "advice")),
        (Runs(compared()), ("padding_counts", "advice")),
        (Runs(compared(Agreement(0.45, 1.0, 0.55)), met=[met("conv1d")]), ("padding_counts", "advice")),
    ],
)
def test_cause_and_level(runs, expected):
    assert said(runs) == expected


def test_outputs_that_loss_contract_calls_padding_are_a_fault():
    runs = Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0)), sure=False)
    assert said(runs, behind=("a finding",)) == ("padded_targets", "fault")


def test_one_padded_position_may_be_the_end_of_a_text():
    runs = Runs(compared(part=Part((1,), 0, 8, 0, 7)), cut=compared(Agreement(1.0, 1.0, 0.0)))
    with pytest.raises(CannotDecide, match="end of a text"):
        said(runs)


def test_what_is_not_finite_is_not_judged():
    with pytest.raises(CannotDecide, match="finite"):
        said(Runs(compared(Agreement(float("nan"), float("nan"), float("inf")))))
