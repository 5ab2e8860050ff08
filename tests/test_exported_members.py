"""The public names: sorted, present, and loaded only when used."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import pytest_trainloop


def test_all_is_sorted_and_present():
    assert pytest_trainloop.__all__ == sorted(pytest_trainloop.__all__)
    for name in pytest_trainloop.__all__:
        assert getattr(pytest_trainloop, name) is not None, name
    assert set(pytest_trainloop.__all__) <= set(dir(pytest_trainloop))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pytest_trainloop' has no attribute 'TrainLop'"):
        pytest_trainloop.TrainLop  # noqa: B018


def test_the_version_is_the_distributions():
    assert pytest_trainloop.__version__ == importlib.metadata.version("pytest-trainloop")


@pytest.mark.processes
def test_importing_the_package_and_the_plugin_loads_neither_torch_nor_hypothesis():
    code = (
        "import sys, pytest_trainloop.frontends.plugin\n"
        "from pytest_trainloop import CheckFailed, Finding, Result, TrainLoopError, UsageError, __version__, check\n"
        "sys.exit('torch' in sys.modules or 'hypothesis' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
