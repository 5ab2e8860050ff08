"""What the command gives to others than its terminal: files, and the runner of GitHub Actions."""

from __future__ import annotations

import json

import pytest

from tests.helpers import reports
from tests.script_runner.conftest import HEAD, TRAIN
from tests.script_runner.test_command import FAULTY

LINE = next(n for n, line in enumerate((HEAD + FAULTY).splitlines(), 1) if "SGD(model[0]" in line)


def test_the_files_of_a_session_of_pytest_are_those_of_the_command(watch, folder):
    said = watch(FAULTY, "--trainloop-json=out/a.json", "--trainloop-sarif=out/a.sarif")
    assert said.status == 1
    reports.assert_valid(folder)
    (loop,) = json.loads((folder / "out/a.json").read_text(encoding="utf-8"))["loops"]
    assert (loop["nodeid"], loop["at"]) == ("train.py", "train.py:1")
    (result,) = json.loads((folder / "out/a.sarif").read_text(encoding="utf-8"))["runs"][0]["results"]
    assert result["ruleId"] == "optimizer_holds_every_param:not_in_optimizer"
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", LINE)


def test_the_page_shows_the_script_and_its_line(watch, folder):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    said = watch(FAULTY, "--trainloop-report=page.html")
    assert f"report: {(folder / 'page.html').as_uri()}" in said.out
    text = (folder / "page.html").read_text(encoding="utf-8")
    assert "train.py" in text
    assert "not_in_optimizer" in text
    assert "model[0].parameters()" in text


def test_a_package_that_the_page_needs_is_named_before_the_script_runs(watch, monkeypatch):
    monkeypatch.setattr("pytest_trainloop.views.htmlreport.PACKAGES", ("no_such_package",))
    said = watch("print('it ran')", "--trainloop-report=page.html")
    assert said.status == 2
    assert "--trainloop-report needs no_such_package: pip install 'pytest-trainloop[report]'" in said.err
    assert "it ran" not in said.out


@pytest.mark.parametrize("option", ["--write-test", "--trainloop-json", "--trainloop-sarif", "--trainloop-report"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_the_script_runs(watch, folder, option):
    (folder / "there.py").mkdir()
    said = watch("print('it ran')", f"{option}=there.py")
    assert said.status == 2
    assert option in said.err
    assert "it ran" not in said.out


@pytest.fixture
def runner(folder, monkeypatch):
    """The file for the job's summary."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    return folder / "summary.md"


def commands(said):
    return [line for line in said.err.splitlines() if line.startswith("::")]


def test_a_fault_is_annotated_at_its_line(watch, runner):
    (told,) = commands(watch(FAULTY))
    title = "optimizer_holds_every_param%3Anot_in_optimizer"
    assert told.startswith(f"::error file=train.py,line={LINE},title={title}::")
    assert told.endswith("loop: train.py")
    assert runner.read_text(encoding="utf-8").startswith("## Training loops: 1 fault; 1 of 1 loop fails\n")


def test_a_correct_script_has_a_summary_and_no_annotation(watch, runner):
    assert commands(watch(TRAIN, "--steps=3")) == []
    assert runner.read_text(encoding="utf-8").startswith("## Training loops: no fault in 1 loop\n")


def test_the_scripts_own_failure_is_annotated_where_it_was_raised(watch, runner):
    said = watch(TRAIN.replace("epochs=20", "epochs=1") + "    raise ValueError('too late')\n")
    (told,) = commands(said)
    last = len((HEAD + TRAIN).splitlines()) + 1
    assert told.startswith(f"::error file=train.py,line={last},title=loop not judged::the script raised ValueError")
    assert said.status == 1


def test_where_nothing_trained_the_runner_is_told(watch, runner):
    said = watch("print('done')")
    assert said.status == 2
    (told,) = commands(said)
    assert told.startswith("::warning title=NOTHING WAS CHECKED::train.py: nothing trained in this process")
    assert "nothing was checked" in runner.read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_is_said(watch, monkeypatch):
    monkeypatch.setattr(
        "pytest_trainloop.core.report.files.write", lambda file, text: (_ for _ in ()).throw(OSError("full"))
    )
    said = watch(TRAIN, "--steps=3", "--trainloop-json=a.json")
    assert said.status == 2
    assert "--trainloop-json was not written: full" in said.out
