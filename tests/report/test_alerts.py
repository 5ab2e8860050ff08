"""One entry a fault, at the line to change."""

from __future__ import annotations

from pytest_trainloop.core.report.lines import At
from tests.helpers.report_data import plain, raised, report, result, stale

LATE = plain("overfit_one_batch", "nothing_learned")


def test_a_fault_stands_at_the_line_to_change_with_what_fails_for_it(told, project):
    (alert,) = told(report({"t::a": [result(stale()), result(LATE)]}))
    assert alert.title == "step_order:not_zeroed"
    assert alert.level == "error"
    assert alert.at == At(project / "train.py", "train.py", 4, "        loss.backward()")
    assert (alert.other.number, alert.other.source) == (5, "        optimizer.step()")
    assert alert.also == ("overfit_one_batch",)
    assert alert.text.startswith(
        "2 weights are stepped with old gradients\nmeasured   11 of 12 steps\ncause      not_zeroed: "
    )


def test_without_any_line_it_stands_at_the_test(told):
    for finding in (LATE, stale(change="gone.py:4   x", where="in the loader")):
        (alert,) = told(report({"test_train.py::test_gpt": [result(finding)]}))
        assert (alert.at.file, alert.at.number) == ("test_train.py", 4)  # behind the decorator
    (alert,) = told(report({"test_train.py::test_gpt": [result(LATE)]}, at=""))
    assert (alert.at.file, alert.at.number) == ("test_train.py", 4)
    (alert,) = told(report({"a loop of check_loop": [result(LATE)]}, at=""))
    assert alert.at is None


def test_a_line_outside_of_the_repository_comes_after_one_inside(told, tmp_path_factory):
    outside = tmp_path_factory.mktemp("else") / "layers.py"
    outside.write_text("x\n", encoding="utf-8")
    (alert,) = told(report({"test_train.py::test_gpt": [result(stale(change=f"{outside}:1   x"))]}))
    assert (alert.at.file, alert.at.number, alert.other.path) == ("train.py", 5, outside)
    (alert,) = told(report({"test_train.py::test_gpt": [result(stale(change=f"{outside}:1   x", where=""))]}))
    assert (alert.at.file, alert.at.number, alert.other.path) == ("test_train.py", 4, outside)


def test_faults_of_different_lines_or_names_stay_apart(told):
    loops = {"t::a": [result(stale(), stale(change="train.py:3   loss = model(batch)"), stale(culprits=("1.weight",)))]}
    assert len(told(report(loops))) == 3


def test_what_the_project_knows_of_has_its_reason(told):
    known = [
        result(stale(), outcome="xfailed", reason="issue 12"),
        result(plain("finite", "b", level="advice", summary="it is odd (suppressed: on (two) purposes)")),
        result(LATE, plain("overfit_one_batch", "x", summary="it is bad (xfail: issue 13)")),
    ]
    alerts = told(report({"t::a": known}))
    assert {alert.cause: alert.accepted for alert in alerts} == {
        "not_zeroed": "issue 12",
        "b": "on (two) purposes",
        "nothing_learned": "",
        "x": "issue 13",
    }


def test_a_check_that_failed_without_a_finding_says_why(told):
    (alert,) = told(report({"t::a": [result(check="finite", outcome="failed", reason="xfail(strict): finite passed")]}))
    assert (alert.title, alert.summary) == ("finite", "xfail(strict): finite passed")


def test_one_sentence_of_several_loops_without_a_line_is_told_once(told):
    strict = result(check="finite", outcome="failed", reason="xfail(strict): finite passed")
    loops = {"test_train.py::test_gpt": [strict], "test_other.py::test_gpt": [strict]}
    document = report(loops)
    document["loops"][1]["at"] = "train.py:1"
    (alert,) = told(document)
    assert alert.loops == tuple(loops)
    raising = [raised(f'  File "train.py", line {number}, in train\n    x\n') for number in (3, 4)]
    assert len(told(report({f"t::{i}": [each] for i, each in enumerate(raising)}))) == 2
