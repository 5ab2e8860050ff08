"""xdist and ``--trainloop-isolate``: one process for each loop, one report for all; a process may die."""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.frontends.plugin.nodeids import check_in, loop_of, scopes

pytest.importorskip("xdist")

LOOPS = """
    import pytest
    from conftest import *

    @pytest.mark.trainloop
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_gpt(depth): return {"overfit": fault("overfit", "stuck")}

    @pytest.mark.parametrize("n", ["a-b", "c"])
    def test_plain(n): ...
"""


def workers(log) -> dict[str, set[str]]:
    """The workers that ran checks of each loop."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in log("check"):
        found[line.split()[0]].add(line.split()[-1])
    return found


@pytest.mark.processes
def test_all_items_of_a_loop_run_on_one_worker(pytester, session, log):
    pytester.makepyfile(test_a=LOOPS, test_b=LOOPS)
    result = session.runpytest_subprocess("--trainloop", "-n2", "-v", "--trainloop-json=out.json", "-p", "no:randomly")
    result.assert_outcomes(passed=16, failed=6)
    assert len(log("subject")) == 6
    assert len(workers(log)) == 6
    assert all(len(names) == 1 for names in workers(log).values())
    assert set.union(*workers(log).values()) == {"gw0", "gw1"}
    assert result.outlines.count("test_a.py::test_gpt[1]  1 failed, 2 passed; 0.8 s, 12 optimizer steps") == 1
    assert result.stdout.str().count("= trainloop =") == 1
    data = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))
    assert [loop["nodeid"] for loop in data["loops"]] == [
        f"test_{m}.py::test_gpt[{d}]" for m in "ab" for d in (1, 2, 3)
    ]
    assert [len(loop["checks"]) for loop in data["loops"]] == [3] * 6


@pytest.mark.processes
def test_another_distribution_makes_the_evidence_again_and_differs_in_nothing_else(pytester, session, log):
    pytester.makepyfile(test_a=LOOPS)
    result = session.runpytest_subprocess("--trainloop", "-n2", "--dist=each", "-p", "no:randomly")
    result.assert_outcomes(passed=16, failed=6)
    assert len(log("subject")) == 6
    assert "test_a.py::test_gpt[1]  1 failed, 2 passed; 0.8 s, 12 optimizer steps" in result.outlines


@pytest.mark.processes
def test_usage_errors_stay_clean(pytester, session):
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.trainloop(onyl=1)\ndef test_gpt(): ...",
        test_b="import pytest\n@pytest.mark.trainloop\nasync def test_gpt(): ...",
    )
    result = session.runpytest_subprocess("--trainloop", "-n2")
    text = result.stdout.str()
    assert "test_a.py::test_gpt: the trainloop marker has no keyword 'onyl'; the nearest name is 'only'" in text
    assert "test_b.py::test_gpt is marked trainloop and is a coroutine function" in text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    result = session.runpytest_subprocess("--trainloop", "-n2", "--trainloop-timeout=-1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --trainloop-timeout is -1; a number of seconds above 0 is needed"])


DIES = """
    import os
    import signal
    import pytest
    from conftest import *

    @pytest.fixture(scope="module")
    def file():
        yield
        raise ValueError("as it is closed")

    def test_plain(file): ...

    @pytest.mark.trainloop
    def test_dies(request):
        if "accumulation" in request.node.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"overfit": fault("overfit", "stuck")}

    @pytest.mark.trainloop
    def test_fine(): return {}
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize(("how", "passed"), [("-n1", 6), ("--trainloop-isolate --deselect=test_a.py::test_fine", 3)])
def test_a_process_that_dies_is_one_error_and_all_else_is_run_once(pytester, session, log, how, passed):
    pytester.makepyfile(test_a=DIES, test_b="def test_last(): ...")
    arguments = ("--trainloop", *how.split(), "--trainloop-json=out.json", "-p", "no:randomly")
    result = session.runpytest_subprocess(*arguments, timeout=60)
    result.assert_outcomes(passed=passed, failed=2, errors=1)
    result.stdout.fnmatch_lines(["  error  accumulation: the process died in this check (SIGKILL), *"])
    assert [line.split()[1] for line in log("check") if "test_dies" in line] == ["step_order", "overfit"]
    loop = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))["loops"][0]
    assert loop["at"] == "test_a.py:13"
    assert [check["outcome"] for check in loop["checks"]] == ["passed", "error", "failed"]


