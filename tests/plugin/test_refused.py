"""What would pass unchecked is refused at collection, in one clean sentence: an item that fails stands for it."""

from __future__ import annotations

import pytest

HEAD = """
import unittest
import pytest
from hypothesis import given, strategies as st

"""

OF_A_TESTCASE = (
    "test_a.py: the trainloop marker is on {} of a unittest.TestCase; it needs a function, or a method of a plain class"
)
NO_PLAIN_FUNCTION = (
    "test_a.py::test_gpt is marked trainloop and is {}; a plain function is needed that returns a TrainLoop"
)
ON_FUNCTIONS = "the trainloop marker is on a {}; put it on each function that returns a TrainLoop"
VARIED = (
    "test_a.py::test_gpt: parametrize gives values to '{0}', the loop's knob '{1}', which the checks vary; take '{0}' "
    "out of parametrize, or drop its default to have a plain parameter"
)

REFUSED = {
    "testcase": (
        "class TestOld(unittest.TestCase):\n    @pytest.mark.trainloop\n    def test_gpt(self): ...",
        OF_A_TESTCASE.format("TestOld.test_gpt"),
    ),
    "testcase-class": (
        "@pytest.mark.trainloop\nclass TestOld(unittest.TestCase):\n    def test_gpt(self): ...",
        OF_A_TESTCASE.format("TestOld"),
    ),
    "testcase-module": (
        "pytestmark = pytest.mark.trainloop\nclass TestOld(unittest.TestCase):\n    def test_gpt(self): ...",
        OF_A_TESTCASE.format("TestOld"),
    ),
    "testcase-mixin": (
        "class Mixin:\n    @pytest.mark.trainloop\n    def test_gpt(self): ...\n"
        "class TestOld(Mixin, unittest.TestCase): ...",
        OF_A_TESTCASE.format("TestOld.test_gpt"),
    ),
    "coroutine": (
        "@pytest.mark.trainloop\nasync def test_gpt(): ...",
        NO_PLAIN_FUNCTION.format("a coroutine function"),
    ),
    "async-generator": (
        "@pytest.mark.trainloop\nasync def test_gpt(): yield",
        NO_PLAIN_FUNCTION.format("an async generator"),
    ),
    "given-inside": (
        "@pytest.mark.trainloop\n@given(st.integers())\ndef test_gpt(n): ...",
        NO_PLAIN_FUNCTION.format("wrapped in hypothesis.given"),
    ),
    "given-outside": (
        "@given(st.integers())\n@pytest.mark.trainloop\ndef test_gpt(n): ...",
        NO_PLAIN_FUNCTION.format("wrapped in hypothesis.given"),
    ),
    "class": (
        "@pytest.mark.trainloop\nclass TestLoops:\n    def test_gpt(self): ...",
        f"test_a.py::TestLoops: {ON_FUNCTIONS.format('class')}",
    ),
    "module": (
        "pytestmark = [pytest.mark.trainloop]\ndef test_gpt(): ...",
        f"test_a.py: {ON_FUNCTIONS.format('module')}",
    ),
    "knob": (
        "@pytest.mark.trainloop\n@pytest.mark.parametrize(('n', 'accumulate'), [(1, 2)])\n"
        "def test_gpt(n, accumulate=1): ...",
        VARIED.format("accumulate", "accumulate"),
    ),
    "mapped-knob": (
        "@pytest.mark.trainloop(knobs={'use_ckpt': 'checkpoint'})\n"
        "@pytest.mark.parametrize(argnames='n, use_ckpt', argvalues=[(1, True)])\n"
        "def test_gpt(n, use_ckpt=False): ...",
        VARIED.format("use_ckpt", "checkpoint"),
    ),
}


@pytest.mark.parametrize("flag", [["--trainloop"], []], ids=["flag", "no-flag"])
@pytest.mark.parametrize(("source", "sentence"), REFUSED.values(), ids=list(REFUSED))
def test_refused_in_one_sentence(pytester, run, source, sentence, flag):
    pytester.makepyfile(test_a=HEAD + source)
    result = run(*flag)
    result.assert_outcomes(failed=1)
    at = next(i for i, line in enumerate(result.outlines) if line.startswith("____"))
    assert result.outlines[at + 1] == sentence
    assert result.outlines[at + 2].startswith("=")


def test_all_other_tests_run_and_one_sentence_is_said_once(pytester, run):
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.mark.trainloop(skip={"step_ordr": "is meant"})
        def test_slip(): return {}

        @pytest.mark.trainloop
        class TestLoops:
            def test_one(self): ...
            def test_two(self): ...

        @pytest.mark.trainloop(only=["overfit"])
        def test_right(): return {}

        def test_plain(): ...
        """
    )
    result = run("--trainloop", "-rfs")
    result.assert_outcomes(failed=2, skipped=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "test_a.py::test_slip: the trainloop marker: skip names 'step_ordr', which matches no check; *",
            "test_a.py::TestLoops: the trainloop marker is on a class; *",
            "SKIPPED *(see test_a.py::TestLoops::test_one)",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    only = run("--trainloop", "-k", "slip")
    only.stdout.fnmatch_lines(["trainloop: NOTHING WAS CHECKED: every marked function was refused"])


def test_a_plain_parameter_of_a_knobs_name_may_be_parametrized(pytester, run):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.trainloop(only=["overfit"])
        @pytest.mark.parametrize("accumulate", [1, 2])
        def test_gpt(accumulate): return {}
        """
    )
    run("--trainloop").assert_outcomes(passed=2)


def test_objects_that_answer_every_question_are_left_alone(pytester, run):
    pytester.makepyfile(
        """
        import unittest
        from unittest import mock
        import pytest

        call = mock.call
        TestMock = mock.MagicMock()
        kind = mock.MagicMock(spec=type)

        class Odd:
            def __getattr__(self, name): raise RuntimeError("hands off")

        odd = Odd()

        class TestPlain(unittest.TestCase):
            def test_one(self): ...

        def test_two(): ...
        """
    )
    result = run("--trainloop", "-W", "ignore")
    assert result.parseoutcomes().get("passed", 0) >= 2
    assert "errors" not in result.parseoutcomes()


def test_a_marker_that_came_after_collection_fails_the_item(pytester, run):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.trainloop)])
        def test_gpt(n): return {}
        """
    )
    result = run("--trainloop")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*::test_gpt[[]1[]] got its trainloop marker after collection; put it on the function itself"]
    )
