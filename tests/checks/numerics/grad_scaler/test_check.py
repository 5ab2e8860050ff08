"""Orders of a scaler's calls, and traces of its scale, on given records."""

from __future__ import annotations

import math

import pytest

from pytest_trainloop.checks.numerics.grad_scaler import check as module
from pytest_trainloop.checks.numerics.grad_scaler.call_windows import (
    altered_before,
    backwards_for,
    through_scaler,
    unscaled_at,
    unscaled_early,
    updates_between,
)
from pytest_trainloop.checks.numerics.grad_scaler.check import grad_scaler
from pytest_trainloop.checks.numerics.grad_scaler.findings import call_order_findings
from pytest_trainloop.checks.numerics.grad_scaler.rescaled_runs import AtLowest, RescaledRuns
from pytest_trainloop.checks.numerics.grad_scaler.scale_trace import of_one_step_each, power, traces
from pytest_trainloop.runs.further_runs import longer_run
from tests.helpers.records import FakeEvidence
from tests.helpers.story import Story

UPDATED_TWICE = "No inf checks were recorded prior to update."
UNSCALED_TWICE = "unscale_() has already been called on this optimizer since the last update()."
UNSCALED_AFTER = "unscale_() is being called after step()."
STEPPED_TWICE = "step() has already been called since the last update()."


class ScalerStory(Story):
    """A story in which steps through the scaler lie inside its call, and scales have a trace."""

    factor = 1024.0

    def through(self, optimizer: int = 0, *, line: int = 30, skipped: bool = False) -> None:
        call = self.scaler("step", optimizer=optimizer, line=line)
        if not skipped:
            self.step(optimizer)
        call.stepped, call.until = not skipped, self._tick()

    def scale(self, factor: float | None = None, *, scaler: int = 0) -> None:
        self.factor = factor or self.factor
        call = self.scaler("scale")
        call.factor, call.scaler = self.factor, scaler

    def tries(self, *factors: float, skipped: str = "") -> ScalerStory:
        """One iteration at each of these scales; an "x" in ``skipped`` for each step that is left out."""
        for factor, mark in zip(factors, skipped.ljust(len(factors), "."), strict=True):
            self.zero()
            self.scale(factor)
            self.backward()
            self.through(skipped=mark == "x")
            self.scaler("update", line=33)
        return self


def run(*calls: str, times: int = 3, story: ScalerStory | None = None, **clip) -> ScalerStory:
    """The named calls, in this order, in every iteration."""
    story = story or ScalerStory([0, 1])
    calls_by_name = {
        "zero": story.zero,
        "backward": story.backward,
        "step": story.step,
        "clip": lambda: story.clip(**clip),
        "scale": lambda: story.scale(),
        "unscale": lambda: story.scaler("unscale"),
        "update": lambda: story.scaler("update", line=33),
        "through": story.through,
        "refused": lambda: story.scaler("step", line=30),
    }
    for _ in range(times):
        for call in calls:
            calls_by_name[call]()
    return story


def found(story: Story, **how):
    return list(call_order_findings(story.record(**how)))


def causes(story: Story, **how):
    return [(finding.cause, finding.level) for finding in found(story, **how)]


RIGHT = ("zero", "scale", "backward", "unscale", "clip", "through", "update")


def test_the_usual_order_is_fine():
    assert found(run(*RIGHT)) == []


def test_a_clip_of_scaled_gradients_is_a_fault():
    (finding,) = found(run("zero", "scale", "backward", "clip", "through", "update"))
    assert (finding.cause, finding.level) == ("clip_before_unscale", "fault")
    assert "the loss scale of 1024" in finding.summary


def test_a_limit_that_is_scaled_as_well_is_fine():
    assert found(run("zero", "scale", "backward", "clip", "through", "update", limit=1024.0)) == []


def test_a_clip_after_the_step_is_a_matter_of_step_order():
    assert found(run("zero", "scale", "backward", "step", "clip", "update")) == []


def test_a_clip_under_a_scaler_that_is_off_is_advice():
    story = ScalerStory([0])
    for _ in range(3):
        story.scaler("scale", enabled=False)
        story.backward()
        story.clip()
        story.step()
        story.scaler("update", enabled=False)
    assert causes(story) == [("clip_before_unscale", "advice")]


def test_a_scaler_that_is_never_updated():
    (finding,) = found(run("zero", "scale", "backward", "through"))
    assert (finding.cause, finding.level) == ("update_missing", "fault")
    assert finding.measured == "3 scaler steps, 0 updates"


def test_torch_refuses_a_second_step_without_update():
    story = run("scale", "backward", "refused", story=run("zero", "scale", "backward", "through", times=1), times=1)
    assert causes(story, raised=STEPPED_TWICE) == [("update_missing", "fault")]


def test_one_step_without_update_is_not_yet_a_habit():
    assert found(run("zero", "scale", "backward", "through", times=1)) == []


