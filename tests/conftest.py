from __future__ import annotations

import importlib
import pkgutil

import hypothesis  # noqa: F401  kept out of the in-process runs, whose summary imports it
import pytest
import torch

import pytest_trainloop

pytest_plugins = ["pytester"]

# An in-process run of pytester drops every module that it was the first to import, and torch can't be imported twice in
# one process. The adapters stay out: they import what they adapt.
for _module in pkgutil.walk_packages(pytest_trainloop.__path__, "pytest_trainloop."):
    if not _module.name.startswith("pytest_trainloop.adapters."):
        importlib.import_module(_module.name)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
