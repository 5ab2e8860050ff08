"""The closing section, the JSON file and JUnit XML."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from xml.etree import ElementTree

import pytest

LOOPS = """
    import pytest
    from conftest import *

    @pytest.mark.trainloop
    def test_root():
        return {
            "step_order": fault("step_order", "stale", "old gradients again", explains=("overfit", "finite")),
            "accumulation": fault("accumulation", "not_divided", "too large", level="advice"),
            "overfit": fault("overfit", "stuck", "it learns nothing"),
        }

    @pytest.mark.trainloop(skip={"step_order": "by hand"})
    @pytest.mark.parametrize("depth", [2])
    def test_more(depth):
        drifts = skipped("overfit", "drifts", "unreliable")
        return {"accumulation": skipped("accumulation", "by hand"), "overfit": drifts}

    @pytest.mark.trainloop
    def test_right(): return {}

    @pytest.mark.trainloop(only=["overfit", "step_order"], xfail={"step_order": "ticket 1"})
    def test_wrong(): return {"overfit": raised("overfit"), "step_order": fault("step_order", "lost")}
"""

SECTION = """\
test_a.py::test_root  2 failed, 1 passed, 1 advice; 0.5 s, 8 optimizer steps
  step_order: old gradients again [stale]
    also fails for it: overfit
  advice  accumulation: too large
test_a.py::test_wrong  1 error, 1 xfailed; 0.2 s, 4 optimizer steps
  error  overfit: running fit raised ValueError: bad
  xfailed  step_order: ticket 1
test_a.py::test_more[2]  NOTHING WAS CHECKED, 1 unreliable, 2 skipped; 0.0 s, 0 optimizer steps
test_a.py::test_right  3 passed; 0.8 s, 12 optimizer steps
  skipped  step_order, accumulation: by hand (test_a.py::test_more[2])
  unreliable  overfit: drifts (test_a.py::test_more[2])
