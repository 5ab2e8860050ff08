"""Orders of a scaler's calls, and traces of its scale, on given records."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.numerics.grad_scaler import check as module
from pytest_trainloop.checks.numerics.grad_scaler import rescaled
from pytest_trainloop.checks.numerics.grad_scaler.calls import call_order, joined, traces
from pytest_trainloop.checks.numerics.grad_scaler.check import grad_scaler
from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.runs.further_runs import longer_run
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence

UPDATED_TWICE = "No inf checks were recorded prior to update."
UNSCALED_TWICE = "unscale_() has already been called on this optimizer since the last update()."
UNSCALED_AFTER = "unscale_() is being called after step()."
STEPPED_TWICE = "step() has already been called since the last update()."


class ScalerRecordBuilder(RecordBuilder):
    """A build in which steps through the scaler lie inside its call, and scales have a trace."""

    factor = 1024.0

    def through(self, optimizer: int = 0, *, line: int = 30, skipped: bool = False) -> None:
        call = self.scaler("step", optimizer=optimizer, line=line)
        if not skipped:
            self.step(optimizer)
        call.stepped, call.until = not skipped, self._tick()

    def scale(self, factor: float | None = None, *, scaler: int = 0) -> None:
        self.factor = self.factor if factor is None else factor
        call = self.scaler("scale")
        call.factor, call.scaler = self.factor, scaler

    def tries(self, *factors: float, skipped: str = "") -> ScalerRecordBuilder:
        """One iteration at each of these scales; an "x" in ``skipped`` for each step that is left out."""
        for factor, mark in zip(factors, skipped.ljust(len(factors), "."), strict=True):
            self.zero()
            self.scale(factor)
            self.backward()
            self.through(skipped=mark == "x")
            self.scaler("update", line=33)
        return self


def run(*calls: str, times: int = 3, build: ScalerRecordBuilder | None = None, **clip) -> ScalerRecordBuilder:
    """The named calls, in this order, in every iteration."""
    build = build or ScalerRecordBuilder([0, 1])
    calls_by_name = {
        "zero": build.zero,
        "backward": build.backward,
        "step": build.step,
        "clip": lambda: build.clip(**clip),
        "scale": lambda: build.scale(),
        "unscale": lambda: build.scaler("unscale"),
        "update": lambda: build.scaler("update", line=33),
        "through": build.through,
        "refused": lambda: build.scaler("step", line=30),
    }
    for _ in range(times):
        for call in calls:
            calls_by_name[call]()
    return build


def found(build: RecordBuilder, **how):
    return list(call_order(Ledger(build.record(**how))))


def causes(build: RecordBuilder, **how):
    return [(finding.cause, finding.level) for finding in found(build, **how)]


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
    build = ScalerRecordBuilder([0])
    for _ in range(3):
        build.scaler("scale", enabled=False)
        build.backward()
        build.clip()
        build.step()
        build.scaler("update", enabled=False)
    assert causes(build) == [("clip_before_unscale", "advice")]


def test_a_scaler_that_is_never_updated():
    (finding,) = found(run("zero", "scale", "backward", "through"))
    assert (finding.cause, finding.level) == ("update_missing", "fault")
    assert finding.measured == "3 scaler steps, 0 updates"


def test_torch_refuses_a_second_step_without_update():
    build = run("scale", "backward", "refused", build=run("zero", "scale", "backward", "through", times=1), times=1)
    assert causes(build, raised=STEPPED_TWICE) == [("update_missing", "fault")]


def test_one_step_without_update_is_not_yet_a_habit():
    assert found(run("zero", "scale", "backward", "through", times=1)) == []


def test_two_optimizers_of_one_scaler_step_once_each_before_an_update():
    build = ScalerRecordBuilder([0], [1])
    for _ in range(3):
        build.scale()
        build.backward()
        build.through(0)
        build.through(1)
        build.scaler("update")
    assert found(build) == []


def test_torch_refuses_a_second_update():
    build = run(*RIGHT, "update", times=1)
    (finding,) = found(build, raised=UPDATED_TWICE)
    assert (finding.cause, finding.where) == ("update_twice", "train.py:33   scaler.update()")
    assert "twice after one step" in finding.summary


def test_torch_refuses_an_update_in_an_iteration_without_a_step():
    build = run("scale", "backward", "update", build=run(*RIGHT, times=1), times=1)
    (finding,) = found(build, raised=UPDATED_TWICE)
    assert finding.cause == "update_twice"
    assert "in which scaler.step() is not" in finding.summary


def test_an_update_before_any_step_is_a_matter_of_step_order():
    assert found(run("zero", "scale", "backward", "update", times=1), raised=UPDATED_TWICE) == []


def test_torch_refuses_a_second_unscale():
    (finding,) = found(run("zero", "scale", "backward", "unscale", "unscale", times=1), raised=UNSCALED_TWICE)
    assert finding.cause == "unscaled_twice"


def test_torch_refuses_an_unscale_in_every_micro_batch():
    build = run("scale", "backward", "unscale", times=2)
    (finding,) = found(build, raised=UNSCALED_TWICE)
    assert finding.cause == "unscaled_twice"
    assert "another backward pass in between" in finding.summary


def test_torch_refuses_an_unscale_after_the_step():
    (finding,) = found(run("zero", "scale", "backward", "through", "unscale", times=1), raised=UNSCALED_AFTER)
    assert finding.cause == "unscaled_twice"
    assert "which has unscaled" in finding.summary


def test_an_unscale_in_the_iteration_after_a_step_without_update():
    build = run("zero", "scale", "backward", "unscale", build=run(*RIGHT[:-1], times=1), times=1)
    assert causes(build, raised=UNSCALED_AFTER) == [("update_missing", "fault")]


def test_a_step_by_hand_without_update():
    build = run("zero", "scale", "backward", "unscale", "step", times=1)
    build = run("zero", "scale", "backward", "unscale", build=build, times=1)
    assert causes(build, raised=UNSCALED_TWICE) == [("update_missing", "fault")]


def test_what_raised_for_another_reason_is_no_fault_of_order():
    assert found(run(*RIGHT), raised="out of memory") == []


def test_a_trace_shows_the_scale_and_what_was_skipped():
    (trace,) = traces(ScalerRecordBuilder([0]).tries(2.0**20, 2.0**19, 2.0**18, 2.0**18, skipped="xx..").record())
    assert str(trace) == "scale 2^20 -> 2^19 -> 2^18, 2 of 4 steps skipped"
    assert (trace.first_made, trace.skipped, trace.skipped_since, trace.fall) == (2, 2, 0, 0.0)


def test_a_scale_that_falls_after_it_had_been_found():
    (trace,) = traces(ScalerRecordBuilder([0]).tries(*[2.0**-i for i in range(14)], skipped=".xxxxxxxxxxxxx").record())
    assert (trace.skipped_since, trace.fall) == (13, 13.0)
    assert (
        str(trace)
        == "scale 1 -> 2^-1 -> 2^-2 -> 2^-3 -> ... -> 2^-10 -> 2^-11 -> 2^-12 -> 2^-13, 13 of 14 steps skipped"
    )


@pytest.mark.parametrize(
    ("factor", "words"), [(65536.0, "65536"), (2.0**17, "2^17"), (0.5, "2^-1"), (3000.0, "3000"), (0.0, "0")]
)
def test_a_scale_in_words(factor, words):
    (trace,) = traces(ScalerRecordBuilder([0]).tries(factor).record())
    assert str(trace).startswith(f"scale {words}, ")


def test_scalers_that_take_one_anothers_place():
    build = ScalerRecordBuilder([0])
    for scaler in range(3):
        build.scale(scaler=scaler)
        build.backward()
        build.through()
        for call in build.record().scaler_calls()[-1:]:
            call.scaler = scaler
    assert joined(build.record()) is not None
    assert joined(ScalerRecordBuilder([0]).tries(1.0, 1.0, 1.0).record()) is None


def test_without_a_scaler_no_further_run_is_made():
    build = ScalerRecordBuilder([0])
    build.backward()
    build.step()
    assert list(grad_scaler(FakeEvidence(build.record()))) == []


def off(clip=False):
    build = ScalerRecordBuilder([0])
    for _ in range(3):
        build.scaler("scale", enabled=False)
        build.backward()
        if clip:
            build.clip()
        build.step()
        build.scaler("update", enabled=False)
    return build.record()


class Other:
    """The run in which the scaler might be enabled."""

    how = "with precision='fp16'"

    def __init__(self, record):
        self.record = record

    def run(self):
        return self.record


def test_a_scaler_that_is_off_in_every_run_is_no_fault():
    assert list(grad_scaler(FakeEvidence(off(), shared={EnabledScaler: Other(off())}))) == []


def test_a_clip_with_a_scaler_that_is_off_is_advice_and_names_no_number():
    record = off(clip=True)
    (finding,) = grad_scaler(FakeEvidence(record, shared={EnabledScaler: Other(record)}))
    assert (finding.cause, finding.level) == ("clip_before_unscale", "advice")
    assert finding.summary.endswith(
        "the loss scale, wherever the scaler is enabled: the limit is too low by this scale"
    )
    assert finding.measured == "limit 1 on gradients, in 3 steps (this scaler is disabled here)"


def test_the_run_in_which_the_scaler_is_enabled_is_judged():
    enabled = run("zero", "scale", "backward", "clip", "through", "update").record()
    (finding,) = grad_scaler(FakeEvidence(off(clip=True), shared={EnabledScaler: Other(enabled)}))
    assert (finding.cause, finding.level) == ("clip_before_unscale", "fault")
    assert finding.shown_by.endswith("with precision='fp16'")


class AtLowest(FakeEvidence):
    """Every further run is the one that begins at the lowest scale, and skips so many of its steps."""

    def __init__(self, seen, tries, skipped):
        super().__init__(seen, shared={longer_run: seen})
        marks = skipped * "x" + (tries - skipped) * "."
        self._lowest = ScalerRecordBuilder([0]).tries(*tries * [rescaled.LOWEST], skipped=marks).record()

    def plan(self):
        return SimpleNamespace(count=len(self._lowest.scaler_calls()))

    def rerun(self, **_how):
        return self._lowest


def given(seen):
    return AtLowest(seen, 12, 0)


def collapsed(skipped_at_lowest, *, skipped="." + 11 * "x"):
    factors = [2.0 ** (16 - i) for i in range(len(skipped))]
    seen = ScalerRecordBuilder([0]).tries(*factors, skipped=skipped).record()
    return list(grad_scaler(AtLowest(seen, len(skipped), min(skipped_at_lowest, len(skipped)))))


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
    build = ScalerRecordBuilder([0]).tries(*[2.0 ** (16 - i) for i in range(12)], skipped=12 * "x")
    record = build.record()
    for backward in record.backwards():
        backward.roots[0].value = math.nan
    assert list(grad_scaler(given(record))) == []


def test_a_new_scaler_for_every_step():
    def anew(skipped):
        build = ScalerRecordBuilder([0])
        for scaler, mark in enumerate(skipped):
            build.zero()
            build.scale(scaler=scaler)
            build.backward()
            build.through(skipped=mark == "x")
            build.record().scaler_calls()[-1].scaler = scaler
        (finding,) = grad_scaler(given(build.record()))
        return finding.cause, finding.level

    assert anew("......") == ("scaler_recreated", "advice")
    assert anew("xx....") == ("scaler_recreated", "advice")
    assert anew("x.xxx.") == ("scaler_recreated", "fault")
