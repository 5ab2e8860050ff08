"""The files that a session writes at its end, by the options that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trainloop.core.report import files
from pytest_trainloop.frontends.plugin import bundle
from pytest_trainloop.frontends.plugin.github import places_of
from pytest_trainloop.views.outputs.written import Output, html_file, json_file, sarif_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_EXAMPLES = {
    "--trainloop-json": "trainloop.json",
    "--trainloop-sarif": "trainloop.sarif",
    "--trainloop-report": "trainloop.html",
}
"""A file by the option that names it."""


def asked_for(config: pytest.Config) -> Iterator[Output | bundle.Bundles]:
    """The files that the options name. Raises ``pytest.UsageError`` for what cannot be written."""
    file = named_file(config, "--trainloop-json")
    if file is not None:
        yield json_file(file)
    file = named_file(config, "--trainloop-sarif")
    if file is not None:
        if not config.getoption("trainloop"):
            raise pytest.UsageError("--trainloop-sarif tells of loops that are run: it is needed with --trainloop")
        yield sarif_file(file, lambda: places_of(config))
    file = named_file(config, "--trainloop-report")
    if file is not None:
        _can_draw(config)
        yield html_file(file, (config.invocation_params.dir, config.rootpath))
    folder = bundle.folder_of(config)
    if folder is not None:
        bundles = bundle.Bundles(config, folder)
        config.pluginmanager.register(bundles)
        yield bundles


def named_file(config: pytest.Config, option: str) -> Path | None:
    """The file that an option names, against the folder of the call."""
    given = config.getoption(option.lstrip("-").replace("-", "_"))
    if given is None:
        return None
    if not given:
        raise pytest.UsageError(f"{option} names no file; one is needed, as in {option}=out/{_EXAMPLES[option]}")
    file: Path = config.invocation_params.dir / given
    if refusal := files.refusal(file):
        raise pytest.UsageError(f"{option} is {given!r}, {refusal}")
    return file


def _can_draw(config: pytest.Config) -> None:
    if not config.getoption("trainloop"):
        raise pytest.UsageError("--trainloop-report shows loops that are run: it is needed with --trainloop")
    from pytest_trainloop.views.htmlreport import missing

    if packages := missing():
        raise pytest.UsageError(f"--trainloop-report needs {packages}")
