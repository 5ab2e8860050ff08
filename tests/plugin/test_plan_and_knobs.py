"""The plan and the knobs by themselves, as check_loop uses them."""

from __future__ import annotations

import pytest

from pytest_trainloop import UsageError
from pytest_trainloop.core.finding import Finding, Result
from pytest_trainloop.declare.knobs import KNOBS, nearest, read_knobs
from pytest_trainloop.declare.selection import Plan, Selection, choose

KNOWN = {"step_order": ("stale", "lost"), "finite": ("nan",), "schedule": ("rate_stuck", "stale")}


def plan(strict: bool = False, **selection) -> Plan:
    return choose(KNOWN, Selection(where="here", **selection), strict=strict)


def found(*causes: str, check: str = "step_order", level="fault") -> Result:
    findings = tuple(Finding(check=check, cause=cause, summary=cause, level=level) for cause in causes)
    failed = level == "fault" and findings
    return Result(check=check, outcome="failed" if failed else "passed", findings=findings)


def test_checks_stay_in_causal_order():
    assert plan().checks == ("step_order", "finite", "schedule")
    assert plan(only=("schedule", "step*")).checks == ("step_order", "schedule")


def test_a_skip_by_pattern_skips_all_that_it_matches():
    assert plan(skip={"s*": "why"}).skip == {"step_order": "why", "schedule": "why"}
    assert plan(skip={"s*:stale": "why"}).skip == {}


def test_the_first_place_and_the_first_entry_count():
    chosen = choose(
        KNOWN,
        Selection(where="a", skip={"finite": "mine", "f*": "later"}, options={"finite": {"n": 1}}),
        Selection(where="b", skip={"finite": "theirs"}, options={"finite": {"n": 2, "m": 3}}),
    )
    assert chosen.skip == {"finite": "mine"}
    assert chosen.options == {"finite": {"n": 1, "m": 3}}


@pytest.mark.parametrize("outcome", ["skipped", "unreliable", "error"])
def test_what_was_not_decided_is_not_judged(outcome):
    result = Result(check="step_order", outcome=outcome, reason="because")
    assert plan(xfail={"step_order": "why", "step_order:stale": "why"}, strict=True).judge(result) is result


def test_all_findings_suppressed_is_a_pass():
    judged = plan(skip={"step_order:*": "meant so"}).judge(found("stale", "lost"))
    assert judged.outcome == "passed"
    assert [f.summary for f in judged.advice] == ["stale (suppressed: meant so)", "lost (suppressed: meant so)"]


def test_strictness_promotes_advice_but_not_what_is_suppressed():
    assert plan(strict=True).judge(found("stale", level="advice")).outcome == "failed"
    assert plan(strict=True, skip={"*:stale": "why"}).judge(found("stale", level="advice")).outcome == "passed"


def test_expected_causes_that_are_all_found_excuse_the_failure():
    judged = plan(xfail={"step_order:stale": "a", "step_order:l*": "b"}).judge(found("stale", "lost"))
    assert (judged.outcome, judged.reason) == ("xfailed", "a; b")


def test_an_expected_cause_is_no_matter_of_a_check_that_cannot_name_it():
    assert plan(xfail={"*:stale": "why"}).judge(found(check="finite")).outcome == "passed"
    assert plan(xfail={"*:stale": "why"}).judge(found(check="schedule")).outcome == "failed"


def test_an_expected_cause_missed_beside_one_found():
    judged = plan(xfail={"step_order:stale": "a", "step_order:lost": "b"}).judge(found("stale"))
    assert (judged.outcome, judged.reason) == (
        "failed",
        "xfail(strict): step_order:lost was not found, but is listed as expected (b)",
    )
    assert judged.faults[0].summary == "stale (xfail: a)"


def test_knobs_are_keyword_defaults():
    def loop(tmp_path, accumulate=1, *, device="cpu", depth=2, **rest): ...

    assert read_knobs(loop) == {"accumulate": "accumulate", "device": "device"}
    assert read_knobs(loop, {"depth": "ranks"}) == {
        "accumulate": "accumulate",
        "device": "device",
        "ranks": "depth",
    }


def test_a_parameter_without_a_default_is_no_knob():
    def loop(accumulate, /, device, compile): ...

    assert read_knobs(loop) == {}


def test_a_mapped_parameter_goes_before_one_of_the_knobs_name():
    def loop(checkpoint="out/", use_checkpoint=False): ...

    assert read_knobs(loop, {"use_checkpoint": "checkpoint"}) == {"checkpoint": "use_checkpoint"}


def test_two_parameters_for_one_knob():
    def loop(a=1, b=1): ...

    with pytest.raises(UsageError, match="maps both 'a' and 'b' to 'accumulate'; one parameter is needed"):
        read_knobs(loop, {"a": "accumulate", "b": "accumulate"})


def test_the_projects_mapping_counts_where_it_fits():
    def loop(use_it=False): ...

    def other(): ...

    assert read_knobs(loop, project={"use_it": "compile"}) == {"compile": "use_it"}
    assert read_knobs(other, project={"use_it": "compile"}) == {}


def test_functions_without_a_signature_or_defaults():
    assert read_knobs(dict) == {}
    with pytest.raises(UsageError, match="no keyword default of <lambda>; it has no keyword defaults"):
        read_knobs(lambda: None, {"a": "accumulate"})
    with pytest.raises(UsageError, match="both must be strings"):
        read_knobs(dict, {"a": 1})


def test_nearest():
    assert nearest("complie", KNOBS) == "the nearest name is 'compile'"
    assert nearest("x", []) == "there are no names to choose from"
