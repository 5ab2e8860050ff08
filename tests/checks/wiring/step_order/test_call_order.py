"""The order of clips and schedulers, and scalers that never step, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.checks.wiring.step_order.further import untrained
from pytest_trainloop.instruments.records.gradient_ledger import LOGGED_NORM
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence


def found(build: RecordBuilder, **how):
    return list(step_order(FakeEvidence(build.record(**how), shared={untrained: None})))


def causes(build: RecordBuilder, **how):
    return [(finding.cause, finding.level) for finding in found(build, **how)]


def run(*calls: str, times: int = 3, build: RecordBuilder | None = None, **clip) -> RecordBuilder:
    """The named calls, in this order, in every iteration."""
    build = build or RecordBuilder([0, 1])
    events = {
        "zero": build.zero,
        "backward": build.backward,
        "step": build.step,
        "clip": lambda: build.clip(**clip),
        "scale": lambda: build.scaler("scale"),
        "unscale": lambda: build.scaler("unscale"),
        "update": lambda: build.scaler("update", line=33),
        "scheduler": build.scheduler,
        "plateau": lambda: build.scheduler(metric=True),
    }

    def scaled_step():
        build.scaler("step", line=30)
        build.step()

    for _ in range(times):
        for call in calls:
            events.get(call, scaled_step)()
    return build


PLAIN = ("zero", "backward", "clip", "step", "scheduler")
SCALED = ("zero", "scale", "backward", "unscale", "clip", "scaled_step", "update")


@pytest.mark.parametrize("calls", [PLAIN, SCALED, (*PLAIN, "plateau")], ids=["plain", "scaled", "plateau"])
def test_the_usual_order_is_fine(calls):
    assert found(run(*calls)) == []


def test_a_clip_after_the_step_clips_nothing():
    (finding,) = found(run("zero", "backward", "step", "clip"))
    assert (finding.cause, finding.level) == ("clip_after_step", "fault")
    assert finding.where == "train.py:28   clip_grad_norm_()"
    assert finding.measured == "3 clips after the step, the first with limit 1"
    assert "(step at line 30)" in finding.repair


@pytest.mark.parametrize("limit", [float("inf"), LOGGED_NORM], ids=["infinite", "huge"])
def test_a_norm_that_is_only_logged_is_no_clip(limit):
    assert found(run("zero", "backward", "step", "clip", limit=limit)) == []


def test_a_clip_of_unknown_limit_counts_only_where_it_changed_something():
    assert found(run("zero", "backward", "step", "clip", limit=None, bites=False)) == []
    assert causes(run("zero", "backward", "step", "clip", limit=None)) == [("clip_after_step", "fault")]


def test_one_late_clip_is_no_habit():
    build = run("zero", "backward", "clip", "step")
    assert found(run("zero", "backward", "step", "clip", times=1, build=build)) == []


def test_a_clip_of_what_was_assigned_after_the_step_is_fine():
    build = RecordBuilder([0])
    for _ in range(3):
        build.backward()
        build.step()
        build.assign(0)
        build.clip(0)
        build.step()
    assert found(build) == []


def test_clips_of_scaled_gradients_and_scalers_never_updated_are_another_matter():
    assert found(run("zero", "scale", "backward", "clip", "scaled_step")) == []


def test_an_update_after_a_direct_step_is_another_matter():
    assert found(run("zero", "scale", "backward", "step", "update", times=1), raised="No inf checks") == []


def test_torch_refuses_an_update_without_a_step():
    build = run("zero", "scale", "backward", "update", times=1)
    (finding,) = found(build, raised="No inf checks were recorded prior to update.")
    assert (finding.cause, finding.culprits) == ("step_missing", ("scaler.step(optimizer)",))


def test_torch_refuses_a_step_before_anything_was_scaled():
    build = RecordBuilder([0])
    build.scaler("step")
    assert causes(build, raised="No inf checks were recorded for this optimizer.") == [
        ("step_before_backward", "fault")
    ]


def test_what_raised_for_another_reason_is_no_fault_of_order():
    assert found(run(*SCALED), raised="out of memory") == []


def test_a_scheduler_before_the_optimizer():
    (finding,) = found(run("zero", "scheduler", "backward", "step"))
    assert (finding.cause, finding.level) == ("scheduler_before_optimizer", "fault")
    assert finding.culprits == ("StepLR.step()",)
    assert finding.where == "train.py:40   scheduler.step()"


def test_a_scheduler_that_gets_a_metric_may_come_whenever():
    assert found(run("zero", "plateau", "backward", "step")) == []


def test_a_scheduler_stepped_once_before_the_loop_sets_its_start():
    build = RecordBuilder([0])
    build.scheduler(line=3)
    assert found(run("zero", "backward", "step", "scheduler", build=build)) == []


def test_a_scheduler_caught_up_from_one_line_before_the_loop():
    build = RecordBuilder([0])
    for _ in range(5):
        build.scheduler(line=3)
    assert found(run("zero", "backward", "step", "scheduler", build=build)) == []


def test_a_scheduler_stepped_in_every_micro_batch_is_another_matter():
    assert found(run("backward", "scheduler", "backward", "scheduler", "step", "zero")) == []


def test_a_step_that_the_scaler_skipped_was_tried():
    build = RecordBuilder([0])
    build.scaler("step")
    build.scheduler()
    assert found(run("zero", "backward", "step", "scheduler", build=build)) == []


def test_without_any_step_no_order_is_wrong():
    assert causes(run("backward", "scheduler")) == [("step_missing", "fault")]
