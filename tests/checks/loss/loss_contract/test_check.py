"""How ``loss_contract`` counts the calls that show a cause, and what it reports of them."""

import pytest

from pytest_trainloop import Finding
from pytest_trainloop.checks.loss.loss_contract.calls import CallSite, LossCalls
from pytest_trainloop.checks.loss.loss_contract.check import loss_contract
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.runs.weight_origins import pretrained
from tests.helpers.records import FakeEvidence, record

LINE = "train.py:7   loss = F.cross_entropy(model(x), y)"


def finding(measured=""):
    return Finding(cause="class_axis", summary="...", culprits=("cross_entropy",), where=LINE, measured=measured)


def recorded(*findings, calls=3):
    """The calls of a run in which some from one line have these findings."""
    made = LossCalls()
    made._record = record([], held=(), gradients={})
    site = CallSite("cross_entropy", "head", LINE, (), of_table=False, with_history=calls, judged=calls)
    site.findings["class_axis", "cross_entropy"] = list(findings)
    made.sites["cross_entropy", (), "head"] = site
    return made


def found(calls):
    evidence = FakeEvidence(None, shared={LossCalls.of: calls, pretrained: False})
    return [(f.cause, f.level, f.measured) for f in loss_contract(evidence)]


def test_a_cause_is_reported_with_the_number_of_calls_that_show_it():
    assert found(recorded(finding(), finding())) == [("class_axis", "fault", "in 2 of 3 calls")]
    assert found(recorded(finding(measured="axis 1"), calls=1)) == [("class_axis", "fault", "axis 1")]


def test_a_call_that_could_not_be_judged_is_no_pass():
    calls = recorded()
    calls.sites.clear()
    calls.unread.append("cross_entropy at train.py:7: ValueError: ...")
    with pytest.raises(CannotDecide, match="could not be judged: cross_entropy at"):
        found(calls)
    calls.sites["cross_entropy", (), "head"] = recorded(finding()).sites["cross_entropy", (), "head"]
    assert len(found(calls)) == 1
