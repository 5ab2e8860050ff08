from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.core import registry
from pytest_trainloop.frontends import plugin
from pytest_trainloop.judging import battery

if TYPE_CHECKING:
    from collections.abc import Callable

# A session in this process forgets the modules that it was the first to import: later ones would have two of some.
for module in pkgutil.iter_modules(plugin.__path__, f"{plugin.__name__}."):
    importlib.import_module(module.name)

FAKE = Path(__file__).with_name("fake_conftest.py").read_text(encoding="utf-8")


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytester whose conftest puts a fake in place of the runner; put right again afterwards."""
    monkeypatch.setattr(battery, "Subject", battery.Subject)
    monkeypatch.setattr(registry, "registered", registry.registered)
    monkeypatch.setenv("FAKE_LOG", str(pytester.path / "fake.log"))
    for name in ("CI", "BUILD_NUMBER", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    pytester.makeconftest(FAKE)
    return pytester


@pytest.fixture
def run(session: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Run pytest in this process on the session's files, in their order."""
    return lambda *args: session.runpytest("-p", "no:randomly", *args)


@pytest.fixture
def log(session: pytest.Pytester) -> Callable[[str], list[str]]:
    """The lines that the fake wrote about one kind of event, in every process."""

    def read(kind: str) -> list[str]:
        file = session.path / "fake.log"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [line.removeprefix(f"{kind} ") for line in lines if line.startswith(f"{kind} ")]

    return read
