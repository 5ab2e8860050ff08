"""What ``frozen_stays_frozen`` says of a record."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.frozen_stays_frozen.check import frozen_stays_frozen
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence


def story_of(*, along=0.3, zeros=True):
    """One batch trains both parameters; in three more the second does not require grad, and the steps move it."""
    build = RecordBuilder([0, 1])
    for batch in range(4):
        if zeros:
            build.zero(to_none=False)
        else:
            build.zero(0)
        build.backward(*(() if batch == 0 else (0,)))
        step = build.step()
        step.updates = {0: 1e-3, 1: 1e-3}
        step.along = {0: 0.1, 1: along}
        step.frozen = (1,) if batch else ()
    return build


def found(build):
    return [(f.cause, f.level, f.culprits) for f in frozen_stays_frozen(FakeEvidence(build.record()))]


@pytest.mark.parametrize(
    ("how", "cause"),
    [({}, "momentum"), ({"along": -1.0}, "weight_decay"), ({"zeros": False}, "stale_gradient")],
    ids=["another direction", "along its values", "an old gradient"],
)
def test_what_moves_a_frozen_parameter(how, cause):
    assert found(story_of(**how)) == [(cause, "fault", ("p1",))]


def test_what_the_finding_shows():
    (finding,) = frozen_stays_frozen(FakeEvidence(story_of(along=-1.0).record()))
    assert finding.summary == "p1 is frozen, and moved by weight decay"
    assert finding.measured == "3 of 4 steps moved p1, by up to 1.0e-03 of its largest entry"
    assert "agreement with them is -1.0000" in finding.shown_by


def test_an_optimizer_that_keeps_momentum_may_decay_as_well():
    build = story_of()
    build.optimizers[0].parameters = (0, 1, 2)
    build.parameters.append(type(build.parameters[1])(2, "p2", "model", (2,), "float32", "cpu", False))
    for event in build.events:
        if hasattr(event, "updates"):
            event.updates[2], event.along[2], event.frozen = 1e-3, -1.0, (*event.frozen, 2)
            event.reads[0].grads[2] = None
    assert found(build) == [("momentum", "fault", ("p1", "p2"))]


def test_what_trains_may_move():
    build = RecordBuilder([0])
    for _ in range(3):
        build.zero()
        build.backward()
        build.step().updates = {0: 1e-3}
    assert found(build) == []
