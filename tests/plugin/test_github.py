"""In a job of GitHub Actions: annotations at the user's lines and the summary of the job; the SARIF file."""

from __future__ import annotations

import json

import pytest

ALONE = ("-p", "no:pytest_github_actions_annotate_failures")

TRAIN = "def train():\n    for batch in ():\n        loss.backward()\n        optimizer.step()\n"

LOOPS = """
    import pytest
    from conftest import *

    @pytest.mark.trainloop
    @pytest.mark.parametrize("depth", [2, 4])
    def test_root(depth):
        at = {"change": "train.py:3   loss.backward()", "where": "train.py:4   optimizer.step()"}
        return {
            "step_order": fault("step_order", "stale", "old gradients, 100 % of them", explains=("overfit",), **at),
            "accumulation": fault("accumulation", "not_divided", "too large", level="advice"),
            "overfit": fault("overfit", "stuck", "it learns nothing"),
        }

    @pytest.mark.trainloop(only=["step_order"], xfail={"step_order": "ticket 1"})
    def test_known(): return {"step_order": fault("step_order", "lost")}

    @pytest.mark.trainloop(onyl=["step_order"])
    def test_slip(): ...

    def test_plain(): assert 0
"""

SUMMARY = "## Training loops: 1 fault and 1 error; 2 of 3 loops fail\n"


@pytest.fixture
def summary(pytester, monkeypatch):
    """The file for the summary of a job, in which another tool has written."""
    file = pytester.path / "summary" / "step.md"
    file.parent.mkdir()
    file.write_text("# of another tool\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    (pytester.path / ".git").mkdir()
    pytester.makepyfile(train=TRAIN, test_a=LOOPS)
    return file


def commands(result: pytest.RunResult) -> list[str]:
    return [line for line in result.errlines if line.startswith("::")]


def test_a_fault_is_annotated_once_at_its_line(summary, run):
    slip, fault, advice = commands(run("--trainloop", *ALONE))
    assert slip.startswith("::error file=test_a.py,line=18,title=loop not judged::test_a.py::test_slip: the trainloop ")
    assert fault.startswith("::error file=train.py,line=3,title=step_order%3Astale::old gradients, 100 %25 of them%0A")
    assert fault.endswith("%0Aalso fails for it: overfit%0Aloops: test_a.py::test_root[2], test_a.py::test_root[4]")
    assert advice.startswith("::warning file=test_a.py,line=6,title=accumulation%3Anot_divided::too large%0A")


def test_the_summary_of_the_job_stands_behind_that_of_other_tools(summary, run):
    run("--trainloop", *ALONE)
    text = summary.read_text(encoding="utf-8")
    assert text.startswith(f"# of another tool\n{SUMMARY}")
    assert "**old gradients, 100 % of them** (`step_order:stale`)" in text


def test_nothing_checked_is_the_headline(summary, run):
    told = commands(run("--trainloop", *ALONE, "-k", "test_plain"))
    assert told == ["::warning title=NOTHING WAS CHECKED::the tests failed before any check ran"]
    head = "## Training loops: nothing was checked\n\nthe tests failed before any check ran\n"
    assert head in summary.read_text(encoding="utf-8")


def test_without_the_flag_or_outside_of_a_job_nothing_is_told(summary, run, monkeypatch):
    assert commands(run(*ALONE)) == []
    assert commands(run("--trainloop", "--collect-only", *ALONE)) == []
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
    assert len(commands(run("--trainloop", *ALONE))) == 3
    monkeypatch.setenv("GITHUB_ACTIONS", "")
    assert commands(run("--trainloop", *ALONE)) == []
    assert summary.read_text(encoding="utf-8") == "# of another tool\n"


def test_a_summary_that_cannot_be_written_is_told_and_fails_nothing(summary, run, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary.parent))
    result = run("--trainloop", *ALONE, "-k", "test_known")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["trainloop: the summary of the job was not written: *Is a directory*"])


def test_the_plugin_that_annotates_failed_tests_is_given_the_line(summary, run):
    pytest.importorskip("pytest_github_actions_annotate_failures")
    result = run("--trainloop")
    told = commands(result)
    errors = [line for line in told if line.startswith("::error")]
    assert len(errors) == 6  # a failed test each
    assert [line.partition("::test_root[")[0] for line in errors if "step_order]" in line] == [
        "::error file=train.py,line=3",
        "::error file=train.py,line=3",
    ]
    assert "%0A%0Aold gradients, 100 %25 of them%0Acause      stale: " in errors[0]
    assert [line[:9] for line in told if line not in errors] == ["::warning"]
    assert commands(run("--trainloop", "-p", "no:pytest_github_actions_annotate_failures")) != told


