"""What pytest shows for each outcome of a check."""

from __future__ import annotations

import pytest

FULL = """\
Finding(check="accumulation", cause="not_divided",
    summary="4 micro-batches give 4.00 times the gradient of the same rows in one batch",
    measured="|g_4| / |g_1| = 4.000, cosine 1.000, all 28 parameters, float64",
    shown_by="the factor is exactly the number of micro-batches for splits into 2, 3 and 4",
    culprits=("train",), where="train.py:57   loss.backward()", change="train.py:56   loss = model(x)",
    smallest="2 examples as [1, 1]",
    repair="loss = model(x) / accumulate", tried="with this change the check passes", explains=("overfit",))"""

FULL_TEXT = """\
4 micro-batches give 4.00 times the gradient of the same rows in one batch
measured   |g_4| / |g_1| = 4.000, cosine 1.000, all 28 parameters, float64
cause      not_divided: the loss is not divided by the number
shown by   the factor is exactly the number of micro-batches for splits into 2, 3 and 4
seen at    train.py:57   loss.backward()
smallest   2 examples as [1, 1]
change     train.py:56   loss = model(x)
repair     loss = model(x) / accumulate
tried      with this change the check passes
more       pytest --trainloop-explain accumulation
"""


def one_check(says: str, decorator: str = "", body: str = "") -> str:
    head = "import pytest\nfrom conftest import *\nfrom pytest_trainloop import UsageError\n"
    marked = f"{decorator}\n@pytest.mark.trainloop(only=['accumulation'])\n"
    return f"{head}\n{marked}def test_gpt():\n    {body}\n    return {says}\n"


def failure(result: pytest.RunResult) -> str:
    """The text between the header of the only failure and the closing section."""
    start = next(i for i, line in enumerate(result.outlines) if line.startswith("____"))
    end = next(i for i, line in enumerate(result.outlines) if i > start and line.startswith("===="))
    return "\n".join(result.outlines[start + 1 : end]) + "\n"


def test_the_text_of_a_failure(pytester, run):
    pytester.makepyfile(test_a=one_check(f"{{'accumulation': failed({FULL})}}"))
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    assert failure(result) == FULL_TEXT
    result.stdout.fnmatch_lines(
        ["FAILED test_a.py::test_gpt[[]accumulation] - 4 micro-batches give 4.00 times the gradient*"]
    )


def test_what_the_loop_printed_is_shown_too(pytester, run):
    pytester.makepyfile(one_check("fault('accumulation', 'not_divided')", body="print('epoch 1')"))
    run("--trainloop").stdout.fnmatch_lines(["more  *", "*Captured stdout call*", "epoch 1"])


def test_the_users_traceback_and_nobody_elses(pytester, run):
    pytester.makepyfile(one_check("raised('accumulation')"))
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    assert failure(result) == 'running fit raised ValueError: bad\n\n  File "train.py", line 3\n    fit()\n'
    result.stdout.fnmatch_lines(["FAILED * - running fit raised ValueError: bad*"])


def test_a_mistake_of_ours_is_one_sentence_and_its_frames_are_shown_on_request(pytester, run):
    pytester.makepyfile(one_check("stopped('accumulation')"))
    result = run("--trainloop", "--trainloop-json=report.json", "--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    assert failure(result).splitlines()[0] == "accumulation was stopped; please report it"
    assert "OUR FRAMES" not in result.stdout.str()
    assert "OUR FRAMES" in (pytester.path / "report.json").read_text()
    assert "OUR FRAMES" in (pytester.path / "junit.xml").read_text()
    assert "OUR FRAMES" in failure(run("--trainloop", "-v"))


def test_a_usage_error_is_one_sentence(pytester, run):
    pytester.makepyfile(one_check("UsageError('test_gpt returned None; a TrainLoop is needed')"))
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    assert failure(result) == "test_gpt returned None; a TrainLoop is needed\n"


def test_a_usage_error_is_reported_once_for_a_loop(pytester, run):
    pytester.makepyfile(test_a=one_check("UsageError('no TrainLoop')").replace("only=['accumulation']", ""))
    result = run("--trainloop")
    result.assert_outcomes(failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "  error  step_order: no TrainLoop",
            "  skipped  accumulation, overfit: no TrainLoop (see test_a.py::test_gpt[[]step_order])",
        ]
    )


@pytest.mark.parametrize(
    ("outcome", "reason"), [("skipped", "TrainLoop.fit is None"), ("unreliable", "unreliable: TrainLoop.fit is None")]
)
def test_a_skip_stands_at_the_users_line(pytester, run, outcome, reason):
    pytester.makepyfile(test_a=one_check(f"skipped('accumulation', outcome='{outcome}')"))
    result = run("--trainloop", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        [f"  {outcome}  accumulation: TrainLoop.fit is None", f"SKIPPED [[]1] test_a.py:6: {reason}"]
    )
    result.stdout.no_fnmatch_line("*outcome.py*")


@pytest.mark.parametrize(
    ("marker", "says", "outcome", "line"),
    [
        ("xfail(reason='known')", "fault('accumulation', 'not_divided')", "xfailed", "  xfailed  accumulation: known"),
        ("xfail(reason='known', strict=True)", "{}", "failed", "  accumulation: [[]XPASS(strict)[]] known"),
        ("xfail(run=False, reason='hangs')", "{}", "xfailed", "  xfailed  accumulation: *hangs"),
        ("skipif(True, reason='not today')", "{}", "skipped", "  skipped  accumulation: not today"),
    ],
)
def test_pytests_own_markers_hold(pytester, run, marker, says, outcome, line):
    pytester.makepyfile(one_check(says, f"@pytest.mark.{marker}"))
    result = run("--trainloop")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines([line])


def test_a_fixture_that_skips_and_one_that_fails(pytester, run):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def skips(): pytest.skip("no data here")

        @pytest.fixture
        def fails(): raise OSError("disk")

        @pytest.mark.trainloop(only=["overfit"])
        def test_one(skips): ...

        @pytest.mark.trainloop(only=["overfit"])
        def test_two(fails): ...
        """
    )
    result = run("--trainloop")
    result.assert_outcomes(skipped=1, errors=1)
    result.stdout.fnmatch_lines(["  error  overfit: setup failed: *OSError", "  skipped  overfit: no data here*"])


def test_a_fault_of_our_own_keeps_its_traceback(pytester, run):
    pytester.makepyfile(one_check("{'accumulation': ZeroDivisionError('ours')}"))
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * ZeroDivisionError: ours", "  error  accumulation: ZeroDivisionError: ours"])


def test_keyboard_interrupt_passes(pytester, run):
    pytester.makepyfile(one_check("{'accumulation': KeyboardInterrupt()}"))
    result = pytester.inline_run("--trainloop", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED


DEBUGGER = """
import pdb

class Debugger(pdb.Pdb):
    def interaction(self, frame, traceback):
        stack, at = self.get_stack(frame, traceback)
        frame, line = stack[at]
        print("opened in", frame.f_code.co_name, frame.f_code.co_filename, line, frame.f_locals["result"].check)
"""


@pytest.mark.parametrize("says", [f"{{'accumulation': failed({FULL})}}", "raised('accumulation')"])
def test_the_debugger_opens_in_the_users_function(pytester, run, says):
    pytester.makepyfile(test_a=one_check(says), debugger=DEBUGGER)
    pytester.syspathinsert()
    result = run("--trainloop", "--pdb", "--pdbcls=debugger:Debugger", "-s")
    result.stdout.fnmatch_lines(["*opened in test_gpt *test_a.py 6 accumulation"])
