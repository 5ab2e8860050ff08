"""What holds for every test of this folder: one thread, all modules loaded, no tests of CUDA without a device."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis  # noqa: F401  kept out of the in-process runs, whose summary imports it
import pytest
import torch

import pytest_trainloop
from tests.helpers import discovery, reports, slow


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def every_module() -> None:
    """An in-process run of pytester drops every module that it was the first to import, and torch can't be imported
    twice in one process. The adapters stay out: they import what they adapt."""
    for module in pkgutil.walk_packages(pytest_trainloop.__path__, "pytest_trainloop."):
        if not module.name.startswith("pytest_trainloop.adapters."):
            importlib.import_module(module.name)


@pytest.fixture(autouse=True)
def modules_stay(request: pytest.FixtureRequest) -> None:
    if "pytester" in request.fixturenames:
        request.getfixturevalue("every_module")


@pytest.fixture(autouse=True)
def torch_function_stays_enabled() -> Iterator[None]:
    """A test that leaves torch's dispatch to Python disabled is named, and not the later test that needs it."""
    yield
    state = torch._C._get_torch_function_state()
    torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
    assert state == torch._C._TorchFunctionState.ENABLED, state


def pytest_configure(config: pytest.Config) -> None:
    discovery.set_words(config.option.keyword or "")
    if config.getoption("--note-slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(slow.NoteSlow())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files unread in which no word of ``-k`` occurs, so that one cause is tried in seconds; and those of the
    frameworks where ``-m`` leaves them out: importing these takes as long."""
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    frameworks = "not integration" in config.option.markexpr and discovery.all_need_frameworks(collection_path)
    return True if frameworks or not discovery.may_match(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests; leave those that need a CUDA device out where there is none, and have pytest count them."""
    slow.mark(items)
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("trainloop_cuda")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_runner_of_github_reads_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions inside of tests write no annotations and no summary of the job that runs the tests."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def every_report_conforms(request: pytest.FixtureRequest) -> Iterator[None]:
    """The JSON reports and SARIF files that a test wrote are valid by their schemas."""
    made = {name: request.getfixturevalue(name) for name in ("pytester", "tmp_path") if name in request.fixturenames}
    yield
    for name, fixture in made.items():
        reports.assert_valid(fixture.path if name == "pytester" else fixture)
