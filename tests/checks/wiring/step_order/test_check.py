"""What ``step_order`` says of the gradients that steps use, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.checks.wiring.step_order.further import untrained
from pytest_trainloop.core.errors import CannotDecide
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence


def found(build: RecordBuilder, **how):
    evidence = FakeEvidence(build.record(**how), shared={untrained: None})
    return [(f.cause, f.level, f.culprits) for f in step_order(evidence)]


def run(*calls, build: RecordBuilder, times: int = 3) -> RecordBuilder:
    for _ in range(times):
        for call in calls:
            call()
    return build


def test_weights_that_change_in_other_ways_have_no_order_of_calls():
    evidence = FakeEvidence(RecordBuilder([0]).record(), shared={untrained: None})
    with pytest.raises(CannotDecide, match="no backward pass and no optimizer step"):
        list(step_order(evidence))


def test_zeros_written_between_backward_and_step():
    build = RecordBuilder([0])

    def overflow():
        build.scale(0)
        build.grads[0] = []

    (finding,) = step_order(FakeEvidence(run(build.zero, build.backward, overflow, build.step, build=build).record()))
    assert (finding.cause, finding.culprits) == ("zeroed_before_step", ("mul_()", "p0"))
    assert "float16" in finding.repair


def test_gradients_of_windows_are_zeroed_after_the_step():
    build = RecordBuilder([0])
    (finding,) = step_order(
        FakeEvidence(run(build.backward, build.backward, build.step, build=build).record(), shared={untrained: None})
    )
    assert (finding.cause, finding.repair) == ("not_zeroed", "optimizer.zero_grad() right after this line")


def test_the_order_of_gradient_penalties_and_accumulation_is_fine():
    build = RecordBuilder([0])
    calls = (build.zero, build.backward, lambda: build.backward(same_batch=True), build.step)
    assert found(run(*calls, build=build)) == []
