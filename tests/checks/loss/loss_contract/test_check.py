"""How ``loss_contract`` counts the calls that show a cause, and what it reports of them."""

import pytest

from pytest_trainloop.checks.loss.loss_contract.call import Judgement
from pytest_trainloop.checks.loss.loss_contract.check import loss_contract
from pytest_trainloop.checks.loss.loss_contract.recorder import CallSite, LossCallRecorder
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.record import Optimizer
from pytest_trainloop.runs.weight_origins import pretrained
from tests.helpers.records import ONE, FakeEvidence, parameter, record

LINE = "train.py:7   loss = F.cross_entropy(model(x), y)"


def judgement(cause="class_axis", *, culprit="cross_entropy", where=LINE, in_every_call=False, **fields):
    finding = Finding(cause=cause, summary="...", culprits=(culprit,), where=where, **fields)
    return Judgement(finding, in_every_call)


def recorded(*judgements, calls=3, name="cross_entropy", layer="head", record=None):
    """A recorder that saw calls from one line, with these judgements of them."""
    recorder = LossCallRecorder()
    site = CallSite(name, layer=layer, where=LINE, with_history=calls, judged=calls)
    for one in judgements:
        site.judgements[one.finding.cause, one.finding.culprits[0]].append(one)
    recorder.sites[name, (), layer] = site
    recorder._record = record
    return recorder


def found(recorder, *, are_pretrained=False):
    evidence = FakeEvidence(None, shared={LossCallRecorder.of: recorder, pretrained: are_pretrained})
    return [(f.cause, f.level, f.measured) for f in loss_contract(evidence)]


def test_a_cause_is_reported_with_the_number_of_calls_that_show_it():
    assert found(recorded(judgement(), judgement())) == [("class_axis", "fault", "in 2 of 3 calls")]
    assert found(recorded(judgement(measured="axis 1"), calls=1)) == [("class_axis", "fault", "axis 1")]


def test_what_must_be_in_every_call_is_dropped_where_one_call_lacks_it():
    three = [judgement(in_every_call=True)] * 3
    assert found(recorded(*three[:2])) == []
    assert found(recorded(*three)) == [("class_axis", "fault", "in 3 of 3 calls")]


def test_one_line_is_reported_once_though_its_scores_come_from_two_layers():
    recorder = recorded(judgement())
    recorder.sites["cross_entropy", (), "tail"] = recorded(judgement(), layer="tail").sites["cross_entropy", (), "tail"]
    assert len(found(recorder)) == 1


def trained(*, maximizes=False, held=(0,)):
    made = record([parameter(0, "head.weight")], held=held, gradients={0: ONE})
    made.optimizers[0] = Optimizer(0, "Adam", declared=True, parameters=tuple(held), maximizes=maximizes)
    return made


def flipped(record):
    return recorded(*[judgement("sign_flipped", in_every_call=True)] * 3, record=record)


def test_a_flipped_sign_is_a_fault_where_it_trains_randomly_initialised_weights():
    assert found(flipped(trained())) == [("sign_flipped", "fault", "in 3 of 3 calls")]
    assert found(flipped(trained()), are_pretrained=True) == [("sign_flipped", "advice", "in 3 of 3 calls")]


def test_a_flipped_sign_is_meant_where_the_optimizer_maximises_or_does_not_hold_the_layer():
    assert found(flipped(trained(maximizes=True))) == []
    assert found(flipped(trained(held=()))) == []


def test_a_flipped_sign_is_meant_next_to_another_loss():
    recorder = flipped(trained())
    recorder.sites["mse_loss", (), "head"] = CallSite("mse_loss", layer="head", judged=3)
    assert found(recorder) == []


def test_a_loss_that_no_gradient_reaches_is_left_out_where_others_are_backpropagated():
    recorder = recorded()
    recorder.sites["mse_loss", (), "aux"] = CallSite("mse_loss", layer="aux", where=LINE, with_history=3)
    assert found(recorder) == [("part_left_out", "advice", "no gradient reaches it; in 3 of 3 calls")]
    recorder.sites["cross_entropy", (), "head"].judged = 0
    assert found(recorder) == []


def test_a_call_that_could_not_be_judged_is_no_pass():
    recorder = recorded()
    recorder.unread.append("cross_entropy at train.py:7: ValueError: ...")
    with pytest.raises(CannotDecide, match="could not be judged: cross_entropy at"):
        found(recorder)
    recorder.sites["cross_entropy", (), "head"].judgements["class_axis", ""].append(judgement())
    assert len(found(recorder)) == 1
