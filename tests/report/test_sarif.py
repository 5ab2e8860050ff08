"""SARIF 2.1.0: valid by the schema of the standard, and what code scanning needs beyond it."""

from __future__ import annotations

import json
import re

import pytest

from pytest_trainloop import Result
from pytest_trainloop.core.report.json import text
from pytest_trainloop.core.report.sarif import FINGERPRINT, document
from pytest_trainloop.judging.explain import rule
from tests.helpers.report_data import TRAIN, plain, raised, report, result, stale
from tests.helpers.reports import of_sarif, strict


@pytest.fixture
def run(told):
    """The run in the log of a report."""

    def made(loops, **given):
        data = report(loops)
        log = strict(text(document(told(data), data["environment"], rule, **given)))
        of_sarif().validate(log)
        return log["runs"][0]

    return made


def test_a_fault_is_a_result_at_the_line_to_change(run):
    made = run({"t::a": [result(stale()), result(plain("overfit_one_batch", "x"))]})
    (found,) = made["results"]
    assert (found["ruleId"], found["ruleIndex"], found["level"]) == ("step_order:not_zeroed", 0, "error")
    assert found["message"]["text"].splitlines() == [
        "2 weights are stepped with old gradients.",
        "Measured: 11 of 12 steps.",
        "Shown by: they are bit-identical.",
        "Repair: optimizer.zero_grad() before this line",
        "For it also overfit_one_batch fails.",
        "Found in t::a.",
        "See also [train.py:5](1).",
    ]
    (place,) = found["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py", "uriBaseId": "SRCROOT"},
        "region": {
            "startLine": 4,
            "startColumn": 9,
            "endLine": 4,
            "endColumn": 24,
            "snippet": {"text": "        loss.backward()"},
        },
    }
    assert place["logicalLocations"] == [
        {"fullyQualifiedName": "t::a", "kind": "function"},
        {"fullyQualifiedName": "0.weight", "kind": "parameter"},
        {"fullyQualifiedName": "0.bias", "kind": "parameter"},
    ]
    (seen,) = found["relatedLocations"]
    assert (seen["id"], seen["physicalLocation"]["region"]["startLine"]) == (1, 5)
    assert made["invocations"] == [{"executionSuccessful": True, "toolExecutionNotifications": []}]


def test_a_rule_is_a_cause_with_its_page(run):
    (found,) = run({"t::a": [result(stale())]})["tool"]["driver"]["rules"]
    assert found["id"] == "step_order:not_zeroed"
    assert found["shortDescription"]["text"] == "Not zeroed (step_order)"
    assert found["fullDescription"]["text"].startswith("A step uses, bit for bit, gradients that")
    assert "Repair: optimizer.zero_grad()" in found["help"]["text"]
    assert "## How it decides" in found["help"]["markdown"]
    assert found["properties"]["tags"] == ["training", "wiring"]


def test_descriptions_of_all_causes_fit_what_code_scanning_takes():
    from pytest_trainloop.core import registry

    causes = [(name, cause) for name, check in registry.registered().items() for cause in check.causes]
    for check, cause in causes:
        known = rule(check, cause)
        assert 0 < len(known.proof) <= 1024
        assert known.page
        assert not re.search(r"\]\((?!http)", known.markdown), "a link that leads nowhere outside of the docs"


def test_a_rule_that_this_process_does_not_know_is_named(run):
    (found,) = run({"t::a": [result(plain("of_the_project", "too_few"))]})["tool"]["driver"]["rules"]
    assert found["shortDescription"]["text"] == "Too few (of_the_project)"
    assert found["help"]["text"] == "pytest --trainloop-explain=of_the_project:too_few"


def test_advice_is_a_warning_and_a_note_a_note(run):
    found = [result(plain("finite", "a", level="note"), plain("finite", "b", level="advice"))]
    assert [(r["ruleId"], r["level"]) for r in run({"t::a": found})["results"]] == [
        ("finite:b", "warning"),
        ("finite:a", "note"),
    ]


