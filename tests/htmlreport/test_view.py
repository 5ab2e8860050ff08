"""What the page shows of a report, before it is a page."""

from __future__ import annotations

from pytest_trainloop.views.htmlreport.view import view
from tests.htmlreport import documents
from tests.htmlreport.documents import FAILING, PASSING, failed, report


def viewed(*folders, **loops):
    return view(report({f"test_train.py::{name}": results for name, results in loops.items()}), folders)


def test_loops_with_failures_come_first_and_what_follows_stands_under_its_cause(source):
    page = viewed(source, test_a=PASSING, test_b=FAILING)
    assert [loop.name for loop in page.loops] == ["test_b", "test_a"]
    assert page.verdict == "1 of 2 training loops fails"
    cause, error = page.loops[0].failures
    assert (cause.check, [block.check for block in cause.follows]) == ("step_order", ["overfit_one_batch"])
    assert error.summary == "evaluate raised ValueError: bad"
    assert cause.rerun == "pytest --trainloop 'test_train.py::test_b[step_order]'"


def test_each_result_has_its_place(source):
    (loop,) = viewed(source, test_b=FAILING).loops
    assert [block.check for block in (*loop.xfailed, *loop.advice, *loop.notes)] == [
        "memory_growth",
        "schedule",
        "finite",
    ]
    assert [row.checks for row in loop.passed] == [("schedule",), ("finite",)]
    assert [(*row.checks, row.detail) for row in loop.undecided] == [
        ("padding_invariance", "no padding is known (needs padding=)"),
        ("determinism", "two identical runs differ"),
    ]
    assert [row.checks for row in loop.elsewhere] == [("causality",)]
    assert loop.marked == 1


def test_a_picture_stands_once_with_the_finding_that_it_shows_best(source):
    (loop,) = viewed(source, test_b=FAILING).loops
    (cause, _), (advice,) = loop.failures, loop.advice
    assert [shown.data["key"] for shown in cause.pictures] == ["one_step"]
    assert [shown.data["key"] for shown in cause.follows[0].pictures] == ["one_batch"]
    assert [shown.data["key"] for shown in advice.pictures] == ["rates"]
    assert [shown.data["key"] for shown in loop.pictures] == ["units", "updates"]


def test_a_fault_of_several_loops_stands_once_in_what_to_repair_and_unmet_expectations_last(source):
    unmet = documents.Result(check="finite", outcome="failed", reason="xfail(strict): finite passed")
    page = viewed(source, test_a=(unmet, failed(documents.NOT_ZEROED)), test_b=(unmet, failed(documents.NOT_ZEROED)))
    assert [(root.block.check, root.repair, len(root.places)) for root in page.roots] == [
        ("step_order", "optimizer.zero_grad() before backward()", 2),
        ("finite", "", 2),
    ]
    assert [place.anchor for place in page.roots[0].places] == [
        block.anchor for loop in page.loops for block in loop.failures if block.cause
    ]


def test_checks_with_one_reason_are_one_row(source):
    sentence = "fit raised ValueError: bad"
    trace = f'  File "{source / "train.py"}", line 5, in train\n    optimizer.step()\n'
    raised = documents.UserError(stage="fit", summary="ValueError: bad", traceback=trace)
    first = documents.Result(check="finite", outcome="error", reason=sentence, error=raised)
    others = [
        documents.Result(check=f"c{i}", outcome="skipped", reason=f"{sentence} (see test_train.py::test_a[finite])")
        for i in range(5)
    ]
    (loop,) = viewed(source, test_a=(first, *others)).loops
    assert [row.checks for row in loop.undecided] == [("c0", "c1", "c2", "c3", "c4")]
    (error,) = loop.failures
    assert error.of_the_loop
    assert error.place == "train.py:5"
    assert [excerpt.file for excerpt in error.excerpts] == ["train.py"]


def test_a_mistake_of_ours_is_shown_with_its_frames_and_no_line_of_the_loop(source):
    frames = f'  File "{source / "train.py"}", line 5, in train\n  File "pytest_trainloop/x.py", line 1'
    stopped = documents.Result(check="finite", outcome="error", reason="finite was stopped", mistake=frames)
    (loop,) = viewed(source, test_a=(stopped,)).loops
    (error,) = loop.failures
    assert (error.summary, error.traceback, error.place) == ("finite was stopped", frames, "")


def test_what_the_checks_hold_is_told_of_those_that_found_something(source):
    told = dict(viewed(source, test_a=PASSING, test_b=FAILING).rules)
    assert list(told) == [
        "step_order",
        "finite",
        "schedule",
        "overfit_one_batch",
        "evaluation_is_pure",
        "memory_growth",
    ]
    assert told["step_order"].startswith("step_order (wiring)")


def test_a_check_that_is_not_there_any_more_is_shown_without_its_texts(source):
    gone = documents.Finding(check="of_the_project", cause="some_cause", summary="it is wrong")
    page = viewed(source, test_a=(failed(gone),))
    assert page.loops[0].failures[0].fields == {"cause": "some_cause"}
    assert page.rules == []


def test_a_session_that_checked_nothing_says_so(source):
    assert view(report({}), (source,)).verdict.startswith("Nothing was checked: no selected test carries")
    skipped = documents.Result(check="step_order", outcome="skipped", reason="by hand")
    page = viewed(source, test_a=(skipped,))
    assert (page.verdict, page.status) == ("Nothing was checked: all checks were skipped: 1 x by hand", "nothing")


def test_loops_whose_names_look_alike_have_places_of_their_own(source):
    page = viewed(source, **{"test_a[x/y]": PASSING, "test_a[x-y]": PASSING, "test_a[x y]": PASSING})
    assert len({loop.anchor for loop in page.loops}) == 3


def test_a_loop_without_card_and_pictures(source):
    (loop,) = view(report({"test_a": PASSING}, card=None, pictures=()), (source,)).loops
    assert (loop.card, loop.pictures, loop.name, loop.file) == ((), [], "test_a", "test_a")
