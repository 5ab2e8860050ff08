"""One check is one item: its id, its selection, its fixtures, and the subject that it shares with its loop."""

from __future__ import annotations

import pytest

LOOP = """
    import pytest
    from conftest import *
    from conftest import _check

    @pytest.mark.trainloop
    def test_gpt(accumulate=1):
        return {"accumulation": fault("accumulation", "not_divided")}
"""


def ids(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_each_check_is_an_item_in_causal_order(pytester, run):
    pytester.makepyfile(test_a=LOOP)
    result = run("--trainloop", "--collect-only", "-q")
    assert ids(result) == [
        "test_a.py::test_gpt[step_order]",
        "test_a.py::test_gpt[accumulation]",
        "test_a.py::test_gpt[overfit]",
    ]
    result.stdout.no_fnmatch_line("*NOTHING WAS CHECKED*")


@pytest.mark.parametrize("options", [[], ["--strict-markers"], ["-p", "no:xdist"]])
def test_outcomes_reach_pytest(pytester, run, options):
    pytester.makepyfile(test_a=LOOP)
    run("--trainloop", *options).assert_outcomes(passed=2, failed=1)


def test_without_the_flag_there_is_one_skipped_item_and_the_function_is_not_called(pytester, run, log):
    pytester.makepyfile(
        test_a=LOOP
        + """
    @pytest.fixture
    def costly(): raise AssertionError("set up in vain")

    @pytest.mark.trainloop
    def test_other(costly): raise AssertionError("called in vain")
    """
    )
    result = run("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED * test_a.py:*: needs --trainloop"])
    result.stdout.no_fnmatch_line("*= trainloop =*")
    assert log("subject") == []


def test_parametrize_multiplies_and_comes_first_in_the_id(pytester, run, log):
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.mark.trainloop(only=["overfit"])
        @pytest.mark.parametrize("depth", [2, 3])
        @pytest.mark.parametrize("name", ["a-b", "c[d]"])
        def test_gpt(name, depth): return {}
        """
    )
    result = run("--trainloop", "--collect-only", "-q")
    expected = {f"test_a.py::test_gpt[{n}-{d}-overfit]" for d in (2, 3) for n in ("a-b", "c[d]")}
    assert set(ids(result)) == expected
    run("--trainloop").assert_outcomes(passed=4)
    assert {line.split(" {")[0] for line in log("subject")} == {i.replace("-overfit]", "]") for i in expected}


def test_the_check_comes_last_when_a_conftest_parametrizes_too(pytester, run):
    pytester.makepyfile(
        test_a="""
        import pytest

        def pytest_generate_tests(metafunc):
            metafunc.parametrize("width", [8])

        @pytest.mark.trainloop(only=["overfit"])
        def test_gpt(width): return {}
        """
    )
    assert ids(run("--trainloop", "--collect-only", "-q")) == ["test_a.py::test_gpt[8-overfit]"]


def test_fixtures_are_set_up_for_each_item_and_bound_anew(pytester, run):
    pytester.makepyfile(
        test_a="""
        import pytest

        seen = []

        @pytest.fixture
        def number():
            seen.append(len(seen))
            yield seen[-1]
            seen.append("torn down")

        @pytest.mark.trainloop
        def test_gpt(number, tmp_path, request):
            assert tmp_path.is_dir() and request.node.name.startswith("test_gpt[")
            assert number == seen[-1]
            return {}

        def test_after(): assert seen == [0, "torn down", 2, "torn down", 4, "torn down"]
        """
    )
    run("--trainloop").assert_outcomes(passed=4)


def test_methods_of_plain_classes(pytester, run):
    pytester.makepyfile(
        test_a="""
        import pytest
        from conftest import *

        class TestLoops:
            def setup_method(self): self.ready = True

            @pytest.fixture
            def size(self): return 3

            @pytest.mark.trainloop
            def test_gpt(self, size, device="cpu"):
                assert self.ready and size == 3
                return {"overfit": fault("overfit", "stuck")}

            @staticmethod
            @pytest.mark.trainloop
            def test_static(size): return {}
        """
    )
    result = run("--trainloop", "-v")
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["test_a.py::TestLoops::test_gpt[[]overfit] FAILED*"])


def test_decorated_by_mock_patch(pytester, run):
    pytester.makepyfile(
        test_a="""
        import os
        import pytest
        from unittest import mock

        call = mock.call

        @pytest.mark.trainloop
        @mock.patch.dict(os.environ, {"X": "1"})
        @mock.patch("os.getcwd")
        def test_gpt(getcwd, tmp_path):
            assert isinstance(getcwd, mock.Mock) and os.environ["X"] == "1" and tmp_path.is_dir()
            return {}
        """
    )
    run("--trainloop").assert_outcomes(passed=3)


def test_select_by_name_by_id_and_by_the_markers_name(pytester, run):
    pytester.makepyfile(test_a=LOOP)
    run("--trainloop", "-k", "overfit or step").assert_outcomes(passed=2, deselected=1)
    run("--trainloop", "test_a.py::test_gpt[overfit]").assert_outcomes(passed=1)
    run("--trainloop", "--deselect", "test_a.py::test_gpt[accumulation]").assert_outcomes(passed=2, deselected=1)
    run("-m", "not trainloop").assert_outcomes(deselected=1)


def test_stop_at_the_first_and_run_the_last_failed_again(pytester, run):
    pytester.makepyfile(test_a=LOOP)
    run("--trainloop", "-x").assert_outcomes(passed=1, failed=1)
    run("--trainloop", "--lf").assert_outcomes(failed=1)


def test_random_order_makes_each_subject_once(pytester, log):
    pytester.makepyfile(test_a=LOOP, test_b=LOOP)
    result = pytester.runpytest("--trainloop", "-p", "randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, failed=2)
    assert len(log("subject")) == 2


def test_one_subject_per_loop_let_go_after_its_last_item(pytester, run, log):
    pytester.makepyfile(
        test_a=LOOP
        + """
    def test_between():
        import gc, os, pathlib
        gc.collect()
        assert "gone test_a.py::test_gpt" in pathlib.Path(os.environ["FAKE_LOG"]).read_text()
    """
    )
    run("--trainloop").assert_outcomes(passed=3, failed=1)
    assert log("subject") == ["test_a.py::test_gpt {'accumulate': 'accumulate'} 0 120.0 auto"]
    assert log("gone") == ["test_a.py::test_gpt"]
    assert [line.split()[1] for line in log("check")] == ["step_order", "accumulation", "overfit"]
    assert all(" test_a.py::test_gpt[" in line for line in log("check")), "the reporter is the item"


def test_a_subject_is_let_go_when_its_last_items_are_skipped(pytester, run, log):
    pytester.makepyfile(test_a=LOOP.replace("trainloop\n", "trainloop(skip={'overfit': 'later'})\n"))
    run("--trainloop").assert_outcomes(passed=1, failed=1, skipped=1)
    assert log("gone") == ["test_a.py::test_gpt"]


def test_a_check_of_the_projects_own_is_an_item(pytester, run):
    pytester.makepyfile(
        test_a=LOOP.replace(
            "@pytest", "CHECKS['mine'] = _check('mine', 'project', 'It is mine', bad='it is bad')\n\n    @pytest", 1
        )
    )
    assert ids(run("--trainloop", "--collect-only", "-q"))[-1] == "test_a.py::test_gpt[mine]"


def test_the_marker_list(run):
    run("--markers").stdout.fnmatch_lines(["@pytest.mark.trainloop(*", "@pytest.mark.trainloop_cuda*"])
