"""What moves although it is frozen, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.frozen_stays_frozen.drift import drifting, lies_below
from pytest_trainloop.checks.wiring.frozen_stays_frozen.moved_at_rest import Moved, moved_at_rest, without_decay
from pytest_trainloop.recording.events import Forward, Place, TensorSample
from pytest_trainloop.recording.record import Record, Statistics
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import parameter


def trained(build, *on, moves=(0, 1), frozen=(), along=0.1):
    """One batch: zeroed, backward on some parameters, and a step that moves some."""
    build.backward(*on)
    step = build.step()
    step.updates = dict.fromkeys(moves, 1e-3)
    step.along = dict.fromkeys(moves, along)
    step.frozen = frozen
    return step


def causes(record):
    return {m.name: m.cause for m in moved_at_rest(record)}


def test_what_trains_may_move():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        trained(build)
    assert causes(build.record()) == {}


def test_what_is_declared_frozen_and_trains():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        trained(build)
    record = build.record()
    record.frozen = ("p1",)
    assert causes(record) == {"p1": "still_trainable"}


@pytest.mark.parametrize(("along", "cause"), [(-1.0, "weight_decay"), (0.3, "momentum")])
def test_a_frozen_parameter_moves_without_a_gradient(along, cause):
    build = RecordBuilder([0, 1])
    trained(build)
    for _ in range(3):
        build.zero(to_none=False)
        trained(build, 0, frozen=(1,), along=along)
    assert causes(build.record()) == {"p1": cause}


def test_without_an_earlier_gradient_there_is_no_momentum():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        trained(build, 0, frozen=(1,), along=0.3)
    assert causes(build.record()) == {}


def test_a_frozen_parameter_moves_by_an_old_gradient():
    build = RecordBuilder([0, 1])
    trained(build)
    for _ in range(3):
        build.zero(0)
        trained(build, 0, frozen=(1,))
    assert causes(build.record()) == {"p1": "stale_gradient"}


def test_a_gradient_put_there_by_hand_is_meant():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        build.assign(1)
        trained(build, 0, frozen=(1,))
    assert causes(build.record()) == {}


def test_a_gradient_that_is_zeroed_before_every_step_is_a_way_to_freeze():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.backward()
        build.zero(1, to_none=False, line=25)
        step = build.step()
        step.updates, step.along = {0: 1e-3, 1: 1e-3}, {0: 0.1, 1: -1.0}
        build.zero()
    assert causes(build.record()) == {"p1": "weight_decay"}


def test_gradients_that_are_all_zeroed_freeze_nothing():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.backward()
        build.zero(to_none=False, line=25)
        step = build.step()
        step.updates, step.along = {0: 1e-3, 1: 1e-3}, {0: -1.0, 1: -1.0}
    assert causes(build.record()) == {}


def test_gradients_that_arrive_inside_a_closure_are_new():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        step = build.step(closure=[build.backward])
        step.updates = {0: 1e-3, 1: 1e-3}
    record = build.record()
    record.frozen = ("p1",)
    assert causes(record) == {"p1": "still_trainable"}


def normed(*, rests=True, grad_enabled=True, within="", drifts=True, layer=True):
    """A body with a norm before a head that trains."""
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.zero()
        trained(build, 1, moves=(1,), frozen=(0,) if rests else ())
    build.parameters[0].name, build.parameters[0].owner = "body.norm.weight", "body.norm"
    build.parameters[1].name, build.parameters[1].owner = "head.weight", "head"
    build.parameters[0].requires_grad = not rests
    forward = Forward(
        at=0,
        place=Place("train.py", 5, "model(x)"),
        site=(("train.py", 5),),
        module=within,
        training=True,
        grad_enabled=grad_enabled,
        inference=False,
        in_training=("body.norm",),
    )
    record = build.record()
    if layer:
        record.parameters.append(parameter(2, "body.conv.weight", requires_grad=False))
    record.events.insert(0, forward)
    record.statistics = [
        Statistics(
            "body.norm.running_mean", "body.norm", TensorSample(0.0, b"0"), TensorSample(1.0, b"1" if drifts else b"0")
        )
    ]
    if not drifts:
        record.statistics[0].end = record.statistics[0].start
    return record


def drifted(record):
    return {level: d.names for level, d in zip(("fault", "advice"), drifting(record), strict=True) if d.names}


def test_the_statistics_of_a_frozen_norm_drift():
    assert drifted(normed()) == {"fault": ("body.norm.running_mean",)}


def test_a_norm_that_is_frozen_with_no_layer_next_to_it_may_follow_the_data():
    record = normed(layer=False)
    assert drifted(record) == {}
    record.frozen = ("body.norm",)
    assert drifted(record) == {"fault": ("body.norm.running_mean",)}


def test_a_norm_that_trains_may_follow_the_data():
    assert drifted(normed(rests=False)) == {}


def test_statistics_that_stay_are_fine():
    assert drifted(normed(drifts=False)) == {}


def test_those_of_a_net_that_is_called_on_its_own_are_advice_unless_declared():
    record = normed(within="body")
    assert drifted(record) == {"advice": ("body.norm.running_mean",)}
    record.frozen = ("body.",)
    assert drifted(record) == {"fault": ("body.norm.running_mean",)}


def test_a_run_without_decay_separates_decay_from_momentum():
    by_decay = Moved("p0", "momentum", 0.1, 3, "", may_decay=True)
    by_momentum = Moved("p1", "momentum", 0.1, 3, "", may_decay=True)
    by_something = Moved("p1", "unknown", 0.1, 3, "", may_decay=True)
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.step().updates = {1: 1e-3}
    without = build.record()
    decided = without_decay([by_decay, by_momentum, by_something], without)
    assert [(m.name, m.cause) for m in decided] == [("p0", "weight_decay"), ("p1", "momentum")]


NAMES = ("Model.weight", "net.body.weight", "net.body_of_another.weight", "critic.weight")


@pytest.mark.parametrize(
    ("root", "owner", "below"),
    [
        ("net", "net", True),
        ("net", "net.body", True),
        ("net.body", "net.body_of_another", False),
        ("net", "critic", False),
        ("critic", "net.body", False),
        ("Trainer", "net.body", True),
    ],
    ids=["itself", "a part", "a like name", "another", "another's part", "a whole model goes by its class"],
)
def test_what_lies_below_a_module(root, owner, below):
    made = Record(parameters=[parameter(i, name) for i, name in enumerate(NAMES)])
    assert lies_below(made, root, owner) is below
