"""What ``padding_invariance`` says of comparisons that are given to it: a fault, or advice with the reason."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.padding_invariance.check import padding_invariance
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import PaddingFlow, PathCall
from pytest_trainloop.checks.batch.padding_invariance.runs import Comparison, PaddingRuns
from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.compare import Agreement
from pytest_trainloop.recording.events import Place
from tests.helpers.records import FakeEvidence

PART = BatchSlice((1,), 0, 8, 0, 4)
HERE = Place("train.py", 7, "loss.backward()")
APART = Agreement(1.1, 0.9, 0.3)


def compared(agreement=APART, part=PART):
    return Comparison(part, part.trimmed(), agreement, (1.0, 1.1), 3)


def call(op, path="pooling", *, zeros=False):
    return PathCall(path, op, HERE, zeros)


class Runs:
    """Comparisons made beforehand: with the ``paths`` blocked both gradients agree."""

    def __init__(self, found, paths=(), calls=(), *, cut=None, sure=True, varying=False, left=False, **flow):
        self._found, self._paths, self._cut = found, frozenset(paths), cut
        self._flow = PaddingFlow(blocked=list(calls), **flow)
        self.by_lengths = True
        self.sure, self.varying, self.left, self.reason = sure, varying, left, "mask is 0 there"

    def first_difference(self):
        return self._found

    def require_comparable(self, found):
        pass

    def explained_by(self, found, blocked):
        return bool(self._paths) and self._paths <= blocked

    def flow(self, found, blocked=frozenset()):
        return self._flow

    def path_calls(self, found):
        return self._flow.blocked

    def without_outputs(self, found):
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
        (Runs(compared(), ["attention"], [call("softmax", "attention")]), ("padded_keys_attended", "fault")),
        (
            Runs(compared(), ["attention"], [call("softmax", "attention")], sure=False),
            ("padded_keys_attended", "advice"),
        ),
        (Runs(compared(), inverted=call("softmax", "attention")), ("padded_keys_attended", "fault")),
        (Runs(compared(), inverted=call("softmax", "attention"), sure=False), ("padded_keys_attended", "advice")),
        (Runs(compared(), ["pooling"], [call("mean")]), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [call("mean", zeros=True)]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [call("mean", zeros=True)], varying=True), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [call("amax")]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [call("mean")], mixing=[call("conv1d")]), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [call("mean")], spread=True), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [call("mean")], length_is_target=True), ("padding_pooled", "advice")),
        (Runs(compared(), ["pooling"], [call("gru")], behind=True), ("padding_pooled", "fault")),
        (Runs(compared(), ["pooling"], [call("gru")]), ("padding_counts", "advice")),
        (Runs(compared(), ["pooling"], [call("gru")], behind=True, left=True), ("padding_counts", "advice")),
        (Runs(compared(), ["positions"], [call("embedding", "positions")]), ("positions_shifted", "advice")),
        (
            Runs(compared(), ["positions"], [call("embedding", "positions")], varying=True),
            ("positions_shifted", "fault"),
        ),
        (
            Runs(compared(), ["positions", "attention"], [call("softmax", "attention")]),
            ("padded_keys_attended", "fault"),
        ),
        (Runs(compared(Agreement(0.5, 1.0, 0.5))), ("mean_over_padding", "advice")),
        (Runs(compared(Agreement(3 / 7, 1.0, 0.5)), varying=True), ("mean_over_padding", "fault")),
        (Runs(compared(), cut=compared(Agreement(0.5, 1.0, 0.5))), ("padded_targets", "fault")),
        (Runs(compared(), cut=compared(Agreement(0.5, 1.0, 0.5)), sure=False), ("padded_targets", "advice")),
        (Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0))), ("padded_targets", "advice")),
        (Runs(compared()), ("padding_counts", "advice")),
        (Runs(compared(Agreement(0.45, 1.0, 0.55)), mixing=[call("conv1d")]), ("padding_counts", "advice")),
    ],
)
def test_cause_and_level(runs, expected):
    assert said(runs) == expected


def test_outputs_that_loss_contract_calls_padding_are_a_fault():
    runs = Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0)), sure=False)
    assert said(runs, behind=("a finding",)) == ("padded_targets", "fault")


def test_one_padded_position_may_be_the_end_of_a_text():
    runs = Runs(compared(part=BatchSlice((1,), 0, 8, 0, 7)), cut=compared(Agreement(1.0, 1.0, 0.0)))
    with pytest.raises(CannotDecide, match="end of a text"):
        said(runs)


def test_what_is_not_finite_is_not_judged():
    with pytest.raises(CannotDecide, match="finite"):
        said(Runs(compared(Agreement(float("nan"), float("nan"), float("inf")))))
