"""Which cause ``causality`` names for outputs that see the inputs that they predict."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.batch.causality.check import causality
from pytest_trainloop.checks.batch.causality.operations_ahead import OperationAhead
from pytest_trainloop.checks.batch.causality.passes import CausalPasses, Leak
from pytest_trainloop.recording.events import Place
from pytest_trainloop.recording.record import Record
from pytest_trainloop.tracing.forward_pass import Op
from tests.helpers.records import FakeEvidence

BOTH = ("training", "evaluation")


class Passes:
    def __init__(self, found):
        self.found = found

    def leak(self):
        return self.found


def operation(name, kind, *offsets):
    return OperationAhead(Op(0, name, print, (), {}, Place("net.py", 3), "attention"), kind, frozenset(offsets))


def leak(kind, *operations, modes=BOTH, attentions=1, clean=False):
    return Leak(
        ahead=1,
        length=12,
        offsets=(0, 1),
        modes=modes,
        loss="cross_entropy",
        loss_place="train.py:7",
        kind=kind,
        operations=operations,
        attentions=attentions,
        confirmed=True,
        other_loss_is_clean=clean,
    )


def findings(found, *, evaluates=False):
    evidence = FakeEvidence(Record(), shared={CausalPasses: Passes(found)})
    evidence.offers = evidence.offers | ({"evaluate"} if evaluates else set())
    return list(causality(evidence))


def named(found, **how):
    return [(f.cause, f.level) for f in findings(found, **how)]


def test_what_does_not_leak_passes():
    assert named(None) == []


@pytest.mark.parametrize(
    ("name", "kind", "offsets", "cause"),
    [
        ("matmul", "attention", (-3, 0, 5), "causal_mask_missing"),
        ("matmul", "attention", (-3, 0, 1), "mask_off_by_one"),
        ("matmul", "attention", (0, 1, 5), "mask_inverted"),
        ("softmax", "attention", (), "masked_after_softmax"),
        ("matmul", "attention", (), "causal_mask_missing"),
        ("softmax", "softmax", (), "softmax_over_queries"),
        ("view", "views", (), "view_mixes_positions"),
        ("lstm", "recurrent", (1,), "bidirectional_layer"),
        ("conv1d", "convolution", (1,), "convolution_sees_ahead"),
        ("mean", "statistics", (), "statistics_over_time"),
        ("roll", "other", (1,), "sees_the_future"),
    ],
)
def test_the_offsets_of_the_operation_name_the_cause(name, kind, offsets, cause):
    assert named(leak(kind, operation(name, kind, *offsets))) == [(cause, "fault")]


def test_some_attentions_among_others_are_counted():
    (found,) = findings(leak("attention", operation("matmul", "attention", -3, 5), attentions=4))
    assert found.summary == "1 of 4 attentions see later positions"


def test_a_leak_in_evaluation_alone_is_a_fault_only_where_the_loop_evaluates():
    found = leak("attention", operation("matmul", "attention", -3, 5), modes=("evaluation",))
    assert named(found) == [("mask_missing_in_eval", "advice")]
    assert named(found, evaluates=True) == [("mask_missing_in_eval", "fault")]


def test_a_loss_whose_outputs_see_no_answer_makes_it_advice():
    found = leak("attention", operation("matmul", "attention", -3, 5), clean=True)
    assert named(found) == [("causal_mask_missing", "advice")]


def test_where_no_operation_was_found_the_loss_is_the_place():
    (found,) = findings(leak(None))
    assert (found.cause, found.where) == ("sees_the_future", "train.py:7")
