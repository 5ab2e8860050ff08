"""``--trainloop-bundle``: a folder for each root cause, and the script in it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from pytest_trainloop.core.finding import Finding, Result
from pytest_trainloop.frontends.plugin import reproduce as reproducing
from pytest_trainloop.frontends.plugin.bundle import kept
from pytest_trainloop.frontends.plugin.reproduce import main as reproduce_main
from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401

LOOPS = """
    import pytest
    from conftest import *

    @pytest.mark.trainloop
    @pytest.mark.parametrize("depth", ["a b", 2])
    def test_gpt(depth, where):
        return {"overfit": fault("overfit", "stuck"), "step_order": fault("step_order", "stale", explains=("overfit",))}

    class TestNet:
        @pytest.mark.trainloop
        def test_in_a_class(self): return {"accumulation": raised("accumulation")}

    @pytest.mark.trainloop
    def test_fine(): return {"step_order": fault("step_order", "lost", level="advice")}
"""

FIXTURE = """
import pytest

@pytest.fixture
def where(request): return request.config.getoption("--where")

def pytest_addoption(parser): parser.addoption("--where", default="nowhere")
"""

GPT = "bundle/test_a.test_gpt-a_b/step_order.stale"


def failed(cause: str) -> Result:
    fault = Finding(check="step_order", cause=cause, summary="it is wrong")
    return Result(check="step_order", outcome="failed", findings=(fault,))


@pytest.fixture
def project(session: pytest.Pytester) -> pytest.Pytester:
    """A project whose tests lie in a folder of their own, with an option that its conftest declares."""
    (session.path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\n", encoding="utf-8")
    fake = session.path / "conftest.py"
    fake.write_text(fake.read_text(encoding="utf-8") + FIXTURE, encoding="utf-8")
    tests = session.mkdir("suite")
    session.makepyfile(**{"suite/test_a": LOOPS})
    assert (tests / "test_a.py").is_file()
    return session


def write(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    return project.runpytest("-p", "no:randomly", "--trainloop", "--trainloop-bundle=bundle", *options)


def reproduce(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a bundle, from its own folder."""
    command = [sys.executable, "reproduce.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_each_root_cause_has_its_folder(project):
    result = write(
        project, "--where", "here", "--trainloop-seed", "7", "-k", "gpt or class or fine", "-x", "--maxfail=9"
    )
    folders = sorted(p.parent.relative_to(project.path).as_posix() for p in project.path.rglob("reproduce.py"))
    assert folders == [
        "bundle/test_a.TestNet.test_in_a_class/accumulation.error",
        "bundle/test_a.test_gpt-2/step_order.stale",
        GPT,
    ]
    result.stdout.fnmatch_lines(
        ["trainloop: to see a failure again: python bundle/*/accumulation.error/reproduce.py, and 2 more there"]
    )
    folder = project.path / GPT
    assert sorted(p.name for p in folder.iterdir()) == [
        "environment.json",
        "finding.json",
        "finding.txt",
        "reproduce.py",
    ]
    finding = json.loads((folder / "finding.json").read_text(encoding="utf-8"))
    assert finding["nodeid"] == "suite/test_a.py::test_gpt[a b-step_order]"
    assert [found["cause"] for found in finding["findings"]] == ["stale"]
    assert "stale: a gradient is consumed twice" in (folder / "finding.txt").read_text(encoding="utf-8")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    assert environment["seed"] == 7
    assert environment["packages"]["pytest"] == pytest.__version__
    script = (folder / "reproduce.py").read_text(encoding="utf-8")
    assert "'--where', 'here'" in script
    assert "'--trainloop-seed=7'" in script
    assert "--maxfail" not in script


def test_nothing_is_written_where_nothing_fails_or_only_a_known_fault(project):
    assert "see a failure again" not in write(project, "-k", "fine").stdout.str()
    assert not (project.path / "bundle").exists()


def test_without_loops_there_is_no_failure_to_keep(project):
    result = project.runpytest("--trainloop-bundle=bundle")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --trainloop-bundle keeps failures of loops that are run: it is needed with *"])


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["-h"], 0), (["--hlep"], 2), (["a", "b"], 2)])
def test_the_script_says_how_it_is_called(monkeypatch, capsys, words, code):
    monkeypatch.setattr("sys.argv", ["reproduce.py", *words])
    given = {"test": "test_a.py::test_it[finite]", "check": "finite", "cause": "loss", "options": (), "root": "."}
    assert reproduce_main("reproduce.py", **given, folder=".", ini="", batch="") == code
    told = capsys.readouterr()
    text = told.err if code else told.out
    assert text.startswith("usage: python reproduce.py [ROOT]\n")
    assert "Runs test_a.py::test_it[finite] in the project and says whether finite:loss is there." in text


