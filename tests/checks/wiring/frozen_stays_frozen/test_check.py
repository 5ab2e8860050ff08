"""What ``frozen_stays_frozen`` says of a record."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.frozen_stays_frozen.check import frozen_stays_frozen
from pytest_trainloop.checks.wiring.frozen_stays_frozen.held_entries import HeldEntries
from pytest_trainloop.recording.events import Forward, Place, TensorSample
from pytest_trainloop.recording.record import Optimizer, Statistics
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence, parameter


class Rerun(FakeEvidence):
    """``without`` is the run without weight decay; modules are watched in vain."""

    def __init__(self, record, without=None):
        super().__init__(record, shared={HeldEntries.of: []})
        self._without = without

    def rerun(self, **_how):
        return self._without


def found(record, without=None):
    return [(f.cause, f.level, f.culprits) for f in frozen_stays_frozen(Rerun(record, without))]


def trained(build, *on, moves=(0, 1), frozen=(), along=0.1, **how):
    """A backward pass on some parameters, and a step that moves some."""
    build.backward(*on)
    step = build.step(**how)
    step.updates, step.along, step.frozen = dict.fromkeys(moves, 1e-3), dict.fromkeys(moves, along), frozen
    return step


def story_of(*, along=0.3):
    """One batch trains both parameters; in three more the second does not require grad, and the steps move it."""
    build = RecordBuilder([0, 1])
    trained(build)
    for _ in range(3):
        build.zero(to_none=False)
        trained(build, 0, frozen=(1,), along=along)
    return build


def test_what_the_finding_shows():
    (finding,) = frozen_stays_frozen(Rerun(story_of(along=-1.0).record()))
    assert finding.summary == "p1 is frozen, and moved by weight decay"
    assert finding.measured == "3 of 4 steps moved p1, by up to 1.0e-03 of its largest entry"
    assert "agreement with them is -1.0000" in finding.shown_by


def test_an_optimizer_that_keeps_momentum_may_decay_as_well():
    build = story_of()
    build.optimizers[0].parameters = (0, 1, 2)
    build.parameters.append(parameter(2, "p2"))
    for event in build.events:
        if hasattr(event, "updates"):
            event.updates[2], event.along[2], event.frozen = 2e-3, -1.0, (*event.frozen, 2)
            event.reads[0].grads[2] = None
    assert found(build.record()) == [("momentum", "fault", ("p1", "p2"))]


@pytest.mark.parametrize(("stays", "cause"), [(True, "weight_decay"), (False, "momentum")])
def test_a_run_without_decay_separates_decay_from_momentum(stays, cause):
    build, without = story_of(), story_of()
    for each in (build, without):
        each.optimizers[0] = Optimizer(0, "SGD", True, (0, 1), (0, 0), weight_decays=(0.1,), steps=4)
    for event in without.events if stays else ():
        if hasattr(event, "updates"):
            event.updates.pop(1)
    assert found(build.record(), without.record()) == [(cause, "fault", ("p1",))]


@pytest.mark.parametrize("frozen", [None, ("p1",)])
@pytest.mark.parametrize("closure", [False, True])
def test_what_trains_moves_unless_it_is_declared_frozen(frozen, closure):
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        if closure:
            build.step(closure=[build.backward]).updates = {0: 1e-3, 1: 1e-3}
        else:
            trained(build)
    record = build.record()
    record.frozen = frozen
    assert found(record) == [("still_trainable", "fault", ("p1",))] * bool(frozen)


@pytest.mark.parametrize("assigned", [False, True])
def test_without_an_earlier_gradient_there_is_no_momentum_and_one_put_there_by_hand_is_meant(assigned):
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        if assigned:
            build.assign(1)
        trained(build, 0, frozen=(1,), along=0.3)
    assert found(build.record()) == []


@pytest.mark.parametrize(("zeroed", "causes"), [((1,), ["weight_decay"]), ((), [])])
def test_a_gradient_that_is_zeroed_before_every_step_is_a_way_to_freeze_unless_all_are(zeroed, causes):
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.backward()
        build.zero(*zeroed, to_none=False, line=25)
        step = build.step()
        step.updates, step.along = {0: 1e-3, 1: 1e-3}, {0: 0.1, 1: -1.0}
        build.zero()
    assert [cause for cause, _, _ in found(build.record())] == causes


DRIFTS = "body.norm.running_mean"


def normed(*, root="", rests=True, drifts=True, layer=True, frozen=None):
    """A body with a norm before a head that trains; ``root`` is the module that is called."""
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        trained(build, 1, moves=(1,), frozen=(0,) if rests else ())
    build.parameters[0].name, build.parameters[0].owner = "body.norm.weight", "body.norm"
    build.parameters[1].name, build.parameters[1].owner = "head.weight", "head"
    build.parameters[0].requires_grad = not rests
    record = build.record()
    record.frozen = frozen
    if layer:
        record.parameters.append(parameter(2, "body.conv.weight", requires_grad=False))
    how = {"training": True, "grad_enabled": True, "inference": False, "in_training": ("body.norm",)}
    place = Place("train.py", 5, "model(x)")
    record.events.insert(0, Forward(at=0, place=place, site=(("train.py", 5),), module=root, **how))
    start = TensorSample(0.0, b"0")
    record.statistics = [Statistics(DRIFTS, "body.norm", start, TensorSample(1.0, b"1") if drifts else start)]
    return record


@pytest.mark.parametrize(
    ("how", "level"),
    [
        ({}, "fault"),
        ({"root": "Trainer"}, "fault"),
        ({"root": "body"}, "advice"),
        ({"root": "body", "frozen": ("body.",)}, "fault"),
        ({"layer": False}, None),
        ({"layer": False, "frozen": ("body.norm",)}, "fault"),
        ({"rests": False}, None),
        ({"drifts": False}, None),
    ],
)
def test_the_statistics_of_a_frozen_norm(how, level):
    expected = [("statistics_drift", level, (DRIFTS,))] if level else []
    assert found(normed(**how)) == expected