def test_two_optimizers_of_one_scaler_step_once_each_before_an_update():
    story = ScalerStory([0], [1])
    for _ in range(3):
        story.scale()
        story.backward()
        story.through(0)
        story.through(1)
        story.scaler("update")
    assert found(story) == []
    assert list(updates_between(story.record())) == []


def test_torch_refuses_a_second_update():
    story = run(*RIGHT, "update", times=1)
    (finding,) = found(story, raised=UPDATED_TWICE)
    assert (finding.cause, finding.where) == ("update_twice", "train.py:33   scaler.update()")
    assert "twice after one step" in finding.summary


def test_torch_refuses_an_update_in_an_iteration_without_a_step():
    story = run("scale", "backward", "update", story=run(*RIGHT, times=1), times=1)
    (finding,) = found(story, raised=UPDATED_TWICE)
    assert finding.cause == "update_twice"
    assert "in which scaler.step() is not" in finding.summary


def test_an_update_before_any_step_is_a_matter_of_step_order():
    assert found(run("zero", "scale", "backward", "update", times=1), raised=UPDATED_TWICE) == []


def test_torch_refuses_a_second_unscale():
    (finding,) = found(run("zero", "scale", "backward", "unscale", "unscale", times=1), raised=UNSCALED_TWICE)
    assert finding.cause == "unscaled_twice"


def test_torch_refuses_an_unscale_in_every_micro_batch():
    story = run("scale", "backward", "unscale", times=2)
    (finding,) = found(story, raised=UNSCALED_TWICE)
    assert finding.cause == "unscaled_twice"
    assert "another backward pass in between" in finding.summary


def test_torch_refuses_an_unscale_after_the_step():
    (finding,) = found(run("zero", "scale", "backward", "through", "unscale", times=1), raised=UNSCALED_AFTER)
    assert finding.cause == "unscaled_twice"
    assert "which has unscaled" in finding.summary


def test_an_unscale_in_the_iteration_after_a_step_without_update():
    story = run("zero", "scale", "backward", "unscale", story=run(*RIGHT[:-1], times=1), times=1)
    assert causes(story, raised=UNSCALED_AFTER) == [("update_missing", "fault")]


def test_a_step_by_hand_without_update():
    story = run("zero", "scale", "backward", "unscale", "step", times=1)
    story = run("zero", "scale", "backward", "unscale", story=story, times=1)
    assert causes(story, raised=UNSCALED_TWICE) == [("update_missing", "fault")]


def test_what_raised_for_another_reason_is_no_fault_of_order():
    assert found(run(*RIGHT), raised="out of memory") == []


def test_an_update_between_backward_and_the_second_step():
    story = ScalerStory([0], [1])
    for _ in range(2):
        story.zero()
        story.scale()
        story.backward()
        story.through(0)
        story.scaler("update", line=33)
        story.through(1)
        story.scaler("update", line=34)
    first, second = updates_between(story.record())
    assert (first.optimizer, first.nth, first.update.place.line, first.unscaled) == (1, 0, 33, None)
    assert second.nth == 1


def test_gradients_unscaled_before_the_update_are_unscaled_again_after_it():
    story = ScalerStory([0], [1])
    story.scale()
    story.backward()
    story.scaler("unscale", optimizer=1, line=25)
    story.through(0)
    story.scaler("update")
    story.through(1)
    (between,) = updates_between(story.record())
    assert between.unscaled is not None
    assert between.unscaled.place.line == 25


def test_networks_in_turn_are_updated_in_turn():
    story = ScalerStory([0], [1])
    for _ in range(2):
        for optimizer in (0, 1):
            story.zero(optimizer)
            story.scale()
            story.backward()
            story.through(optimizer)
            story.scaler("update")
    assert list(updates_between(story.record())) == []


def test_unscaled_before_the_last_backward_of_a_window():
    record = run("zero", "scale", "backward", "unscale", "scale", "backward", "through", "update").record()
    call, backward = unscaled_early(record, 0)
    assert call.what == "unscale"
    assert backward.at > call.at


def test_unscaled_at_the_end_of_a_window():
    record = run("zero", "scale", "backward", "scale", "backward", "unscale", "through", "update").record()
    assert unscaled_early(record, 0) is None
    assert len(backwards_for(record, 0)) == 2


def test_unscaled_gradients_that_are_wiped_do_not_count():
    record = run("scale", "backward", "unscale", "zero", "scale", "backward", "through", "update").record()
    assert unscaled_early(record, 0) is None


def test_a_step_past_the_scaler_is_told_from_one_through_it():
    assert through_scaler(run(*RIGHT).record(), 0) is not None
    record = run("zero", "scale", "backward", "step").record()
    assert through_scaler(record, 0) is None
    assert unscaled_at(record, 0) == 0


