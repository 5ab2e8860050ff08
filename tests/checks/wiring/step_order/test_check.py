"""Orders of calls and windows that no whole loop shows, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.checks.wiring.step_order.further import untrained
from pytest_trainloop.instruments.records.gradient_ledger import LOGGED_NORM
from pytest_trainloop.recording.events import TensorSample
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence


def found(build: RecordBuilder, **how):
    return list(step_order(FakeEvidence(build.record(**how), shared={untrained: None})))


def run(*calls: str, times: int = 3, build: RecordBuilder | None = None, **clip) -> RecordBuilder:
    """The named calls, in this order, in every iteration."""
    build = build or RecordBuilder([0, 1])
    events = {
        "zero": build.zero,
        "backward": build.backward,
        "step": build.step,
        "clip": lambda: build.clip(**clip),
        "scale": lambda: build.scaler("scale"),
        "update": lambda: build.scaler("update", line=33),
        "scheduler": build.scheduler,
        "plateau": lambda: build.scheduler(metric=True),
    }

    for _ in range(times):
        for call in calls:
            events[call]()
    return build


@pytest.mark.parametrize("limit", [float("inf"), LOGGED_NORM], ids=["infinite", "huge"])
def test_a_norm_that_is_only_logged_is_no_clip(limit):
    assert found(run("zero", "backward", "step", "clip", limit=limit)) == []


def test_a_clip_of_unknown_limit_counts_only_where_it_changed_something():
    assert found(run("zero", "backward", "step", "clip", limit=None, bites=False)) == []
    (finding,) = found(run("zero", "backward", "step", "clip", limit=None))
    assert (finding.cause, finding.level) == ("clip_after_step", "fault")


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


def test_an_update_after_a_direct_step_is_another_matter():
    assert found(run("zero", "scale", "backward", "step", "update", times=1), raised="No inf checks") == []


def test_a_scheduler_that_gets_a_metric_may_come_whenever():
    assert found(run("zero", "plateau", "backward", "step")) == []


def test_a_scheduler_caught_up_from_one_line_before_the_loop():
    build = RecordBuilder([0])
    for _ in range(5):
        build.scheduler(line=3)
    assert found(run("zero", "backward", "step", "scheduler", build=build)) == []


def test_a_step_that_the_scaler_skipped_was_tried():
    build = RecordBuilder([0])
    build.scaler("step")
    build.scheduler()
    assert found(run("zero", "backward", "step", "scheduler", build=build)) == []


def test_a_scheduler_stepped_in_every_micro_batch_is_another_matter():
    assert found(run("backward", "scheduler", "backward", "scheduler", "step", "zero")) == []


def test_zeros_written_between_backward_and_step():
    build = RecordBuilder([0])

    def overflow():
        build.scale(0)
        build.grads[0] = []

    for _ in range(3):
        for call in (build.zero, build.backward, overflow, build.step):
            call()
    (finding,) = found(build)
    assert (finding.cause, finding.culprits) == ("zeroed_before_step", ("mul_()", "p0"))
    assert "float16" in finding.repair


def cleared_inside(windows: int = 3, size: int = 4) -> RecordBuilder:
    build = RecordBuilder([0, 1])
    for _ in range(windows):
        for _ in range(size):
            build.zero(line=12)
            build.backward()
        build.step()
    return build


def test_two_windows_are_too_few_to_tell():
    assert [finding.cause for finding in found(cleared_inside())] == ["zeroed_inside_window"]
    assert found(cleared_inside(windows=2)) == []


def test_batches_skipped_openly_come_in_no_regular_windows():
    build = RecordBuilder([0])
    for size in (1, 3, 1, 4, 2):
        for _ in range(size):
            build.zero()
            build.backward()
        build.step()
    assert found(build) == []


def test_gradients_that_were_not_finite_are_thrown_away_rightly():
    build = cleared_inside()
    for backward in build.record().backwards():
        for arrived in backward.arrivals.values():
            arrived[0].incoming = TensorSample(float("nan"), b"nan")
    assert found(build) == []


@pytest.mark.parametrize(
    "second",
    [
        lambda build: (build.move(0), build.zero(), build.backward()),
        lambda build: (build.zero(), build.backward(same_batch=True)),
        lambda build: (build.zero(), build.backward(line=25)),
    ],
    ids=["at other weights", "over the same batch", "of another line"],
)
def test_a_second_pass_for_which_the_first_is_cleared_is_no_window(second):
    build = RecordBuilder([0])
    for _ in range(4):
        build.zero()
        build.backward()
        second(build)
        build.step()
    assert found(build) == []


def left_open() -> RecordBuilder:
    build = RecordBuilder([0, 1])
    for _ in range(3):
        build.backward()
        build.backward()
        build.step()
        build.zero()
    build.backward()
    return build


@pytest.mark.parametrize("how", [{"raised": "out of memory"}, {"ended": False}], ids=["raised", "stopped"])
def test_a_loop_that_did_not_end_by_itself_leaves_nothing_open(how):
    assert [finding.cause for finding in found(left_open())] == ["window_left_over"]
    assert found(left_open(), **how) == []


def test_a_window_whose_step_the_scaler_skipped_is_not_open():
    build = left_open()
    build.scaler("step")
    assert found(build) == []


def test_gradients_of_windows_are_zeroed_after_the_step():
    build = RecordBuilder([0])
    for call in (build.backward, build.backward, build.step) * 3:
        call()
    (finding,) = found(build)
    assert (finding.cause, finding.repair) == ("not_zeroed", "optimizer.zero_grad() right after this line")
