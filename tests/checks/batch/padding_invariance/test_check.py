"""What ``padding_invariance`` says of comparisons that are given to it: a fault, or advice with the reason."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.padding_invariance.check import CAUSES, padding_invariance
from pytest_trainloop.checks.batch.padding_invariance.comparison import Comparison
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import PaddingFlow, PathCall
from pytest_trainloop.checks.batch.padding_invariance.grouped import padding_runs
from pytest_trainloop.checks.batch.padding_invariance.meetings import Meeting
from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice
from pytest_trainloop.checks.batch.padding_invariance.smaller import composed
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.gradients.compare import Agreement
from pytest_trainloop.recording.events import Place
from tests.helpers.records import FakeEvidence

PART = BatchSlice((1,), 0, 8, 0, 4)
HERE = Place("train.py", 7, "loss.backward()")
APART = Agreement(1.1, 0.9, 0.3)


def compared(agreement=APART, part=PART, *, statistics=False):
    return Comparison(part, part.trimmed(), agreement, (1.0, 1.1), 3, statistics=statistics)


def call(op, path="pooling", *, zeros=False):
    return PathCall(path, op, HERE, zeros)


class Runs:
    """Comparisons made beforehand: with the ``paths`` blocked both gradients agree."""

    pad_ids = ()

    def __init__(self, found, paths=(), calls=(), *, cut=None, **more):
        self._found, self._paths, self._cut = found, frozenset(paths), cut
        self.of_ids, self.name, self.instead = True, "", None
        self.met, self._longer = more.pop("met", []), more.pop("longer", False)
        self.reason, self._one_length = "mask is 0 there", more.pop("one_length", False)
        self.declared, self.varying, self.left = (more.pop(k, False) for k in ("declared", "varying", "left"))
        self.sure, self.by_lengths = more.pop("sure", True), not self.declared
        self._flow = PaddingFlow(blocked=list(calls), **more)

    def first_difference(self):
        return self._found

    def require_comparable(self, found):
        pass

    def explained_by(self, found, blocked):
        return bool(self._paths) and self._paths <= blocked

    def flow(self, found, blocked=frozenset()):
        return self._flow

    def of_one_length(self, calls):
        return self._one_length

    def for_longer_rows(self, calls):
        return self._longer

    def path_calls(self, found):
        return self._flow.blocked

    def meetings(self, found):
        return self.met

    def without_outputs(self, found):
        return self._cut

    def backward(self, found):
        return "train.py:7   loss.backward()"

    def composition(self, chosen):
        return composed(chosen, lambda batch, chosen: batch)

    def smallest(self, found, holds):
        return found if holds(found) else None


def finding(runs, behind=()):
    evidence = FakeEvidence(None, shared={padding_runs: [runs]})
    evidence.root_causes = lambda _check: behind
    return list(padding_invariance(evidence))


def said(runs, behind=()):
    found = finding(runs, behind)
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
            Runs(compared(), ["positions"], [call("embedding", "positions")], longer=True),
            ("positions_shifted", "fault"),
        ),
        (Runs(compared(), met=[Meeting("gather", HERE, padded=True)]), ("padded_targets", "fault")),
        (Runs(compared(), met=[Meeting("gather", HERE, padded=True)], sure=False), ("padded_targets", "advice")),
        (Runs(compared(), met=[Meeting("mean", HERE, reduces=True, padded=True)]), ("padding_counts", "advice")),
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


@pytest.mark.parametrize(
    ("cause", "runs"),
    [
        ("padding_pooled", lambda **d: Runs(compared(), ["pooling"], [call("mean", zeros=True)], **d)),
        ("padding_pooled", lambda **d: Runs(compared(), ["pooling"], [call("amax")], **d)),
        (
            "padding_pooled",
            lambda **d: Runs(compared(), ["pooling"], [call("mean")], mixing=[call("conv1d")], **d),
        ),
        ("padding_pooled", lambda **d: Runs(compared(), ["pooling"], [call("mean")], spread=True, **d)),
        ("padding_counts", lambda **d: Runs(compared(), ["pooling"], [call("gru")], **d)),
        ("positions_shifted", lambda **d: Runs(compared(), ["positions"], [call("embedding", "positions")], **d)),
        ("mean_over_padding", lambda **d: Runs(compared(Agreement(0.5, 1.0, 0.5)), **d)),
        ("padded_targets", lambda **d: Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0)), **d)),
        ("padding_counts", lambda **d: Runs(compared(), **d)),
    ],
)
def test_what_may_be_meant_is_a_fault_where_padding_is_declared(cause, runs):
    (advice,) = finding(runs())
    assert (advice.cause, advice.level) == (cause, "advice")
    assert "declare padding=Padding(...)" in advice.summary
    (fault,) = finding(runs(declared=True))
    assert (fault.cause, fault.level) == (cause, "fault")
    assert f'skip={{"padding_invariance:{cause}": "why"}}' in (fault.repair or CAUSES[cause].repair)


def test_statistics_of_a_batch_norm_over_declared_padding():
    found = compared(statistics=True)
    assert said(Runs(found, normed=call("batch_norm"), declared=True)) == ("padding_counts", "fault")


def test_what_even_a_declaration_does_not_decide():
    positions = Runs(
        compared(), ["positions"], [call("embedding", "positions")], declared=True, one_length=True, sure=True
    )
    assert said(positions) == ("positions_shifted", "advice")
    drawn = Runs(compared(), drawn=[("randint", (), ())], declared=True)
    assert said(drawn) == ("padding_counts", "advice")


def test_outputs_that_loss_contract_calls_padding_are_a_fault():
    runs = Runs(compared(), cut=compared(Agreement(1.0, 1.0, 0.0)), sure=False)
    counted = Finding(cause="padding_counted", summary="padding counts")
    assert said(runs, behind=(counted,)) == ("padded_targets", "fault")


def test_one_padded_position_may_be_the_end_of_a_text():
    runs = Runs(compared(part=BatchSlice((1,), 0, 8, 0, 7)), cut=compared(Agreement(1.0, 1.0, 0.0)))
    with pytest.raises(CannotDecide, match="end of a text"):
        said(runs)


def test_what_is_not_finite_is_not_judged():
    with pytest.raises(CannotDecide, match="finite"):
        said(Runs(compared(Agreement(float("nan"), float("nan"), float("inf")))))