def failures(result: pytest.RunResult) -> list[str]:
    start, end = (next(i for i, line in enumerate(result.outlines) if mark in line) for mark in ("= FAIL", "= trainl"))
    return [line for line in result.outlines[start:end] if " generated xml file" not in line]


def test_what_else_reads_a_failure_reads_it_as_ever(summary, run, pytester):
    pytest.importorskip("pytest_github_actions_annotate_failures")
    with_it = run("--trainloop", "--junit-xml=a.xml", "-k", "test_root")
    without = run("--trainloop", "--junit-xml=b.xml", *ALONE, "-k", "test_root")
    assert failures(with_it) == failures(without)
    xml = [(pytester.path / name).read_text("utf-8") for name in ("a.xml", "b.xml")]
    first, second = (text[text.index("<failure") : text.index("</failure>")] for text in xml)
    assert first == second


def test_sarif_has_one_result_a_fault(summary, run, pytester):
    run("--trainloop", "--trainloop-sarif=out/r.sarif", "--trainloop-json=out/r.json")
    log = json.loads((pytester.path / "out" / "r.sarif").read_text(encoding="utf-8"))  # valid: tests/conftest.py
    results = log["runs"][0]["results"]
    assert [(r["ruleId"], r["level"], r["occurrenceCount"], "suppressions" in r) for r in results] == [
        ("step_order:stale", "error", 2, False),
        ("step_order:lost", "error", 1, True),
        ("accumulation:not_divided", "warning", 2, False),
    ]
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"


def test_a_session_that_checked_nothing_writes_no_sarif(summary, run, pytester):
    result = run("--trainloop", "--trainloop-sarif=r.sarif", "-k", "test_slip")
    result.stdout.fnmatch_lines(
        ["trainloop: --trainloop-sarif was not written: nothing was checked, and an empty file would close *"]
    )
    assert not (pytester.path / "r.sarif").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--trainloop-sarif=r.sarif"], "--trainloop-sarif tells of loops that are run: it is needed with --trainloop"),
        (["--trainloop", "--trainloop-sarif=."], "--trainloop-sarif is '.', a folder; a file to write is needed"),
        (
            ["--trainloop", "--trainloop-json=train.py/r.json"],
            "--trainloop-json is 'train.py/r.json', inside of train.py, which is a file; a folder is needed there",
        ),
    ],
)
def test_where_nothing_can_be_written_no_loop_runs(summary, run, log, options, sentence):
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    assert log("check") == []


def test_a_file_that_could_not_be_written_is_told_and_fails_the_session(summary, run, monkeypatch):
    from pytest_trainloop.core.report import files

    def full(*given):
        raise OSError("no space left")

    monkeypatch.setattr(files, "write", full)
    result = run("--trainloop", "--trainloop-json=r.json", "-k", "test_known")
    result.stdout.fnmatch_lines(["trainloop: --trainloop-json was not written: no space left (*r.json)"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_pytest_called_in_a_subfolder_names_files_from_the_root_of_the_repository(summary, pytester, run):
    (pytester.path / "ml").mkdir()
    for name in ("train.py", "test_a.py", "conftest.py"):
        (pytester.path / name).rename(pytester.path / "ml" / name)
    pytester.makeini("[pytest]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pytester.path / "ml")
        told = commands(run("--trainloop", *ALONE))
    assert told[1].startswith("::error file=ml/train.py,line=3,")
    assert told[0].startswith("::error file=ml/test_a.py,line=18,")


@pytest.mark.processes
def test_under_xdist_the_controller_tells_it_once(summary, session, pytester):
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_github_actions_annotate_failures")
    result = session.runpytest_subprocess("--trainloop", "-n2", "--trainloop-sarif=r.sarif", "-p", "no:randomly")
    told = commands(result)
    assert sum(line.startswith("::error file=train.py,line=3::") for line in told) == 2  # by the other plugin
    assert sum(line.startswith("::warning") for line in told) == 1
    assert summary.read_text(encoding="utf-8").count("## Training loops: ") == 1
    assert len(json.loads((pytester.path / "r.sarif").read_text(encoding="utf-8"))["runs"][0]["results"]) == 3
