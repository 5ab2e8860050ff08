"""The order of clips and schedulers, and scalers that never step, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.records.clips import LOGGED_NORM
from tests.helpers.records import FakeEvidence
from tests.helpers.story import Story


def found(story: Story, **how):
    return list(step_order(FakeEvidence(story.record(**how))))


def causes(story: Story, **how):
    return [(finding.cause, finding.level) for finding in found(story, **how)]


def run(*calls: str, times: int = 3, story: Story | None = None, **clip) -> Story:
    """The named calls, in this order, in every iteration."""
    story = story or Story([0, 1])
    events = {
        "zero": story.zero,
        "backward": story.backward,
        "step": story.step,
        "clip": lambda: story.clip(**clip),
        "scale": lambda: story.scaler("scale"),
        "unscale": lambda: story.scaler("unscale"),
        "update": lambda: story.scaler("update", line=33),
        "scheduler": story.scheduler,
        "plateau": lambda: story.scheduler(metric=True),
    }

    def scaled_step():
        story.scaler("step", line=30)
        story.step()

    for _ in range(times):
        for call in calls:
            events.get(call, scaled_step)()
    return story


PLAIN = ("zero", "backward", "clip", "step", "scheduler")
SCALED = ("zero", "scale", "backward", "unscale", "clip", "scaled_step", "update")


@pytest.mark.parametrize("calls", [PLAIN, SCALED, (*PLAIN, "plateau")], ids=["plain", "scaled", "plateau"])
def test_the_usual_order_is_fine(calls):
    assert found(run(*calls)) == []


def test_a_clip_after_the_step_clips_nothing():
    (finding,) = found(run("zero", "backward", "step", "clip"))
    assert (finding.cause, finding.level) == ("clip_after_step", "fault")
    assert finding.where == "train.py:28   clip_grad_norm_()"
    assert finding.measured == "limit 1, 3 clips after the step"
    assert "(step at line 30)" in finding.repair


@pytest.mark.parametrize("limit", [float("inf"), LOGGED_NORM], ids=["infinite", "huge"])
def test_a_norm_that_is_only_logged_is_no_clip(limit):
    assert found(run("zero", "backward", "step", "clip", limit=limit)) == []


def test_a_clip_of_unknown_limit_counts_only_where_it_changed_something():
    assert found(run("zero", "backward", "step", "clip", limit=None, bites=False)) == []
    assert causes(run("zero", "backward", "step", "clip", limit=None)) == [("clip_after_step", "fault")]


def test_one_late_clip_is_no_habit():
    story = run("zero", "backward", "clip", "step")
    assert found(run("zero", "backward", "step", "clip", times=1, story=story)) == []


def test_a_clip_of_what_was_assigned_after_the_step_is_fine():
    story = Story([0])
    for _ in range(3):
        story.backward()
        story.step()
        story.assign(0)
        story.clip(0)
        story.step()
    assert found(story) == []


def test_clips_of_scaled_gradients_and_scalers_never_updated_are_another_matter():
    assert found(run("zero", "scale", "backward", "clip", "scaled_step")) == []


def test_an_update_after_a_direct_step_is_another_matter():
    assert found(run("zero", "scale", "backward", "step", "update", times=1), raised="No inf checks") == []


def test_torch_refuses_an_update_without_a_step():
    story = run("zero", "scale", "backward", "update", times=1)
    (finding,) = found(story, raised="No inf checks were recorded prior to update.")
    assert (finding.cause, finding.culprits) == ("step_missing", ("scaler.step(optimizer)",))


def test_torch_refuses_a_step_before_anything_was_scaled():
    story = Story([0])
    story.scaler("step")
    assert causes(story, raised="No inf checks were recorded for this optimizer.") == [
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
    story = Story([0])
    story.scheduler(line=3)
    assert found(run("zero", "backward", "step", "scheduler", story=story)) == []


def test_a_scheduler_caught_up_from_one_line_before_the_loop():
    story = Story([0])
    for _ in range(5):
        story.scheduler(line=3)
    assert found(run("zero", "backward", "step", "scheduler", story=story)) == []


def test_a_scheduler_stepped_in_every_micro_batch_is_another_matter():
    assert found(run("backward", "scheduler", "backward", "scheduler", "step", "zero")) == []


def test_a_step_that_the_scaler_skipped_was_tried():
    story = Story([0])
    story.scaler("step")
    story.scheduler()
    assert found(run("zero", "backward", "step", "scheduler", story=story)) == []


def test_without_any_step_no_order_is_wrong():
    assert causes(run("backward", "scheduler")) == [("step_missing", "fault")]