4 in all: 2 failed, 1 error, 4 passed, 1 xfailed, 1 advice, 1 unreliable, 2 skipped; 1.5 s, 24 optimizer steps
"""


def section(result: pytest.RunResult) -> str:
    start = next(i for i, line in enumerate(result.outlines) if line.strip("= ") == "trainloop")
    end = next(i for i, line in enumerate(result.outlines) if i > start and line.startswith("==="))
    return "".join(f"{line}\n" for line in result.outlines[start + 1 : end])


def test_the_closing_section(pytester, run):
    pytester.makepyfile(test_a=LOOPS)
    result = run("--trainloop")
    result.assert_outcomes(passed=4, failed=3, skipped=3, xfailed=1)
    assert section(result) == SECTION
    result.stdout.no_fnmatch_line("trainloop: NOTHING*")


def test_the_header_line_comes_only_with_the_flag(pytester, run):
    pytester.makepyfile("def test_plain(): ...")
    run("--trainloop", "--trainloop-seed=5").stdout.fnmatch_lines(
        ["trainloop: seed 5, device auto, at most 120 s a run of fit and 120 s a loop"]
    )
    result = run()
    result.stdout.no_fnmatch_line("trainloop:*")
    result.stdout.no_fnmatch_line("*= trainloop =*")


def test_nothing_checked_without_a_marked_test(pytester, run):
    pytester.makepyfile("def test_plain(): ...")
    result = run("--trainloop", "--color=yes")
    result.assert_outcomes(passed=1)
    line = next(line for line in result.outlines if "NOTHING" in line)
    assert "trainloop: NOTHING WAS CHECKED: no selected test carries @pytest.mark.trainloop or trainloop_loss" in line
    assert "\x1b[1m" in line


def test_nothing_checked_since_all_is_skipped(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        from conftest import *

        @pytest.mark.trainloop(skip={"overfit": "slow"})
        def test_gpt(): return {name: skipped(name, "no fit") for name in CHECKS}
        """
    )
    result = run("--trainloop")
    result.stdout.fnmatch_lines(["trainloop: NOTHING WAS CHECKED: all checks were skipped: 2 x no fit; 1 x slow"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_loop_without_time_for_half_of_its_checks_fails_if_asked(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        from conftest import *
        from dataclasses import replace

        late = replace(skipped("overfit", "over"), looked_at=False)

        @pytest.mark.trainloop
        def test_gpt(): return {name: replace(late, check=name) for name in list(CHECKS)[1:]}
        """
    )
    said = "trainloop: there was no time for more than half of the checks of test_*::test_gpt"
    quiet, strict = run("--trainloop"), run("--trainloop", "--trainloop-strict")
    quiet.stdout.fnmatch_lines(["*MORE THAN HALF WAS NOT LOOKED AT, 1 passed*", said])
    strict.stdout.fnmatch_lines([f"{said}, which fails (--trainloop-strict)"])
    assert (quiet.ret, strict.ret) == (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def test_nothing_checked_after_a_collection_error(pytester, run):
    pytester.makepyfile("import nothing_of_this_name")
    run("--trainloop").stdout.fnmatch_lines(
        ["trainloop: NOTHING WAS CHECKED: the session met errors before any check ran"]
    )


def test_json(pytester, run):
    pytester.makepyfile(test_a=LOOPS)
    run("--trainloop", "--trainloop-json", "out/result.json", "--trainloop-seed=3")
    data = json.loads((pytester.path / "out" / "result.json").read_text(encoding="utf-8"))
    assert list(data) == ["$schema", "version", "environment", "loops"]
    assert data["version"] == 1
    assert data["environment"]["python"] == platform.python_version()
    assert data["environment"]["torch"] == version("torch")
    assert data["environment"]["pytest"] == pytest.__version__
    assert (data["environment"]["device"], data["environment"]["seed"]) == ("auto", 3)
    more, right, root, wrong = data["loops"]
    assert [loop["nodeid"] for loop in (more, right, root, wrong)] == [
        "test_a.py::test_more[2]",
        "test_a.py::test_right",
        "test_a.py::test_root",
        "test_a.py::test_wrong",
    ]
    assert [loop["at"] for loop in (more, right, root, wrong)] == [f"test_a.py:{line}" for line in (12, 18, 4, 21)]
    assert right["steps"] == 12
    assert [set(rates) for rates in right["learning_rates"]] == [{"optimizer", "groups"}]
    assert [len(group["lr"]) for group in right["learning_rates"][0]["groups"]] == [12]
    assert [check["outcome"] for check in more["checks"]] == ["skipped", "skipped", "unreliable"]
    assert [check["outcome"] for check in wrong["checks"]] == ["xfailed", "error"]
    assert more["checks"][0]["nodeid"] == "test_a.py::test_more[2-step_order]"
    assert (more["checks"][0]["check"], more["checks"][0]["reason"]) == ("step_order", "by hand")
    assert wrong["checks"][1]["error"]["summary"] == "ValueError: bad"
    (finding,) = root["checks"][0]["findings"]
    assert finding["cause"] == "stale"
    assert finding["explains"] == ["overfit", "finite"]


def test_json_without_the_flag_holds_no_loops(pytester, run):
    pytester.makepyfile(LOOPS)
    run("--trainloop-json=result.json").assert_outcomes(skipped=4)
    assert json.loads((pytester.path / "result.json").read_text(encoding="utf-8"))["loops"] == []


def test_json_into_a_folder_is_a_usage_error(pytester, run):
    result = run("--trainloop", "--trainloop-json", ".")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --trainloop-json is '.', a folder; a file to write is needed"])


def test_junit_xml_has_each_result_once(pytester, run):
    pytester.makepyfile(test_a=LOOPS)
    run("--trainloop", "--junit-xml=junit.xml")
    cases = ElementTree.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    found = {case.attrib["name"]: [p.attrib for p in case.iter("property")] for case in cases}
    assert len(found) == 11
    assert all([p["name"] for p in properties] == ["trainloop"] for properties in found.values())
    assert json.loads(found["test_root[step_order]"][0]["value"])["findings"][0]["cause"] == "stale"
    assert json.loads(found["test_more[2-step_order]"][0]["value"])["outcome"] == "skipped"


def test_a_rerun_of_an_item_counts_once(pytester, run):
    pytester.makepyfile(test_a=LOOPS)
    pytester.makeconftest(
        (pytester.path / "conftest.py").read_text(encoding="utf-8")
        + "\nfrom _pytest.runner import runtestprotocol\n"
        + "def pytest_runtest_protocol(item, nextitem):\n"
        + "    for _ in range(2):\n"
        + "        reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        + "    for report in reports:\n"
        + "        item.ihook.pytest_runtest_logreport(report=report)\n"
        + "    return True\n"
    )
    result = run("--trainloop", "-k", "test_root")
    assert "2 failed, 1 passed" in section(result)
