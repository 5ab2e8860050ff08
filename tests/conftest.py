"""What holds for every test of this folder: one thread, all modules loaded, no tests of CUDA without a device."""

from __future__ import annotations

import importlib
import pkgutil

import hypothesis  # noqa: F401  kept out of the in-process runs, whose summary imports it
import pytest
import torch

import pytest_trainloop

# An in-process run of pytester drops every module that it was the first to import, and torch can't be imported twice in
# one process. The adapters stay out: they import what they adapt.
for _module in pkgutil.walk_packages(pytest_trainloop.__path__, "pytest_trainloop."):
    if not _module.name.startswith("pytest_trainloop.adapters."):
        importlib.import_module(_module.name)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that need a CUDA device out where there is none, and have pytest count them."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("trainloop_cuda")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
