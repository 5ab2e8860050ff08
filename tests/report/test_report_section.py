"""The closing section and the Report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.report import Report
from pytest_trainloop.core.report.entry import Entry
from pytest_trainloop.core.report.json import document, environment
from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.report.section import checked_nothing, section


def result(check: str, *findings: Finding, outcome: str = "passed", **fields) -> Result:
    return Result(check=check, outcome=outcome, findings=findings, **fields)


def fault(check: str, cause: str, *explains: str) -> Result:
    return result(check, Finding(check=check, cause=cause, summary=f"{cause}!", explains=explains), outcome="failed")


def test_a_consequence_is_listed_under_its_root():
    advice = result("d", Finding(check="d", cause="odd", summary="odd!", level="advice", repair="give it"))
    report = Report.of("loop", [fault("a", "cut", "b", "d:odd"), fault("b", "low", "c"), fault("c", "flat"), advice])
    assert str(report).splitlines() == [
        "loop  3 failed, 1 passed, 1 advice; 0.0 s, 0 optimizer steps",
        "  a: cut! [cut]",
        "    also fails for it: b, c",
        "  advice  d: odd! (repair a first)",
    ]


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([fault("a", "x", "b"), fault("b", "y", "a")], ["  a: x! [x]", "    also fails for it: b"]),
        ([fault("a", "x"), fault("b", "y", "a")], ["  b: y! [y]", "    also fails for it: a"]),
        (
            [fault("a", "x", "b"), fault("b", "y", "c"), fault("c", "z", "a")],
            ["  a: x! [x]", "    also fails for it: b, c"],
        ),
    ],
    ids=["of two that explain each other the earlier", "a later one", "of a ring the earliest"],
)
def test_which_cause_is_the_root(found, told):
    assert str(Report.of("loop", found)).splitlines()[1:] == told


def test_a_change_from_the_baseline_follows_from_the_wiring_of_the_same_parameters():
    held = replace(fault("optimizer_holds_every_param", "left_out").findings[0], culprits=("head.weight", "head.bias"))
    changed = replace(fault("baseline", "left_out_of_optimizer").findings[0], culprits=("head.weight",))
    other = replace(changed, culprits=("head.weight", "stem.weight"))
    of = {"wiring": result("optimizer_holds_every_param", held, outcome="failed")}
    follows = root_causes([of["wiring"], result("baseline", changed, outcome="failed")])
    assert [root.followed for root in follows] == [(("baseline",),)]
    assert len(root_causes([of["wiring"], result("baseline", other, outcome="failed")])) == 2


def test_every_kind_of_line():
    error = UserError(stage="running fit", summary="ValueError: bad")
    report = Report.of(
        "loop",
        [
            result(
                "a",
                Finding(cause="c", summary="hint", level="advice", repair="mend it; or say so", change="a.py:3   x"),
                seconds=1.26,
                steps=3,
            ),
            result("i", Finding(cause="c", summary="a remark", level="note")),
            result("b", outcome="error", error=error),
            result("c", outcome="error", reason="no loop"),
            result("d", outcome="xfailed", reason="ticket"),
            result("e", outcome="skipped", reason="no fit"),
            result("f", outcome="skipped", reason="no fit", steps=2),
            result("g", outcome="unreliable", reason="drifts"),
            result("h", outcome="failed", reason="xfail(strict): it passed"),
        ],
    )
    assert str(report).splitlines() == [
        "loop  1 failed, 2 errors, 2 passed, 1 xfailed, 1 advice, 1 unreliable, 2 skipped; 1.3 s, 5 optimizer steps",
        "  h: xfail(strict): it passed",
        "  error  b: running fit raised ValueError: bad",
        "  error  c: no loop",
        "  xfailed  d: ticket",
        "  advice  a: hint",
        "    change  a.py:3   x",
        "    to fix or silence, one of:",
        "      mend it",
        "      or say so",
        "  note  i: a remark",
        "  skipped  e, f: no fit",
        "  unreliable  g: drifts",
    ]
    assert not report.ok
    assert {line.style for line in section(report.entries)} == {"bad", "plain", "warn"}


def test_failures_come_first_open_questions_once_and_totals_last():
    open_questions = (
        result("p", outcome="skipped", reason="no padding is known", needs="padding="),
        result("q", outcome="skipped", reason="one loss is not known", needs="expected_init_loss="),
        result("c", outcome="skipped", reason="no checkpointing was seen", applies=False),
        result("d", outcome="unreliable", reason="drifts"),
    )
    entries = [
        *Report.of("right", [result("a"), *open_questions]).entries,
        *Report.of("wrong", [result("a"), *open_questions[:3], fault("e", "cut")]).entries,
    ]
    more = "need more (padding=, expected_init_loss=)"
    assert str(Report(tuple(entries))).splitlines() == [
        f"wrong  1 failed, 1 passed, 1 does not apply, 2 {more}; 0.0 s, 0 optimizer steps",
        "  e: cut! [cut]",
        f"right  1 passed, 1 unreliable, 1 does not apply, 2 {more}; 0.0 s, 0 optimizer steps",
        "  needs padding=  p: no padding is known (2 of 2)",
        "  needs expected_init_loss=  q: one loss is not known (2 of 2)",
        "  unreliable  d: drifts (right)",
        f"2 in all: 1 failed, 2 passed, 1 unreliable, 2 do not apply, 4 {more}; 0.0 s, 0 optimizer steps",
    ]


def test_what_a_declaration_would_add_is_one_line_on_a_green_run():
    needs = [result(name, outcome="skipped", reason="not given", needs=f"{name}=") for name in "pq"]
    green = Report.of("loop", [result("a"), *needs, result("b", outcome="skipped", reason="no fit")]).entries
    assert [line.text for line in section(green, fold=True)][1:] == [
        "  2 more checks possible: -v says what is needed",
        "  skipped  b: no fit",
    ]
    red = Report.of("loop", [fault("a", "cut"), *needs]).entries
    assert section(red, fold=True) == section(red)


def test_a_loop_without_time_for_half_of_its_checks_says_so_first():
    late = [result(name, outcome="skipped", reason="over", looked_at=False) for name in "bc"]
    assert str(Report.of("loop", [result("a"), *late])).startswith("loop  MORE THAN HALF WAS NOT LOOKED AT, 1 passed")
    assert str(Report.of("loop", [result("a"), result("d"), *late])).startswith("loop  2 passed, 2 not looked at")


def test_many_checks_with_one_reason_are_counted():
    skipped = [result(name, outcome="skipped", reason="fit raised ValueError: bad") for name in "bcdefgh"]
    last = str(Report.of("loop", [result("a", outcome="error", reason="bad"), *skipped])).splitlines()[-1]
    assert last == "  skipped  7 checks: fit raised ValueError: bad"


def test_ok_means_no_failure_and_no_error():
    assert Report.of("loop", [result("a"), result("b", outcome="skipped"), result("c", outcome="xfailed")]).ok
    assert not Report.of("loop", [fault("a", "x")]).ok


def test_checked_nothing():
    assert checked_nothing(()) == "no selected test carries @pytest.mark.trainloop or trainloop_loss"
    skipped = [result(name, outcome="skipped", reason="no fit") for name in "ab"]
    assert checked_nothing(Report.of("loop", skipped).entries) == "all checks were skipped: 2 x no fit"
    assert checked_nothing(Report.of("loop", [*skipped, result("c")]).entries) == ""
    assert str(Report.of("loop", skipped)).startswith("loop  NOTHING WAS CHECKED, ")


def test_causal_order_is_the_same_whatever_ran_first():
    entries = [Entry(loop=loop, nodeid=f"{loop}[{c}]", result=result(c)) for loop in "ba" for c in ("z", "y", "own")]
    ordered = Report(tuple(entries)).in_causal_order(["y", "z"])
    assert [entry.nodeid for entry in ordered.entries] == ["a[y]", "a[z]", "a[own]", "b[y]", "b[z]", "b[own]"]
    assert Report(tuple(reversed(entries))).in_causal_order(["y", "z"]) == ordered


def test_an_entry_survives_json():
    error = UserError(stage="running fit", summary="ValueError: bad", traceback="File")
    entry = Entry(
        loop="loop", nodeid="loop[a]", result=result("a", *fault("a", "x", "b").findings, error=error, steps=3)
    )
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


def test_the_json_document():
    data = document(Report.of("loop", [fault("a", "x", "b"), result("c", steps=4)]), environment(device="cpu", seed=1))
    assert set(data["environment"]) == {"python", "torch", "pytest", "pytest_trainloop", "platform", "device", "seed"}
    (loop,) = data["loops"]
    assert (loop["nodeid"], loop["steps"]) == ("loop", 4)
    assert list(loop["checks"][0])[:3] == ["check", "nodeid", "outcome"]
    assert set(loop["checks"][0]["findings"][0]) == {
        *("check", "cause", "level", "summary", "measured", "shown_by", "culprits", "kinds", "where", "smallest"),
        *("composition", "change", "repair", "tried", "do_not", "explains"),
    }
