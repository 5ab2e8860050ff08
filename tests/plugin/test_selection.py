"""only, skip, xfail, options, strictness: from the marker, the ini file and the command line."""

from __future__ import annotations

import pytest


def one_loop(marker: str = "", says: str = "{}", parameters: str = "") -> str:
    return f"""
import pytest
from conftest import *

@pytest.mark.trainloop({marker})
def test_gpt({parameters}):
    return {says}
"""


STALE = "{'step_order': fault('step_order', 'stale')}"
BOTH = """{"step_order": failed(
    Finding(check="step_order", cause="stale", summary="old"),
    Finding(check="step_order", cause="lost", summary="gone"))}"""
NOT_FOUND = ["xfail(strict): step_order:stale was not found, but is listed as expected (ticket 12)"]


@pytest.mark.parametrize(
    ("marker", "options", "outcomes"),
    [
        ("only=['step_order', 'over*']", [], {"passed": 2}),
        ("only=['step_order', 'overfit']", ["--trainloop-only", "overfit,accumulation"], {"passed": 1}),
        ("only=['step_order', 'overfit']", ["--trainloop-only=overfit", "--trainloop-only=step_*"], {"passed": 2}),
        (
            "skip={'overfit': 'a'})\n@pytest.mark.trainloop(only=['overfit', 'step_order']",
            [],
            {"passed": 1, "skipped": 1},
        ),
    ],
    ids=["marker", "narrowed by the command line", "options add up", "markers add up"],
)
def test_what_is_chosen(pytester, run, marker, options, outcomes):
    pytester.makepyfile(one_loop(marker))
    run("--trainloop", *options).assert_outcomes(**outcomes)


def test_choices_that_leave_nothing_say_so(pytester, run):
    pytester.makepyfile(one_loop("only=['step_order']"))
    result = run("--trainloop", "--trainloop-only", "overfit")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["trainloop: NOTHING WAS CHECKED: *no check is left*"])


def test_skip_shows_its_reason_and_does_not_run(pytester, run, log):
    pytester.makepyfile(one_loop("skip={'overfit': 'too slow here'}", "{'overfit': fault('overfit', 'stuck')}"))
    result = run("--trainloop", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*skipped  overfit: too slow here", "SKIPPED * too slow here"])
    assert len(log("check")) == 2


def test_a_skipped_cause_becomes_advice_with_the_reason(pytester, run):
    pytester.makepyfile(one_loop("skip={'step_order:stale': 'meant so'}", STALE))
    result = run("--trainloop", "--trainloop-strict")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["  advice  step_order: it is wrong by 4.00 (suppressed: meant so)"])


def test_a_skipped_cause_leaves_the_other_cause(pytester, run):
    pytester.makepyfile(one_loop("skip={'step_order:stale': 'meant so'}", BOTH))
    result = run("--trainloop")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["gone", "cause      lost: none is"])
    result.stdout.no_fnmatch_line("cause      stale*")


@pytest.mark.parametrize(
    ("name", "says", "outcome", "lines"),
    [
        ("step_*", STALE, "xfailed", ["  xfailed  step_order: ticket 12", "XFAIL *[[]step_order] - ticket 12"]),
        (
            "step_order",
            "{}",
            "failed",
            [
                "xfail(strict): step_order passed, but is listed as expected to fail (ticket 12)",
                "FAILED *xfail(strict)*",
            ],
        ),
        ("step_order:stale", STALE, "xfailed", []),
        ("step_order:stale", BOTH, "failed", ["old (xfail: ticket 12)", "gone"]),
        ("step_order:stale", "{}", "failed", NOT_FOUND),
        ("step_order:stale", "{'step_order': fault('step_order', 'lost')}", "failed", NOT_FOUND),
    ],
)
def test_xfail_is_strict_and_excuses_what_it_names(pytester, run, name, says, outcome, lines):
    pytester.makepyfile(one_loop(f"xfail={{'{name}': 'ticket 12'}}", says))
    result = run("--trainloop", "-rxf")
    result.assert_outcomes(passed=2, **{outcome: 1})
    result.stdout.fnmatch_lines(lines)


