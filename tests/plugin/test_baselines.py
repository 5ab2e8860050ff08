"""``--trainloop-update`` and ``--trainloop-update-new``: the life of a baseline, with the real runner."""

from __future__ import annotations

import itertools
import json
import re
import shlex

import pytest

from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401

LOOPS = (
    HEAD
    + """
    @pytest.mark.trainloop(only=["step_order", "baseline"])
    def test_it(): return loop()

    class TestMore:
        @pytest.mark.trainloop(only=["baseline"])
        @pytest.mark.parametrize("name", ["a/b", "c"])
        def test_wide(self, name): return loop()
"""
)

CHANGE = "the learning rate of step 1 is 0.2; it was 0.1"

FOLDER = "trainloop_baselines/test_a"
STORED = f"{FOLDER}/test_it.json"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    pytester.makepyfile(test_a=LOOPS)

    def ran(*options: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider", *options)

    return ran


def told(result: pytest.RunResult) -> list[str]:
    """The lines below "baselines" at the end."""
    lines = iter(result.outlines)
    for line in lines:
        if line.startswith("-") and line.strip("- ") == "baselines":
            return list(itertools.takewhile(lambda line: not line.startswith("="), lines))
    return []


def files(pytester: pytest.Pytester) -> dict[str, str]:
    found = sorted((pytester.path / "trainloop_baselines").rglob("*"))
    return {
        file.relative_to(pytester.path).as_posix(): file.read_text(encoding="utf-8") for file in found if file.is_file()
    }


def test_missing_same_changed_updated_and_same_again(run, pytester):
    only = "test_a.py::test_it"
    missing = run("--trainloop", only, "-v")
    missing.assert_outcomes(passed=1, skipped=1)
    needs = "  needs --trainloop-update-new  baseline: no baseline is recorded yet: pytest * --trainloop-update-new *"
    missing.stdout.fnmatch_lines([needs])
    assert not (pytester.path / "trainloop_baselines").exists()

    recorded = run("--trainloop", "--trainloop-update-new", only)
    recorded.assert_outcomes(passed=2)
    assert told(recorded) == [f"recorded   {STORED}"]
    first = files(pytester)
    assert list(first) == [STORED]

    same = run("--trainloop", "--trainloop-seed=3", only)  # the seed is that of the file
    same.assert_outcomes(passed=2)
    assert told(same) == []

    pytester.makepyfile(test_a=LOOPS.replace("lr=0.1", "lr=0.2"))
    changed = run("--trainloop", only)
    changed.assert_outcomes(passed=1, failed=1)
    changed.stdout.fnmatch_lines(["*--trainloop-only=baseline --trainloop-update test_a.py::test_it"])
    new = run("--trainloop", "--trainloop-update-new", only)
    new.assert_outcomes(passed=1, failed=1)
    assert files(pytester) == first

    updated = run("--trainloop", "--trainloop-only=baseline", "--trainloop-update", only)
    updated.assert_outcomes(passed=1)
    assert told(updated) == [f"updated    {STORED}: {CHANGE}"]
    assert files(pytester) != first
    again = run("--trainloop", "--trainloop-update", only)
    assert told(again) == [f"unchanged  {STORED}"]
    run("--trainloop", only).assert_outcomes(passed=2)


def test_the_command_of_a_failure_accepts_it_alone(run, pytester):
    run("--trainloop", "--trainloop-only=baseline", "--trainloop-update", "-k", "wide")
    before = files(pytester)
    pytester.makepyfile(test_a=LOOPS.replace("lr=0.1", "lr=0.2"))
    failed = run("--trainloop", "-k", "wide and a/b")
    failed.assert_outcomes(failed=1)
    (command,) = set(re.findall("accept an intended change: pytest (.*)", failed.stdout.str()))
    assert command.endswith(" 'test_a.py::TestMore::test_wide[a/b-baseline]'")
    updated = run(*shlex.split(command))
    updated.assert_outcomes(passed=1)
    assert [name for name, text in files(pytester).items() if text != before[name]] == [min(before)]
    assert told(updated) == [f"updated    {min(before)}: {CHANGE}"]


@pytest.mark.parametrize(
    ("slip", "options"),
    [
        ('only=["baseline"]', ["--trainloop-only=baselin", "-k", "test_it"]),
        ('skip={"determinsm": "x"}', []),
        ("", ["--trainloop-only=step_order"]),
    ],
)
def test_after_a_slip_nothing_is_said_to_belong_to_no_test(run, pytester, slip, options):
    stored = pytester.path / FOLDER / "TestMore.test_wide[c].json"
    stored.parent.mkdir(parents=True)
    stored.write_text("{}", encoding="utf-8")
    pytester.makepyfile(test_a=LOOPS.replace('only=["baseline"]', slip or 'only=["step_order"]'))
    assert told(run("--trainloop", "-k", "wide", *options)) == []


def test_a_module_that_cannot_be_collected_says_nothing_of_files(run, pytester):
    (pytester.path / FOLDER).mkdir(parents=True)
    (pytester.path / FOLDER / "test_gone.json").write_text("{}", encoding="utf-8")
    pytester.makepyfile(test_b="import nothing_of_this_name")
    assert told(run("--trainloop", "--trainloop-only=baseline", "--continue-on-collection-errors")) == []


def test_where_no_baseline_is_stored_nothing_is_run(run):
    result = run("--trainloop", "--trainloop-only=baseline")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["3 in all: NOTHING WAS CHECKED, 3 need more * 0 optimizer steps"])


