"""Orders of a scaler's calls, and traces of its scale, on given records."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from pytest_trainloop.checks.numerics.grad_scaler import rescaled
from pytest_trainloop.checks.numerics.grad_scaler.calls import call_order, traces
from pytest_trainloop.checks.numerics.grad_scaler.check import grad_scaler
from pytest_trainloop.checks.numerics.grad_scaler.enabled_scaler import EnabledScaler
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.runs.further_runs import longer_run
from tests.helpers.record_builder import RecordBuilder
from tests.helpers.records import FakeEvidence

UPDATED_TWICE = "No inf checks were recorded prior to update."
UNSCALED_AFTER = "unscale_() is being called after step()."
STEPPED_TWICE = "step() has already been called since the last update()."


class ScalerRecordBuilder(RecordBuilder):
    """A build in which steps through the scaler lie inside its call, and scales have a trace."""

    def through(self, *, skipped: bool = False) -> None:
        call = self.scaler("step", line=30)
        if not skipped:
            self.step()
        call.stepped, call.until = not skipped, self._tick()

    def scale(self, factor: float = 1024.0) -> None:
        self.scaler("scale").factor = factor

    def tries(self, *factors: float, skipped: str = "") -> ScalerRecordBuilder:
        """One iteration at each of these scales; an "x" in ``skipped`` for each step that is left out."""
        for factor, mark in zip(factors, skipped.ljust(len(factors), "."), strict=True):
            self.zero()
            self.scale(factor)
            self.backward()
            self.through(skipped=mark == "x")
            self.scaler("update", line=33)
        return self


def run(*calls: str, times: int = 3, build: ScalerRecordBuilder | None = None) -> ScalerRecordBuilder:
    """The named calls, in this order, in every iteration."""
    build = build or ScalerRecordBuilder([0, 1])
    calls_by_name = {
        "zero": build.zero,
        "backward": build.backward,
        "step": build.step,
        "clip": build.clip,
        "scale": build.scale,
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


def test_a_clip_after_the_step_is_a_matter_of_step_order():
    assert found(run("zero", "scale", "backward", "step", "clip", "update")) == []


def test_a_scaler_that_is_never_updated():
    (finding,) = found(run("zero", "scale", "backward", "through"))
    assert (finding.cause, finding.level) == ("update_missing", "fault")
    assert finding.measured == "3 scaler steps, 0 updates"


def test_torch_refuses_a_second_step_without_update():
    build = run("scale", "backward", "refused", build=run("zero", "scale", "backward", "through", times=1), times=1)
    assert causes(build, raised=STEPPED_TWICE) == [("update_missing", "fault")]


def test_one_step_without_update_is_not_yet_a_habit():
    assert found(run("zero", "scale", "backward", "through", times=1)) == []


def test_torch_refuses_an_update_in_an_iteration_without_a_step():
    build = run("scale", "backward", "update", build=run(*RIGHT, times=1), times=1)
    (finding,) = found(build, raised=UPDATED_TWICE)
    assert finding.cause == "update_twice"
    assert "in which scaler.step() is not" in finding.summary


def test_torch_refuses_an_unscale_after_the_step():
    (finding,) = found(run("zero", "scale", "backward", "through", "unscale", times=1), raised=UNSCALED_AFTER)
    assert finding.cause == "unscaled_twice"
    assert "which has unscaled" in finding.summary


def test_what_raised_for_another_reason_is_no_fault_of_order():
    assert found(run(*RIGHT), raised="out of memory") == []


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


def test_without_a_scaler_no_further_run_is_made():
    build = ScalerRecordBuilder([0])
    build.backward()
    build.step()
    assert list(grad_scaler(FakeEvidence(build.record()))) == []


def test_a_clip_with_a_scaler_that_is_off_is_advice_and_names_no_number():
    build = ScalerRecordBuilder([0])
    for _ in range(3):
        build.scaler("scale", enabled=False)
        build.backward()
        build.clip()
        build.step()
        build.scaler("update", enabled=False)
    record = build.record()
    other = SimpleNamespace(how="with precision='fp16'", run=lambda: record)
    (finding,) = grad_scaler(FakeEvidence(record, shared={EnabledScaler: other}))
    assert (finding.cause, finding.level) == ("clip_before_unscale", "advice")
    assert finding.summary.endswith(
        "the loss scale, wherever the scaler is enabled: the limit is too low by this scale"
    )
    assert finding.measured == "limit 1 on gradients, in 3 steps (this scaler is disabled here)"


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


def collapsed(skipped_at_lowest, *, skipped="." + 11 * "x"):
    factors = [2.0 ** (16 - i) for i in range(len(skipped))]
    seen = ScalerRecordBuilder([0]).tries(*factors, skipped=skipped).record()
    return list(grad_scaler(AtLowest(seen, len(skipped), min(skipped_at_lowest, len(skipped)))))


@pytest.mark.parametrize("skipped", [0, 5])
def test_gradients_that_fit_at_the_lowest_scale_will_fit_at_another(skipped):
    assert collapsed(skipped) == []


def test_a_scale_that_is_not_found_within_the_watched_steps_is_no_fault_yet():
    assert collapsed(12, skipped=12 * "x") == []


def test_where_no_loss_is_finite_there_is_nothing_to_scale():
    build = ScalerRecordBuilder([0]).tries(*[2.0 ** (16 - i) for i in range(12)], skipped=12 * "x")
    record = build.record()
    for backward in record.backwards():
        backward.roots[0].value = math.nan
    assert list(grad_scaler(AtLowest(record, 12, 0))) == []
