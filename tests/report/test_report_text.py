"""The text of one failure."""

from __future__ import annotations

from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.report.text import failure_text, failure_texts

CAUSES = {"stale": "a gradient is consumed twice"}


def failed(*findings: Finding, reason: str = "") -> Result:
    return Result(check="step_order", outcome="failed", findings=findings, reason=reason)


def test_empty_fields_are_left_out():
    assert failure_text(failed(Finding(cause="stale", summary="old")), CAUSES) == (
        "old\ncause      stale: a gradient is consumed twice\nmore       pytest --trainloop-explain step_order"
    )


def test_one_block_for_each_fault_and_none_for_advice():
    text = failure_text(
        failed(
            Finding(cause="stale", summary="old", measured="x = 4"),
            Finding(cause="other", summary="hint", level="advice"),
            Finding(cause="lost", summary="gone", explains=("overfit", "finite")),
        ),
        CAUSES,
    )
    assert text.splitlines() == [
        "old",
        "measured   x = 4",
        "cause      stale: a gradient is consumed twice",
        "",
        "gone",
        "cause      lost",
        "more       pytest --trainloop-explain step_order",
    ]


def test_the_line_to_change_is_told_from_the_line_where_it_was_seen():
    seen, built = "train.py:9   optimizer.step()", "train.py:2   optimizer = SGD(model.head.parameters())"
    text = failure_text(failed(Finding(cause="stale", summary="old", where=seen, change=built)), CAUSES)
    assert text.splitlines()[2:4] == [f"seen at    {seen}", f"change     {built}"]
    same = failure_text(failed(Finding(cause="stale", summary="old", where=seen, change=seen)), CAUSES)
    assert same.splitlines()[2:3] == [f"change     {seen}"]
    assert "seen at" not in same


def test_parameters_modules_and_operations_are_told_apart():
    names = ("log", "body.2", "body.2.weight", "body.2.bias")
    found = Finding(
        cause="stale", summary="old", culprits=names, kinds=("operation", "module", "parameter", "parameter")
    )
    assert failure_text(failed(found), CAUSES).splitlines()[2:5] == [
        "operation  log",
        "module     body.2",
        "parameters body.2.weight, body.2.bias",
    ]
    few = Finding(cause="stale", summary="old", culprits=names[2:], kinds=("parameter", "parameter"))
    assert "parameters" not in failure_text(failed(few), CAUSES)


def test_what_was_tried_stands_there_only_where_it_was():
    tried = Finding(cause="stale", summary="old", repair="a = b", tried="with this change the check passes")
    assert "repair     a = b\ntried      with this" in failure_text(failed(tried), CAUSES)
    untried = Finding(cause="stale", summary="old", repair="a = b", do_not="clamp: it hides the zero")
    assert "repair     a = b\ndo not     clamp: it hides" in failure_text(failed(untried), CAUSES)


def test_of_several_failures_roots_stand_in_full_and_what_follows_in_one_line():
    root = Result(
        check="step_order",
        outcome="failed",
        findings=(Finding(cause="stale", summary="old", explains=("finite", "overfit:slow")),),
    )
    others = [
        Result(check=check, outcome="failed", findings=(Finding(cause="slow", summary=f"{check} fails"),))
        for check in ("finite", "overfit", "alone")
    ]
    text = failure_texts([root, *others], {key: {} for key in ("step_order", "finite", "overfit", "alone")})
    assert text.splitlines() == [
        "old",
        "cause      stale",
        "more       pytest --trainloop-explain step_order",
        "also       finite, overfit fail for it",
        "",
        "alone fails",
        "cause      slow",
        "more       pytest --trainloop-explain alone",
    ]


def test_further_lines_are_aligned():
    text = failure_text(failed(Finding(cause="stale", summary="old", repair="one\ntwo")), CAUSES)
    assert "repair     one\n           two\n" in text


def test_a_failure_without_findings_gives_its_reason():
    text = failure_text(failed(reason="xfail(strict): it passed"), CAUSES)
    assert text.splitlines()[0] == "xfail(strict): it passed"
    assert failure_text(failed(), CAUSES).splitlines()[0] == "step_order failed"


def test_an_error_is_the_users_traceback_under_one_sentence():
    error = UserError(stage="building the loop", summary="KeyError: 'x'", traceback="  File a.py\n")
    result = Result(check="step_order", outcome="error", error=error)
    assert failure_text(result, CAUSES) == "building the loop raised KeyError: 'x'\n\n  File a.py"


def test_an_error_without_an_exception_is_its_reason():
    assert failure_text(Result(check="step_order", outcome="error", reason="no loop"), CAUSES) == "no loop"
    assert failure_text(Result(check="step_order", outcome="error"), CAUSES) == "step_order met an error"