@pytest.mark.parametrize("says", ["skipped('step_order')", "raised('step_order')", "UsageError('returned None')"])
def test_xfail_excuses_no_skip_and_no_crash(pytester, run, says):
    source = one_loop("xfail={'step_order': 'ticket 12'}", f"{{'step_order': {says}}}")
    pytester.makepyfile("from pytest_trainloop import UsageError\n" + source)
    counts = run("--trainloop").parseoutcomes()
    assert counts.get("passed") == 2
    assert "xfailed" not in counts


def test_strict_fails_advice(pytester, run):
    pytester.makepyfile(one_loop(says="{'step_order': fault('step_order', 'stale', level='advice')}"))
    result = run("--trainloop")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["  advice  step_order: it is wrong by 4.00"])
    run("--trainloop", "--trainloop-strict").assert_outcomes(passed=2, failed=1)
    pytester.makeini("[pytest]\ntrainloop_strict = true\n")
    run("--trainloop").assert_outcomes(passed=2, failed=1)


def test_options_of_a_check_reach_it(pytester, run, log):
    pytester.makepyfile(one_loop("overfit={'steps': 400}"))
    pytester.makeini("[pytest]\ntrainloop_options =\n  overfit: {'steps': 100, 'rate': 0.1}\n  step_order: {'n': 1}\n")
    run("--trainloop").assert_outcomes(passed=3)
    assert "{'steps': 400, 'rate': 0.1}" in log("check")[2]
    assert "{'n': 1}" in log("check")[0]
    assert "None" in log("check")[1]