def test_what_is_written_to_gradients_before_they_are_unscaled():
    story = run("zero", "scale", "backward", times=1)
    Story.scale(story, 0, 1)
    record = run("unscale", "through", "update", story=story, times=1).record()
    write = altered_before(record, 0, unscaled_at(record, 0))
    assert write is not None
    assert write.by == "mul_"
    assert altered_before(record, 0, write.at) is None


def test_a_trace_shows_the_scale_and_what_was_skipped():
    (trace,) = traces(ScalerStory([0]).tries(2.0**20, 2.0**19, 2.0**18, 2.0**18, skipped="xx..").record())
    assert str(trace) == "scale 2^20 -> 2^19 -> 2^18, 2 of 4 steps skipped"
    assert (trace.first_made, trace.skipped, trace.skipped_since, trace.fall) == (2, 2, 0, 0.0)


def test_a_scale_that_falls_after_it_had_been_found():
    (trace,) = traces(ScalerStory([0]).tries(*[2.0**-i for i in range(14)], skipped=".xxxxxxxxxxxxx").record())
    assert (trace.skipped_since, trace.fall) == (13, 13.0)
    assert (
        str(trace)
        == "scale 1 -> 2^-1 -> 2^-2 -> 2^-3 -> ... -> 2^-10 -> 2^-11 -> 2^-12 -> 2^-13, 13 of 14 steps skipped"
    )


@pytest.mark.parametrize(
    ("factor", "words"), [(65536.0, "65536"), (2.0**17, "2^17"), (0.5, "2^-1"), (3000.0, "3000"), (0.0, "0")]
)
def test_a_scale_in_words(factor, words):
    assert power(factor) == words


def test_scalers_that_take_one_anothers_place():
    story = ScalerStory([0])
    for scaler in range(3):
        story.scale(scaler=scaler)
        story.backward()
        story.through()
        for call in story.record().scaler_calls()[-1:]:
            call.scaler = scaler
    assert of_one_step_each(traces(story.record()))
    assert not of_one_step_each(traces(ScalerStory([0]).tries(1.0, 1.0, 1.0).record()))


def test_without_a_scaler_no_further_run_is_made():
    story = ScalerStory([0])
    story.backward()
    story.step()
    assert list(grad_scaler(FakeEvidence(story.record()))) == []


def test_with_a_scaler_that_is_off_no_further_run_is_made():
    story = ScalerStory([0])
    for _ in range(3):
        story.scaler("scale", enabled=False)
        story.backward()
        story.step()
        story.scaler("update", enabled=False)
    assert list(grad_scaler(FakeEvidence(story.record()))) == []


class Answered:
    """Runs under other scales whose outcomes are given."""

    def __init__(self, lowest):
        self._lowest = lowest

    def dependences(self):
        return iter(())

    def at_lowest(self, tries):
        return self._lowest


def given(seen, longer=None, lowest=None):
    return FakeEvidence(seen, shared={RescaledRuns: Answered(lowest), longer_run: longer})


def collapsed(skipped_at_lowest, *, skipped="." + 11 * "x"):
    factors = [2.0 ** (16 - i) for i in range(len(skipped))]
    seen = ScalerStory([0]).tries(*factors, skipped=skipped).record()
    return list(grad_scaler(given(seen, seen, AtLowest(len(skipped), skipped_at_lowest, None))))


def test_a_scale_that_falls_whatever_it_is():
    (finding,) = collapsed(11)
    assert finding.cause == "scale_collapsed"
    assert "11 of 12 steps" in finding.summary
    assert finding.measured.startswith("scale 65536 -> 32768")


@pytest.mark.parametrize("skipped", [0, 5])
def test_gradients_that_fit_at_the_lowest_scale_will_fit_at_another(skipped):
    assert collapsed(skipped) == []


def test_a_scale_that_is_not_found_within_the_watched_steps_is_no_fault_yet():
    assert collapsed(12, skipped=12 * "x") == []


def test_no_step_at_all_in_as_many_tries_as_any_gradient_needs():
    (finding,) = collapsed(module.SKIPS, skipped=module.SKIPS * "x")
    assert finding.cause == "scale_collapsed"


def test_where_no_loss_is_finite_there_is_nothing_to_scale():
    story = ScalerStory([0]).tries(*[2.0 ** (16 - i) for i in range(12)], skipped=12 * "x")
    record = story.record()
    for backward in record.backwards():
        backward.roots[0].value = math.nan
    assert list(grad_scaler(given(record))) == []


def test_a_new_scaler_for_every_step():
    def anew(skipped):
        story = ScalerStory([0])
        for scaler, mark in enumerate(skipped):
            story.zero()
            story.scale(scaler=scaler)
            story.backward()
            story.through(skipped=mark == "x")
            story.record().scaler_calls()[-1].scaler = scaler
        (finding,) = grad_scaler(given(story.record()))
        return finding.cause, finding.level

    assert anew("....") == ("scaler_recreated", "advice")
    assert anew("xx..") == ("scaler_recreated", "advice")
    assert anew("x.xx") == ("scaler_recreated", "fault")
