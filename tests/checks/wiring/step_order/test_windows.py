"""Accumulation windows, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.recording.events import Fact
from tests.helpers.records import FakeEvidence
from tests.helpers.story import Story


def found(story: Story, **how):
    return list(step_order(FakeEvidence(story.record(**how))))


def causes(story: Story, **how):
    return [finding.cause for finding in found(story, **how)]


def cleared_inside(windows: int = 3, size: int = 4) -> Story:
    story = Story([0, 1])
    for _ in range(windows):
        for _ in range(size):
            story.zero(line=12)
            story.backward()
        story.step()
    return story


def test_whole_windows_are_fine():
    story = Story([0, 1])
    for _ in range(3):
        for _ in range(4):
            story.backward()
        story.step()
        story.zero()
    assert found(story) == []


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
    story = Story([0])
    for size in (1, 3, 1, 4, 2):
        for _ in range(size):
            story.zero()
            story.backward()
        story.step()
    assert found(story) == []


def test_gradients_that_were_not_finite_are_thrown_away_rightly():
    story = cleared_inside()
    for backward in story.record().backwards():
        for arrived in backward.arrivals.values():
            arrived[0].incoming = Fact(float("nan"), b"nan")
    assert found(story) == []


def test_weights_moved_between_the_passes_are_a_first_step_of_two():
    story = Story([0])
    for _ in range(4):
        story.zero()
        story.backward()
        story.move(0)
        story.zero()
        story.backward()
        story.step()
    assert found(story) == []


def test_several_passes_over_one_batch_are_no_window():
    story = Story([0])
    for _ in range(4):
        for number in range(3):
            story.zero()
            story.backward(again=number > 0)
        story.step()
    assert found(story) == []


def test_user_code_answers_for_gradients_that_it_assigns():
    story = cleared_inside()
    story.assign(0)
    assert found(story) == []


def test_passes_of_another_call_site_may_always_be_cleared():
    story = Story([0])
    for _ in range(4):
        story.zero()
        story.backward(line=21)
        story.zero()
        story.backward(line=25)
        story.step()
    assert found(story) == []


def left_open() -> Story:
    story = Story([0, 1])
    for _ in range(3):
        story.backward()
        story.backward()
        story.step()
        story.zero()
    story.backward()
    return story


def test_a_window_left_open_at_the_end_is_advice():
    (finding,) = found(left_open())
    assert (finding.cause, finding.level) == ("window_left_over", "advice")
    assert "the last 1 backward passes" in finding.summary
    assert finding.where == "train.py:20   loss.backward()"


@pytest.mark.parametrize("how", [{"raised": "out of memory"}, {"ended": False}], ids=["raised", "stopped"])
def test_a_loop_that_did_not_end_by_itself_leaves_nothing_open(how):
    assert found(left_open(), **how) == []


def test_a_window_closed_by_the_last_step_is_not_open():
    story = left_open()
    story.step()
    assert found(story) == []


def test_a_window_whose_step_the_scaler_skipped_is_not_open():
    story = left_open()
    story.scaler("step")
    assert found(story) == []


def test_gradients_on_another_net_are_a_by_product_not_an_open_window():
    story = Story([0], [1])
    for _ in range(3):
        story.zero()
        story.backward(0, line=20)
        story.step(0)
        story.zero()
        story.backward(0, 1, line=22)
        story.step(1)
    assert causes(story) == []
