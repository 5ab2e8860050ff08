"""``--trainloop-report``: the page that a session writes, and what is refused before any loop runs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pytest_trainloop.views import htmlreport
from pytest_trainloop.views.htmlreport.__main__ import main
from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401
from tests.htmlreport import documents

pytest.importorskip("pytest_trainloop.views.htmlreport.drawing")  # a session forgets what it imports itself

LOOPS = (
    HEAD
    + """
    def forgets(model, optimizer, batches):
        for batch in batches:
            mse(model, batch).backward()
            optimizer.step()

    @pytest.mark.trainloop(only=["step_order"])
    def test_wrong(): return loop(forgets)

    @pytest.mark.trainloop(only=["step_order"])
    def test_right(): return loop()
"""
)


@pytest.fixture
def checks(pytester):
    pytester.makepyfile(test_a=LOOPS)
    return lambda *options: pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", *options)


def test_the_page_has_failure_source_card_and_pictures(checks, pytester):
    result = checks("--trainloop", "--trainloop-report=out/report.html", "--trainloop-json=report.json")
    result.assert_outcomes(passed=1, failed=1)  # a check of each loop, and two cards
    file = pytester.path / "out" / "report.html"
    assert result.outlines.count(f"trainloop: report: {file.as_uri()}") == 1
    result.stdout.no_fnmatch_line("*card of*")
    page = file.read_text(encoding="utf-8")
    assert "<title>1 of 2 training loops fails" in page
    assert '<span class="at">change</span>' in page
    assert "Loop card" in page
    assert page.count("<svg") > 2
    assert main([str(pytester.path / "report.json"), "--source", str(pytester.path)]) == 0
    assert (pytester.path / "report.html").read_text(encoding="utf-8") == page


def test_what_it_needs_is_said_before_any_loop_runs(session, run, log, monkeypatch):
    session.makepyfile("import pytest\nfrom conftest import *\n@pytest.mark.trainloop\ndef test_it(): return {}")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "jinja2" else find(name, *a))
    result = run("--trainloop", "--trainloop-report=report.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --trainloop-report needs jinja2: pip install 'pytest-trainloop[[]report[]]'"])
    assert log("check") == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--trainloop-report=r.html"], "--trainloop-report shows loops that are run: it is needed with --trainloop"),
        (["--trainloop", "--trainloop-report=."], "--trainloop-report is '.', a folder; a file to write is needed"),
    ],
)
def test_options_that_cannot_be_right(run, options, sentence):
    result = run(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])


def test_a_page_that_cannot_be_made_costs_nothing_else(session, run, monkeypatch):
    def broken(document, *, folders):
        raise KeyError("loops")

    monkeypatch.setattr(htmlreport, "page", broken)
    session.makepyfile("def test_plain(): pass")
    result = run("--trainloop", "--trainloop-report=report.html", "--trainloop-json=report.json")
    result.stdout.fnmatch_lines(["trainloop: --trainloop-report was not written; KeyError: 'loops'; please report it"])
    result.assert_outcomes(passed=1)
    assert json.loads((session.path / "report.json").read_text(encoding="utf-8"))["loops"] == []


def test_a_session_without_loops_has_a_page_that_says_so(session, run):
    session.makepyfile("def test_plain(): pass")
    run("--trainloop", "--trainloop-report=report.html")
    page = (session.path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Nothing was checked: no selected test carries @pytest.mark.trainloop or trainloop_loss</h1>" in page


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (None, "no such file or directory"),
        ("{", "holds no json: "),
        ("[]", "is no report: give the file that --trainloop-json wrote"),
        ('{"version": 9, "loops": []}', "is a report of version 9; this pytest-trainloop reads version 1"),
        ('{"version": 1, "loops": []}', "is no whole report, it lacks 'environment': give the file that"),
        ('{"version": 1, "environment": {}, "loops": [{}]}', "is no whole report, environment lacks 'python': give"),
    ],
)
def test_the_command_refuses_what_is_no_report(tmp_path, capsys, held, sentence):
    file = tmp_path / "report.json"
    if held is not None:
        file.write_text(held, encoding="utf-8")
    assert main([str(file)]) == 2
    assert sentence in capsys.readouterr().err.lower()
    assert list(tmp_path.glob("*.html")) == []


def test_the_command_does_not_write_over_the_report(tmp_path, capsys):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(documents.report({})), encoding="utf-8")
    assert main([str(file), "-o", str(file)]) == 2
    assert capsys.readouterr().err == f"{file} is the report itself\n"
    assert main([str(file), "-o", str(tmp_path)]) == 2
    assert "a folder; a file to write is needed" in capsys.readouterr().err
