"""What ``determinism`` says of two runs that differ."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.state.determinism.check import determinism
from pytest_trainloop.checks.state.determinism.first_difference import FirstCall
from pytest_trainloop.checks.state.determinism.repeat import Difference, Repetition, repetition
from pytest_trainloop.errors import CannotDecide
from tests.helpers.records import HERE, FakeEvidence, parameter, record

LOSS = Difference("the loss (1, then 2)", "loss", 3, "train.py:7")
RANDN = FirstCall("randn", HERE, "net", given_same=True)


def found(again, declared=None):
    made = record([parameter(0, "weight")], held=[0], gradients={})
    evidence = FakeEvidence(made, shared={repetition: again})
    if declared is not None:
        evidence.offers, evidence.declared = evidence.offers | {"nondeterministic"}, lambda _name: declared
    return list(determinism(evidence))


def test_two_equal_runs_are_fine():
    assert found(Repetition(None)) == []


@pytest.mark.parametrize(
    ("source", "cause", "level"),
    [
        ("random", "unseeded_random", "fault"),
        ("nondeterministic_kernel", "nondeterministic_kernel", "advice"),
        ("kept", "state_outside_loop", "advice"),
        ("settled", "state_outside_loop", "advice"),
    ],
)
def test_each_source_has_its_cause(source, cause, level):
    (finding,) = found(Repetition(LOSS, source))
    assert (finding.cause, finding.level, finding.culprits, finding.where) == (cause, level, ("loss",), "train.py:7")
    assert finding.measured == "first to differ: the loss (1, then 2), after 3 optimizer steps"


@pytest.mark.parametrize("source", ["nondeterministic_kernel", "kept"])
def test_runs_that_are_declared_to_repeat_must(source):
    (finding,) = found(Repetition(LOSS, source), declared=False)
    assert finding.level == "fault"


def test_the_first_call_that_differs_is_the_culprit():
    (finding,) = found(Repetition(LOSS, "random", RANDN))
    assert finding.culprits == ("randn",)
    assert finding.where == str(HERE)
    assert "randn() in net, which is given the same both times" in finding.shown_by


def test_without_child_processes_it_cannot_decide():
    with pytest.raises(CannotDecide, match="no process can be forked"):
        found(Repetition(LOSS))