@pytest.mark.processes
def test_a_process_of_a_loop_that_cannot_begin_is_told_with_what_it_wrote(pytester, session):
    fake = (pytester.path / "conftest.py").read_text(encoding="utf-8")
    pytester.makeconftest(f"{fake}\nimport sys\nif '-q' in sys.argv: raise RuntimeError('no second process')")
    pytester.makepyfile("import pytest\n@pytest.mark.trainloop\ndef test_gpt(): return {}")
    result = session.runpytest_subprocess("--trainloop", "--trainloop-isolate", "-p", "no:randomly", timeout=60)
    result.assert_outcomes(failed=1, skipped=2)
    error = "  error  step_order: the process of this loop ended before this check (exit code *); *"
    result.stdout.fnmatch_lines(["*RuntimeError: no second process", error])


class Worker:
    """What a scheduler of xdist needs of one."""

    def __init__(self, scheduling, collection):
        self.collection, self.given, self.shutting_down = collection, [], False
        scheduling.add_node(self)
        scheduling.add_node_collection(self, collection)
        scheduling.schedule()

    def send_runtest_some(self, indices):
        self.given += [self.collection[index] for index in indices]

    def shutdown(self):
        self.shutting_down = True


def test_the_items_of_workers_that_died(pytester):
    from xdist.remote import Producer

    from pytest_trainloop.frontends.plugin.xdist import LoopScheduling

    left_out = []
    config, quiet = pytester.parseconfig("--tx=1*popen", "-p", "no:trainloop"), Producer("", enabled=False)
    scheduling = LoopScheduling(config, quiet, lambda nodeid, deaths: left_out.append((nodeid, list(deaths))))
    dies = [f"t::dies[{check}]" for check in list(registry.registered())[:4]]
    items = ["t::a", *dies, "t::b", "t::c"]

    first = Worker(scheduling, items)
    assert first.given == dies
    scheduling.mark_test_complete(first, items.index(dies[0]))
    assert scheduling.remove_node(first) == dies[1]

    second = Worker(scheduling, items)
    assert second.given == ["t::a", "t::b"]  # one alone would not begin
    for done in ("t::a", "t::b", "t::c"):
        scheduling.mark_test_complete(second, items.index(done))
    assert second.given == ["t::a", "t::b", "t::c", *dies[2:]]  # what has run is not given again
    assert scheduling.remove_node(second) == dies[2]
    assert left_out == [(dies[3], [dies[1], dies[2]])]
    assert scheduling.never_run() == []

    third = Worker(scheduling, items)
    assert third.given == []
    assert third.shutting_down


def test_the_loop_of_an_item():
    assert loop_of("a.py::test_x[overfit]", "overfit") == "a.py::test_x"
    assert loop_of("a.py::test_x[2-overfit]", "overfit") == "a.py::test_x[2]"
    assert loop_of("a.py::test_x[c[d]-overfit]", "overfit") == "a.py::test_x[c[d]]"
    assert loop_of("a.py::test_x[2-overfit-1-3]", "overfit") == "a.py::test_x[2-1-3]"
    assert loop_of("a.py::test_x[overfit-1-3]", "overfit") == "a.py::test_x[1-3]"
    assert loop_of("a.py::test_x", "overfit") == "a.py::test_x"
    assert loop_of("a.py::test_x[overfit-cuda]", "overfit") == "a.py::test_x"
    assert loop_of("a.py::test_x[2-overfit-cuda]", "overfit") == "a.py::test_x[2]"


def test_the_check_of_an_item():
    assert check_in("a.py::test_x[2-overfit]") == "overfit"
    assert check_in("a.py::test_x[overfit]") == "overfit"
    assert check_in("a.py::test_x[overfit-cuda]") == "overfit"
    assert check_in("a.py::test_x[2-overfit-cuda]") == "overfit"
    assert check_in("a.py::test_x[over fit]") == ""
    assert check_in("a.py::test_x") == ""


def test_scopes_tell_loops_from_ordinary_tests():
    ids = ["a::t[step]", "a::t[mine]", "a::t[2-step]", "a::u[x-y]", "a::u[x-z]", "a::v", "a::w[mine]"]
    assert scopes(ids, {"step"}) == {
        "a::t[step]": "a::t",
        "a::t[mine]": "a::t",
        "a::t[2-step]": "a::t[2]",
        "a::u[x-y]": "a::u[x-y]",
        "a::u[x-z]": "a::u[x-z]",
        "a::v": "a::v",
        "a::w[mine]": "a::w[mine]",
    }