def test_the_ini_file(pytester, run, log):
    pytester.makepyfile(one_loop(says=STALE, parameters="use_checkpoint=False, depth=2"))
    pytester.makepyprojecttoml("""
        [tool.pytest.ini_options]
        trainloop_only = ["step_order", "over*"]
        trainloop_skip = ["overfit: slow: very"]
        trainloop_xfail = ["step_order:stale: ticket 12"]
        trainloop_knobs = ["use_checkpoint: checkpoint", "other: compile"]
        trainloop_seed = "7"
        trainloop_timeout = "2.5"
        trainloop_device = "cpu"
    """)
    result = run("--trainloop", "-rs")
    result.assert_outcomes(xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * slow: very"])
    assert log("subject") == ["test_the_ini_file.py::test_gpt {'checkpoint': 'use_checkpoint'} 7 2.5 cpu"]


def test_the_command_line_goes_before_the_ini_file(pytester, run, log):
    pytester.makepyfile(one_loop())
    pytester.makeini("[pytest]\ntrainloop_seed = 7\n")
    run("--trainloop", "--trainloop-seed=3", "--trainloop-timeout=9", "--trainloop-device=cpu")
    assert log("subject")[0].endswith("{} 3 9.0 cpu")


def test_the_marker_goes_before_the_ini_file(pytester, run):
    pytester.makepyfile(one_loop("skip={'overfit': 'mine'}"))
    pytester.makeini("[pytest]\ntrainloop_skip =\n  overfit: theirs\n")
    run("--trainloop", "-rs").stdout.fnmatch_lines(["SKIPPED * mine"])


WRONG = {
    "skip={'overfitt': 'x'}": "skip names 'overfitt', which matches no check; the nearest name is 'overfit'",
    "xfail={'stepp_*': 'x'}": "xfail names 'stepp_*', which matches no check; the nearest name is 'step_order'",
    "only=['acumulation']": "only names 'acumulation', which matches no check; the nearest name is 'accumulation'",
    "skip={'step_order:stael': 'x'}": "matches no cause; the nearest name is 'step_order:stale'",
    "skip={'*:stale*r': 'x'}": "matches no cause; the nearest name is 'step_order:stale'",
    "skip={'nope:stale': 'x'}": "skip names 'nope:stale', which matches no check",
    "skip={'overfit': ''}": "skip of 'overfit' has no reason ('')",
    "xfail={'overfit': None}": "xfail of 'overfit' has no reason (None)",
    "skip=['overfit']": "skip=['overfit']; a dict from name to reason is needed",
    "skip={3: 'x'}": "skip holds 3; the name of a check is needed",
    "only='overfit'": "only='overfit'; a list of check names is needed",
    "only=[]": "only is empty",
    "only=['step_order:stale']": "only='step_order:stale' names a cause",
    "onyl=['overfit']": "has no keyword 'onyl'; the nearest name is 'only'",
    "overfitt={'steps': 1}": "has no keyword 'overfitt'; the nearest name is 'overfit'",
    "overfit=400": "overfit=400; a dict of options is needed",
    "'overfit'": "got 'overfit' by position; keywords are needed",
    "knobs={'use_ckpt': 'checkpoint'}": (
        "knobs names 'use_ckpt', which is no keyword default of test_gpt; the nearest name is 'use_checkpoint'"
    ),
    "knobs={'use_checkpoint': 'checkpiont'}": "'checkpiont', which is no knob; the nearest name is 'checkpoint'",
    "knobs=['use_checkpoint']": "knobs is ['use_checkpoint']; a dict from parameter to knob is needed",
}


@pytest.mark.parametrize(("marker", "sentence"), WRONG.items(), ids=list(WRONG))
def test_what_the_marker_cannot_say(pytester, run, marker, sentence):
    pytester.makepyfile(test_a=one_loop(marker, parameters="use_checkpoint=False"))
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    assert sentence in result.stdout.str()
    assert "test_a.py::test_gpt: " in result.stdout.str()
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("E  *")


@pytest.mark.parametrize(
    ("key", "line", "sentence"),
    [
        (
            "trainloop_skip",
            "overfit",
            "ERROR: the ini file: trainloop_skip has the line 'overfit'; 'name: text' is needed",
        ),
        ("trainloop_options", "overfit: steps", "ERROR: the ini file: trainloop_options gives overfit 'steps'"),
        ("trainloop_seed", "x", "ERROR: ini key trainloop_seed is 'x'; a number is needed"),
        (
            "trainloop_device",
            "tpu",
            "ERROR: ini key trainloop_device is 'tpu'; auto, cpu, cuda, or one of several as cuda:1, is needed",
        ),
    ],
)
def test_an_ini_line_that_cannot_be_read(pytester, run, key, line, sentence):
    pytester.makepyfile(one_loop())
    pytester.makeini(f"[pytest]\n{key} =\n  {line}\n")
    result = run("--trainloop")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"{sentence}*"])


@pytest.mark.parametrize(
    ("ini", "options", "sentence"),
    [
        ("trainloop_skip = overfitt: slow", [], "the ini file: skip names 'overfitt', which matches no check"),
        ("trainloop_options = overfit: 3", [], "the ini file: overfit=3; a dict of options is needed"),
        ("trainloop_options = over: {'steps': 3}", [], "the ini file gives options to 'over', which is no check"),
        ("trainloop_knobs = use_it: complie", [], "knobs maps 'use_it' to 'complie', which is no knob"),
        (
            "",
            ["--trainloop-only", "overfitt"],
            "--trainloop-only: only names 'overfitt', which matches no check; the nearest name is 'overfit'",
        ),
    ],
)
def test_a_choice_that_matches_nothing(pytester, run, ini, options, sentence):
    pytester.makepyfile(one_loop())
    pytester.makeini(f"[pytest]\n{ini}\n")
    result = run("--trainloop", *options)
    result.assert_outcomes(failed=1)
    assert sentence in result.stdout.str()
