"""What ``step_order`` says of the gradients that steps use, on hand-written records."""

from __future__ import annotations

import pytest

from pytest_trainloop.checks.wiring.step_order.check import step_order
from pytest_trainloop.errors import CannotDecide
from tests.helpers.records import FakeEvidence
from tests.helpers.story import Story


def found(story: Story, **how):
    return [(f.cause, f.level, f.culprits) for f in step_order(FakeEvidence(story.record(**how)))]


def run(*calls, story: Story, times: int = 3) -> Story:
    for _ in range(times):
        for call in calls:
            call()
    return story


def test_nothing_seen_cannot_be_judged():
    with pytest.raises(CannotDecide, match="no backward pass and no optimizer step"):
        found(Story([0]))


def test_zero_grad_that_is_never_called():
    story = Story([0, 1])
    assert found(run(story.backward, story.step, story=story)) == [("not_zeroed", "fault", ("p0", "p1"))]


def test_zero_grad_of_other_parameters():
    story = Story([0, 1])
    calls = (lambda: story.zero(1), story.backward, story.step)
    assert found(run(*calls, story=story)) == [("wrong_object_zeroed", "fault", ("p0",))]


def test_zero_grad_between_backward_and_step():
    story = Story([0])
    calls = (story.backward, story.zero, story.step)
    assert found(run(*calls, story=story)) == [("zeroed_before_step", "fault", ("zero_grad", "p0"))]


def test_zeros_written_between_backward_and_step():
    story = Story([0])

    def overflow():
        story.scale(0)
        story.grads[0] = []

    (finding,) = step_order(FakeEvidence(run(story.zero, story.backward, overflow, story.step, story=story).record()))
    assert (finding.cause, finding.culprits) == ("zeroed_before_step", ("mul_()", "p0"))
    assert "float16" in finding.repair


def test_step_before_backward():
    story = Story([0])
    calls = (story.zero, story.step, story.backward)
    assert found(run(*calls, story=story)) == [("step_before_backward", "fault", ("optimizer.step()", "p0"))]


def test_a_backward_after_the_step_that_follows_its_forward_pass():
    story = Story([0])
    calls = (story.zero, lambda: story.backward(late=1), story.step)
    assert found(run(*calls, story=story)) == [("step_before_backward", "fault", ("optimizer.step()", "p0"))]


def test_no_backward_pass_at_all():
    story = Story([0])
    assert found(run(story.zero, story.step, story=story)) == [("backward_missing", "fault", ("loss.backward()",))]


def test_an_optimizer_that_never_steps():
    story = Story([0])
    assert found(run(story.zero, story.backward, story=story))[0][0] == "step_missing"


def test_two_steps_on_one_gradient():
    story = Story([0])
    calls = (story.zero, story.backward, story.step, story.step)
    assert found(run(*calls, story=story)) == [("stepped_twice", "fault", ("p0",))]


def test_two_optimizers_on_one_gradient():
    story = Story([0], [0])
    calls = (story.zero, story.backward, lambda: story.step(0), lambda: story.step(1))
    assert found(run(*calls, story=story)) == [("two_optimizers", "fault", ("p0",))]


def test_an_assigned_gradient_that_is_never_renewed():
    story = Story([0, 1])
    story.optimizers[0].parameters = (0,)
    story.assign(0)
    calls = (lambda: story.zero(1), lambda: story.backward(1), story.step)
    assert found(run(*calls, story=story, times=5)) == [("gradient_kept", "fault", ("p0",))]


def test_the_order_of_gradient_penalties_and_accumulation_is_fine():
    story = Story([0])
    calls = (story.zero, story.backward, lambda: story.backward(again=True), story.step)
    assert found(run(*calls, story=story)) == []
