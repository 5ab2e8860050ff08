"""``--trainloop-benchmark``: one item a loop, through the fixture and the options of pytest-benchmark."""

from __future__ import annotations

import json

import pytest

from tests.helpers.plugin_sessions import HEAD, all_of_torch_is_loaded  # noqa: F401

pytest.importorskip("pytest_benchmark")

LOOPS = (
    HEAD
    + """
    @pytest.mark.trainloop(only=["step_order"])
    @pytest.mark.parametrize("width", [8])
    @pytest.mark.benchmark(group="loops", min_rounds=4)
    def test_it(width): return loop()

    def test_other(): pass
"""
)

TIMED = "test_a.py::test_it[8-step_time]"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_a=LOOPS)

    def ran(*options: str) -> pytest.RunResult:
        still = ("-p", "no:randomly", "-p", "no:cacheprovider", "-rs", "-v")
        return pytester.runpytest_inprocess(*still, "--benchmark-max-time=0.001", *options)

    return ran


def test_the_loop_has_a_benchmark_of_its_own(run, pytester):
    result = run("--trainloop-benchmark", "--benchmark-json=times.json")
    result.assert_outcomes(passed=2)  # the benchmark and the other test: no check without --trainloop
    assert f"{TIMED} PASSED" in result.stdout.str()
    assert "benchmark 'loops': 1 tests" in result.stdout.str()
    (timed,) = json.loads((pytester.path / "times.json").read_text(encoding="utf-8"))["benchmarks"]
    assert (timed["fullname"], timed["group"]) == (TIMED, "loops")
    assert timed["stats"]["rounds"] == len(timed["stats"]["data"]) >= 4
    assert 0 < timed["stats"]["min"] <= timed["stats"]["max"] < 100
    assert {"batches_per_round": 1.0, "device": "cpu"}.items() <= timed["extra_info"].items()
    assert timed["extra_info"]["peak_memory_bytes"] > 49 * 4


def test_it_stands_beside_the_checks_and_is_no_verdict(run, pytester):
    result = run("--trainloop", "--trainloop-benchmark", "--trainloop-json=out.json")
    result.assert_outcomes(passed=3)
    assert "step_order" in result.stdout.str()
    (loop,) = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))["loops"]
    assert [check["check"] for check in loop["checks"]] == ["step_order"]


def test_without_the_option_there_is_none(run):
    result = run("--trainloop")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*step_time*")


@pytest.mark.parametrize(
    ("option", "outcome"),
    [
        ("--benchmark-disable", {"passed": 3}),
        ("--benchmark-skip", {"passed": 2, "skipped": 1}),
        ("--benchmark-only", {"passed": 1, "skipped": 2}),
    ],
)
def test_options_of_pytest_benchmark_count(run, option, outcome):
    result = run("--trainloop", "--trainloop-benchmark", option)
    result.assert_outcomes(**outcome)
    assert ("benchmark 'loops'" in result.stdout.str()) == (option == "--benchmark-only")
    said = "trainloop: nothing was measured: --benchmark-disable is given" in result.stdout.str()
    assert said == (option == "--benchmark-disable")


@pytest.mark.processes
def test_under_xdist_nothing_is_measured_and_the_end_says_so(run):
    pytest.importorskip("xdist")
    result = run("--trainloop-benchmark", "-n", "1")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["trainloop: nothing was measured: tests run at the same time under -n*"])


def test_a_saved_run_is_compared_and_a_slower_one_fails(run, pytester):
    run("--trainloop-benchmark", "--benchmark-save=before")
    source = (pytester.path / "test_a.py").read_text(encoding="utf-8")
    slow = source.replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.01)")
    (pytester.path / "test_a.py").write_text(slow, encoding="utf-8")
    result = run("--trainloop-benchmark", "--benchmark-compare", "--benchmark-compare-fail=min:300%")
    assert result.ret != 0
    text = result.stdout.str() + result.stderr.str()
    assert "Performance has regressed" in text
    assert "test_it[8-step_time]" in text


def test_a_profile_shows_the_loop(run):
    text = run("--trainloop-benchmark", "--benchmark-cprofile=ncalls").stdout.str()
    assert "test_a.py" in text.partition("cProfile")[2]
    assert "(train)" in text


BAD = (
    HEAD
    + """
    def untrained(model, optimizer, batches): mse(model, next(iter(batches))).backward()

    def raising(model, optimizer, batches): raise ValueError("no data")

    @pytest.mark.trainloop
    def test_untrained(): return loop(untrained)

    @pytest.mark.trainloop
    def test_raising(): return loop(raising)

    @pytest.mark.trainloop
    def test_no_loop(): return 3

    @pytest.mark.trainloop_loss
    def test_loss(): return 3
"""
)


def test_what_cannot_be_timed_says_why_and_spoils_no_file(run, pytester):
    pytester.makepyfile(test_a=BAD)
    result = run("--trainloop-benchmark", "--benchmark-json=times.json")
    result.assert_outcomes(skipped=2, failed=2)
    text = result.stdout.str()
    assert "fit makes 0 optimizer steps in" in text
    assert "fit raised ValueError: no data" in text
    assert 'raise ValueError("no data")' in text
    assert "test_no_loop returned 3; it must return a TrainLoop" in text
    assert "needs --trainloop" in text  # of the loss function
    assert "pytest_trainloop/" not in text
    assert "not used at all" not in text


def test_where_checks_said_it_before_it_is_not_said_again(run, pytester):
    pytester.makepyfile(test_a=BAD)
    result = run("--trainloop", "--trainloop-benchmark", "--trainloop-only=step_order,finite", "-k", "raising")
    result.assert_outcomes(failed=1, skipped=2)


def test_without_pytest_benchmark_one_sentence_says_what_to_do(pytester):
    result = pytester.runpytest_inprocess("--trainloop-benchmark", "-p", "no:benchmark")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --trainloop-benchmark needs pytest-benchmark, which is not loaded; take '-p no:benchmark' out"]
    )
