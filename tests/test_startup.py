"""What the installed but unused plugin costs: no torch, no hypothesis, few modules."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.processes

# Hypothesis's own plugin imports hypothesis in its summary of a failed run, and randomly seeds what is installed.
ALONE = ("-p", "no:randomly", "-p", "no:hypothesispytest", "-p", "no:benchmark", "-p", "no:anyio")

CONFTEST = """
import atexit, json, os, pathlib, sys

def write():
    loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "hypothesis", "pytest_trainloop")]
    pathlib.Path("loaded.json").write_text(json.dumps(loaded))

if "PYTEST_XDIST_WORKER" not in os.environ:
    atexit.register(write)
"""


@pytest.fixture
def loaded(pytester, monkeypatch):
    """Run a session in a process of its own and say which of the modules in question it had at its end."""

    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "CI"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[pytest.RunResult, list[str]]:
        pytester.makeconftest(CONFTEST)
        result = pytester.runpytest_subprocess(*ALONE, *args)
        return result, json.loads((pytester.path / "loaded.json").read_text(encoding="utf-8"))

    return run


def heavy(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("pytest_trainloop")]


def test_unused_it_loads_four_small_modules(pytester, loaded):
    pytester.makepyfile("def test_plain(): ...\nclass TestPlain:\n    def test_two(self): ...")
    result, names = loaded()
    result.assert_outcomes(passed=2)
    assert sorted(names) == [
        "pytest_trainloop",
        "pytest_trainloop.frontends",
        "pytest_trainloop.frontends.plugin",
        "pytest_trainloop.frontends.plugin.options",
    ]


def test_a_marked_test_without_the_flag_loads_neither_torch_nor_hypothesis(pytester, loaded):
    pytester.makepyfile("import pytest\n@pytest.mark.trainloop\ndef test_gpt(accumulate=1): ...")
    result, names = loaded("-rs")
    result.assert_outcomes(skipped=1)
    assert heavy(names) == []


def test_a_failing_session_loads_neither_torch_nor_hypothesis(pytester, loaded):
    pytester.makepyfile("def test_plain(): assert 0")
    assert heavy(loaded()[1]) == []


@pytest.mark.parametrize("option", ["--trainloop-list", "--trainloop-explain=step_order", "--collect-only"])
def test_looking_around_loads_neither_torch_nor_hypothesis(pytester, loaded, option):
    pytester.makepyfile("import pytest\n@pytest.mark.trainloop\ndef test_gpt(accumulate=1): ...")
    result, names = loaded("--trainloop", option)
    assert result.ret == 0
    assert heavy(names) == []


def test_the_controller_of_xdist_loads_neither_torch_nor_hypothesis(pytester, loaded):
    pytest.importorskip("xdist")
    pytester.makepyfile("import pytest\n@pytest.mark.trainloop\ndef test_gpt(accumulate=1): pytest.skip('not here')")
    _, names = loaded("--trainloop", "-n1", "--trainloop-json=out.json")
    assert heavy(names) == []
    assert (pytester.path / "out.json").exists()
