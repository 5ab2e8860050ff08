"""Accumulation windows, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.recording.events import TensorSample
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence


def found(build: RecordBuilder, **how):
    return list(step_order(FakeEvidence(build.record(**how))))


def causes(build: RecordBuilder, **how):
    return [finding.cause for finding in found(build, **how)]


def cleared_inside(windows: int = 3, size: int = 4) -> RecordBuilder:
    build = RecordBuilder([0, 1])
    for _ in range(windows):
        for _ in range(size):
            build.zero(line=12)
            build.backward()
        build.step()
    return build


def test_whole_windows_are_fine():
    build = RecordBuilder([0, 1])
    for _ in range(3):
        for _ in range(4):
            build.backward()
        build.step()
        build.zero()
    assert found(build) == []


def test_zeroing_in_every_micro_batch_is_named_with_its_line():
    (finding,) = found(cleared_inside())
    assert finding.cause == "zeroed_inside_window"
    assert finding.culprits == ("zero_grad",)
    assert finding.where == "train.py:12   zero_grad()"
    assert finding.measured == "the gradients of 9 of 12 backward passes were zeroed before a step"
    assert "of 4 micro-batches" in finding.summary


def test_two_windows_are_too_few_to_tell():
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


def test_weights_moved_between_the_passes_are_a_first_step_of_two():
    build = RecordBuilder([0])
    for _ in range(4):
        build.zero()
        build.backward()
        build.move(0)
        build.zero()
        build.backward()
        build.step()
    assert found(build) == []


def test_several_passes_over_one_batch_are_no_window():
    build = RecordBuilder([0])
    for _ in range(4):
        for number in range(3):
            build.zero()
            build.backward(same_batch=number > 0)
        build.step()
    assert found(build) == []


def test_user_code_answers_for_gradients_that_it_assigns():
    build = cleared_inside()
    build.assign(0)
    assert found(build) == []


def test_passes_of_another_call_site_may_always_be_cleared():
    build = RecordBuilder([0])
    for _ in range(4):
        build.zero()
        build.backward(line=21)
        build.zero()
        build.backward(line=25)
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


def test_a_window_left_open_at_the_end_is_advice():
    (finding,) = found(left_open())
    assert (finding.cause, finding.level) == ("window_left_over", "advice")
    assert "no step uses the last 1 backward pass" in finding.summary
    assert finding.where == "train.py:20   loss.backward()"


@pytest.mark.parametrize("how", [{"raised": "out of memory"}, {"ended": False}], ids=["raised", "stopped"])
def test_a_loop_that_did_not_end_by_itself_leaves_nothing_open(how):
    assert found(left_open(), **how) == []


def test_a_window_closed_by_the_last_step_is_not_open():
    build = left_open()
    build.step()
    assert found(build) == []


def test_a_window_whose_step_the_scaler_skipped_is_not_open():
    build = left_open()
    build.scaler("step")
    assert found(build) == []


def test_gradients_on_another_net_are_a_by_product_not_an_open_window():
    build = RecordBuilder([0], [1])
    for _ in range(3):
        build.zero()
        build.backward(0, line=20)
        build.step(0)
        build.zero()
        build.backward(0, 1, line=22)
        build.step(1)
    assert causes(build) == []