def test_each_test_has_its_file_and_others_stay(run, pytester):
    result = run("--trainloop", "--trainloop-update", "-k", "wide", "--junit-xml=junit.xml")
    result.assert_outcomes(passed=2)
    names = [name.removeprefix(f"{FOLDER}/") for name in files(pytester)]
    assert names[1] == "TestMore.test_wide[c].json"
    assert names[0].startswith("TestMore.test_wide[a_b]-")  # a hash tells it from test_wide[a_b]
    assert "ordered" not in (pytester.path / "junit.xml").read_text("utf-8")
    assert len((pytester.path / "junit.xml").read_text("utf-8")) < 10_000


@pytest.mark.processes
def test_the_controller_of_xdist_writes(run, pytester):
    pytest.importorskip("xdist")
    stray = pytester.path / FOLDER / "test_gone.json"
    stray.parent.mkdir(parents=True)
    stray.write_text("{}", encoding="utf-8")
    result = run("--trainloop", "--trainloop-only=baseline", "--trainloop-update", "-n", "1")
    result.assert_outcomes(passed=3)
    lines = told(result)
    assert [line.split()[0] for line in lines] == ["recorded", "recorded", "recorded", "belongs"]
    assert STORED in files(pytester)


DAMAGED = {
    "{": "*the baseline trainloop_baselines/test_a/test_it.json is damaged: it is no JSON*restore it from version *",
    '{"format": 99}': "*has format 99, and this pytest-trainloop reads up to 1: update pytest-trainloop*",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_one_sentence_and_can_be_recorded_anew(run, pytester, text):
    stored = pytester.path / STORED
    stored.parent.mkdir(parents=True)
    stored.write_text(text, encoding="utf-8")
    result = run("--trainloop", "test_a.py::test_it")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([DAMAGED[text]])
    result.stdout.fnmatch_lines(["*record it again: * --trainloop-update test_a.py::test_it"])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert stored.read_text(encoding="utf-8") == text
    assert told(run("--trainloop", "--trainloop-update", "test_a.py::test_it")) == [f"updated    {STORED}"]


def test_files_without_a_test_are_told_where_the_module_was_collected_whole(run, pytester):
    for name in ("test_a/test_gone.json", "test_a/test_it.card.txt", "test_a/notes.md", "test_old/test_x.card.txt"):
        file = pytester.path / "trainloop_baselines" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x", encoding="utf-8")
    strays = [
        "belongs to no test: trainloop_baselines/test_a/test_gone.json; delete it, or rename it as its test",
        "belongs to no test: trainloop_baselines/test_old/test_x.card.txt; delete it, or rename it as its test",
    ]
    quick = ("--trainloop", "--trainloop-only=baseline,step_order")
    assert told(run(*quick)) == strays
    assert told(run(*quick, "-k", "test_it")) == strays  # the module was collected whole all the same
    assert told(run(*quick, "test_a.py::test_it")) == strays[1:]
    assert told(run("--trainloop", "--collect-only")) == []


def test_what_differs_from_run_to_run_is_not_recorded(run, pytester):
    body = (
        HEAD
        + """
    import os

    def train(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x + os.urandom(1)[0]), y).backward()
            optimizer.step()

    @pytest.mark.trainloop(only=["baseline"])
    def test_it(): return loop(train)
"""
    )
    pytester.makepyfile(test_a=body)
    result = run("--trainloop", "--trainloop-update", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*unreliable: two runs under one seed differ: the loss of step 1*see determinism*"])
    assert told(result) == ["no baseline was recorded: the check baseline of no selected loop passed"]
    assert not (pytester.path / "trainloop_baselines").exists()


def test_a_folder_that_cannot_be_written_fails_the_session(run, pytester):
    (pytester.path / "trainloop_baselines").write_text("a file in the way", encoding="utf-8")
    result = run("--trainloop", "--trainloop-only=baseline", "--trainloop-update", "test_a.py::test_it")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert told(result)[0].startswith(f"not written: {STORED}: ")


def test_cards_are_stored_by_the_same_options(run, pytester):
    card = f"{FOLDER}/test_it.card.txt"
    quick = ("--trainloop", "--trainloop-only=step_order", "--trainloop-card", "test_a.py::test_it")
    run(*quick, "--trainloop-update-new")
    assert list(files(pytester)) == [card]
    text = files(pytester)[card]
    pytester.makepyfile(test_a=LOOPS.replace("lr=0.1", "lr=0.2"))
    run(*quick, "--trainloop-update-new")
    assert files(pytester)[card] == text
    run(*quick, "--trainloop-update")
    assert files(pytester)[card] != text


def test_the_fixture_and_check_loop_take_baselines(run, pytester):
    body = (
        HEAD
        + """
    from pytest_trainloop import check_loop
    from pytest_trainloop import UsageError

    def test_by_hand(trainloop):
        trainloop.check("baseline", loop)
        with pytest.raises(UsageError, match="called twice in one test"):
            trainloop.check("baseline", loop)

    def test_named(trainloop, request):
        folder = request.path.parent / "own"
        trainloop.check_loop(loop, only=["baseline"], baseline=folder / "a.json")

    def test_without_pytest(tmp_path):
        file = tmp_path / "new" / "a.json"
        report = check_loop(loop, only=["baseline"], baseline=file)
        assert "update=True" in str(report)
        assert check_loop(loop, only=["baseline"], baseline=file, update="new").ok
        text = file.read_text(encoding="utf-8")
        assert check_loop(loop, only=["baseline"], baseline=str(file)).ok
        with pytest.raises(AssertionError, match="rate"):
            check_loop(lambda: loop(optimizer=None, model=nn.Linear(4, 1)), only=["baseline"], baseline=file)
        assert file.read_text(encoding="utf-8") == text
"""
    )
    pytester.makepyfile(test_a=body.replace('match="rate"', 'match="baseline"'))
    result = run("--trainloop", "--trainloop-update")
    result.assert_outcomes(passed=3)
    assert list(files(pytester)) == [f"{FOLDER}/test_by_hand.json"]
    assert json.loads((pytester.path / "own" / "a.json").read_text("utf-8"))["format"] == 1
    run("--trainloop").assert_outcomes(passed=3)


def test_all_and_only_new_are_not_asked_for_together(run):
    result = run("--trainloop", "--trainloop-update", "--trainloop-update-new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --trainloop-update and --trainloop-update-new are given: * one of them is needed"]
    )


@pytest.mark.parametrize("option", ["--trainloop-update", "--trainloop-update-new"])
def test_recording_takes_a_run(run, option):
    result = run(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option} records the baselines of loops that are run*"])
