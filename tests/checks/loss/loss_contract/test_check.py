"""How ``loss_contract`` counts the calls that show a cause, and what it reports of them."""

import pytest

from pytest_trainloop.checks.loss.loss_contract.call import Judgement
from pytest_trainloop.checks.loss.loss_contract.check import loss_contract
from pytest_trainloop.checks.loss.loss_contract.recorder import CallSite, LossCallRecorder
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.runs.weight_origins import pretrained
from tests.helpers.records import FakeEvidence

LINE = "train.py:7   loss = F.cross_entropy(model(x), y)"


def judgement(measured=""):
    culprits = ("cross_entropy",)
    finding = Finding(cause="class_axis", summary="...", culprits=culprits, where=LINE, measured=measured)
    return Judgement(finding, in_every_call=False)


def recorded(*judgements, calls=3):
    """A recorder that saw calls from one line, with these judgements of them."""
    recorder = LossCallRecorder()
    site = CallSite("cross_entropy", layer="head", where=LINE, with_history=calls, judged=calls)
    for one in judgements:
        site.judgements["class_axis", "cross_entropy"].append(one)
    recorder.sites["cross_entropy", (), "head"] = site
    return recorder


def found(recorder):
    evidence = FakeEvidence(None, shared={LossCallRecorder.of: recorder, pretrained: False})
    return [(f.cause, f.level, f.measured) for f in loss_contract(evidence)]


def test_a_cause_is_reported_with_the_number_of_calls_that_show_it():
    assert found(recorded(judgement(), judgement())) == [("class_axis", "fault", "in 2 of 3 calls")]
    assert found(recorded(judgement(measured="axis 1"), calls=1)) == [("class_axis", "fault", "axis 1")]


def test_a_call_that_could_not_be_judged_is_no_pass():
    recorder = recorded()
    recorder.unread.append("cross_entropy at train.py:7: ValueError: ...")
    with pytest.raises(CannotDecide, match="could not be judged: cross_entropy at"):
        found(recorder)
    recorder.sites["cross_entropy", (), "head"].judgements["class_axis", ""].append(judgement())
    assert len(found(recorder)) == 1