def test_what_the_project_knows_of_is_suppressed_with_its_reason(run):
    made = run({"t::a": [result(stale(), outcome="xfailed", reason="issue 12")]})
    assert [found["suppressions"] for found in made["results"]] == [
        [{"kind": "external", "status": "accepted", "justification": "issue 12"}]
    ]
    assert "suppressions" not in run({"t::a": [result(stale())]})["results"][0]


def test_an_error_is_a_notification_and_no_result(run):
    made = run({"t::a": [raised('  File "train.py", line 3, in train\n    loss = model(batch)\n')]})
    assert made["results"] == []
    (invocation,) = made["invocations"]
    assert not invocation["executionSuccessful"]
    (note,) = invocation["toolExecutionNotifications"]
    assert note["level"] == "error"
    assert note["message"]["text"].startswith("fit raised ValueError: no data")
    assert note["locations"][0]["physicalLocation"]["region"]["startLine"] == 3


def test_a_mistake_of_ours_is_a_notification_at_the_test(run):
    stopped = Result(check="finite", outcome="error", reason="finite was stopped; please report it", mistake="frames")
    made = run({"t::a": [stopped]})
    assert made["results"] == []
    (note,) = made["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"] == "finite was stopped; please report it"
    assert note["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "test_train.py"


def prints(run, **given):
    return [found["partialFingerprints"][FINGERPRINT] for found in run({"t::a": [result(stale(**given))]})["results"]]


def test_a_fingerprint_stays_when_lines_move_and_numbers_change(run, project):
    before = prints(run)
    (project / "train.py").write_text("import torch\n\n\n" + TRAIN.replace("    ", "  "), encoding="utf-8")
    moved = {"change": "train.py:7   loss.backward()", "where": "train.py:8   optimizer.step()"}
    assert prints(run, measured="9 of 12 steps", summary="other numbers", **moved) == before
    assert prints(run, culprits=("1.weight",), kinds=()) != before


def test_equal_faults_of_one_line_have_fingerprints_of_their_own(run):
    same = "train.py:4   loss.backward()"
    twice = [
        result(
            plain("finite", "a", change=same, culprits=("w",)),
            plain("finite", "a", level="note", change=same, culprits=("w",)),
        )
    ]
    first, second = (r["partialFingerprints"][FINGERPRINT] for r in run({"t::a": twice})["results"])
    assert first.removesuffix(":1") == second.removesuffix(":2")


def test_paths_are_uris_and_a_file_outside_of_the_repository_is_absolute(run, project, tmp_path_factory):
    (project / "my models").mkdir()
    (project / "my models" / "ü#.py").write_text("x\n", encoding="utf-8")
    outside = tmp_path_factory.mktemp("else") / "train.py"
    outside.write_text("x\n", encoding="utf-8")
    found = [result(stale(change="my models/ü#.py:1   x", where=f"{outside}:1   x"))]
    (made,) = run({"t::a": found})["results"]
    assert made["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20models/%C3%BC%23.py"
    assert made["relatedLocations"][0]["physicalLocation"]["artifactLocation"] == {"uri": outside.as_uri()}


def test_brackets_in_a_message_make_no_link(run):
    (made,) = run({"t::a": [result(stale(measured="batch['mask'](1) and x[0](2)", where=""))]})["results"]
    assert not re.search(r"\]\(\d+\)", made["message"]["text"])


def test_every_result_has_a_place(told):
    data = report({"gone.py::test_x": [result(stale(change="", where=""))]}, at="")
    log = document(told(data), data["environment"], rule)
    of_sarif().validate(json.loads(json.dumps(log)))
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "gone.py", "uriBaseId": "SRCROOT"}, "region": {"startLine": 1}}


def test_nothing_checked_is_a_notification(run):
    (invocation,) = run({}, nothing="no test was selected")["invocations"]
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "nothing was checked: no test was selected"