@pytest.mark.processes
def test_the_script_shows_the_failure_wherever_it_lies_and_says_when_it_is_gone(project):
    write(project, "-k", "gpt")
    moved = project.path / "some" / "other" / "folder"
    moved.parent.mkdir(parents=True)
    (project.path / GPT).rename(moved)
    before = {p for p in project.path.rglob("*") if "__pycache__" not in p.parts}
    again = reproduce(moved)
    assert (again.returncode, again.stderr) == (1, "")
    assert "it is wrong by 4.00" in again.stdout
    assert again.stdout.endswith("step_order:stale is there\n")
    assert {p for p in project.path.rglob("*") if "__pycache__" not in p.parts} - before == set()
    source = project.path / "suite" / "test_a.py"
    source.write_text(
        source.read_text(encoding="utf-8").replace('"step_order": fault', '"mended": fault'), encoding="utf-8"
    )
    mended = reproduce(moved)
    assert (mended.returncode, mended.stderr) == (0, "")
    assert mended.stdout == "step_order:stale is gone: step_order passes\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            "import pytest",
            "import pytest, my_package",
            "suite/test_a.py cannot be collected: ModuleNotFoundError: No module named 'my_package'",
        ),
        (
            "test_in_a_class",
            "test_renamed",
            "there is no suite/test_a.py::TestNet::test_in_a_class[[]accumulation] in * any more",
        ),
    ],
)
def test_what_hinders_the_script_is_one_sentence(project, before, after, sentence):
    write(project, "-k", "class")
    source = project.path / "suite" / "test_a.py"
    source.write_text(source.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    result = reproduce(next(project.path.rglob("reproduce.py")).parent)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    pytest.LineMatcher(result.stderr.splitlines()).fnmatch_lines([f"reproduce.py: {sentence}"])


def test_a_project_that_is_not_found_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = {"test": "suite/test_a.py::test_it[finite]", "check": "finite", "cause": "", "options": [], "folder": "."}
    for words in ([], ["elsewhere"]):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *words])
        script = str(tmp_path / "reproduce.py")
        assert reproducing.main(script, **own, root=str(tmp_path / "gone"), ini="", batch="") == 2
        assert capsys.readouterr().err.endswith("give the project's root directory: python reproduce.py ROOT\n")


@pytest.mark.parametrize(
    ("result", "code", "told"),
    [
        (failed("stale"), 1, "step_order:stale is there"),
        (failed("lost"), 1, "step_order:stale is gone, but step_order still fails: lost"),
        (
            Result(check="step_order", outcome="xfailed", reason="issue 3"),
            1,
            "step_order:stale is there, and expected: issue 3",
        ),
        (
            Result(check="step_order", outcome="passed"),
            0,
            "step_order:stale is gone: step_order passes; it failed under torch 1.0",
        ),
        (Result(check="step_order", outcome="skipped", reason="no"), 2, "reproduce.py: step_order was not decided: no"),
    ],
)
def test_the_exit_code_follows_from_the_result(result, code, told, tmp_path, capsys):
    here = {"python": platform.python_version(), "platform": platform.platform(), "torch": "1.0"}
    (tmp_path / "environment.json").write_text(json.dumps(here), encoding="utf-8")
    assert reproducing._judged(result, "stale", "", tmp_path / "environment.json") == code
    written = capsys.readouterr()
    assert (written.out + written.err).strip() == told


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["tests", "--trainloop"], []),
        (["-k", "gpt", "-m", "slow", "-x", "-vv", "-n", "4", "-n4", "--lf"], []),
        (["--trainloop-json=a.json", "--trainloop-only", "finite", "--junitxml", "x.xml"], []),
        (
            ["-p", "my_plugin", "-o", "xfail_strict=true", "-W", "error"],
            ["-p", "my_plugin", "-o", "xfail_strict=true", "-W", "error"],
        ),
        (["--model", "tiny", "--trainloop-strict"], ["--model", "tiny", "--trainloop-strict"]),
        (["--cov", "--cov-report=xml", "--import-mode=importlib"], ["--import-mode=importlib"]),
        (["--trainloop-bundle", "out", "tests", "--tb=short"], []),
    ],
)
def test_what_bears_on_the_test_is_kept_of_a_command_line(words, left):
    assert list(kept(words, ["tests"])) == left


def test_a_file_in_the_place_of_the_folder_is_refused_before_anything_runs(session):
    session.makefile(".txt", there="")
    result = session.runpytest("--trainloop", "--trainloop-bundle=there.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --trainloop-bundle is 'there.txt', a file; a folder is needed"])


ACCUMULATING = (
    HEAD
    + """
    def accumulating(model, optimizer, batches, accumulate):
        for number, batch in enumerate(batches, 1):
            mse(model, batch).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    @pytest.mark.trainloop(only=["accumulation_equivalence"])
    def test_it(accumulate=1):
        return loop(lambda *given: accumulating(*given, accumulate))
"""
)


@pytest.mark.processes
def test_the_smallest_batch_that_shows_it_lies_beside_the_script(pytester, monkeypatch):
    import torch

    for name in ("CI", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_a=ACCUMULATING)
    pytester.runpytest_inprocess("-p", "no:randomly", "--trainloop", "--trainloop-bundle=bundle").assert_outcomes(
        failed=1
    )
    folder = pytester.path / "bundle" / "test_a.test_it" / "accumulation_equivalence.loss_not_divided"
    x, y = torch.load(folder / "batch.pt")
    assert 2 <= len(x) == len(y) < 8
    record = (folder / "record.txt").read_text(encoding="utf-8")
    assert "test_a.py" in record
    assert "0.weight  [8, 4]" in record
    assert "step of SGD 0, rate 0.1" in record
    again = reproduce(folder)
    assert again.returncode == 1, again.stderr
    assert again.stdout.endswith("accumulation_equivalence:loss_not_divided is there, on the batch in batch.pt\n")
