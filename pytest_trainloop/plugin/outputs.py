"""The files that a session writes at its end, each from the data of the JSON report."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.plugin import bundle
from pytest_trainloop.report import files
from pytest_trainloop.report.section import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One file that was asked for."""

    option: str
    file: Path
    text: Callable[[Mapping[str, Any]], str]
    """What the file holds, from the data of the JSON report."""
    told: str = ""
    """What the terminal calls the file once it is written; empty for nothing said."""

    def write(self, document: Mapping[str, Any]) -> Line | None:
        """Write the file, whole or not at all, with the folders that it needs; what the terminal shall say of it."""
        try:
            files.write(self.file, self.text(document))
        except OSError as error:
            return Line(f"{self.option} was not written: {error.strerror or error} ({self.file})", "loud")
        except Withheld as error:
            return Line(f"{self.option} was not written: {error}", "loud")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Line(f"{self.option} was not written; {reason}; please report it", "loud")
        return Line(f"{self.told}: {self.file.absolute().as_uri()}") if self.told else None


class Withheld(Exception):
    """Why a file is better not written."""


def asked_for(config: pytest.Config) -> Iterator[Output | bundle.Bundles]:
    """The files that the options name. Raises ``pytest.UsageError`` for what cannot be written."""
    file = named_file(config, "--trainloop-json")
    if file is not None:
        yield Output(option="--trainloop-json", file=file, text=_as_json)
    file = named_file(config, "--trainloop-sarif")
    if file is not None:
        if not config.getoption("trainloop"):
            raise pytest.UsageError("--trainloop-sarif tells of loops that are run: it is needed with --trainloop")
        yield Output(option="--trainloop-sarif", file=file, text=_as_sarif(config))
    file = named_file(config, "--trainloop-report")
    if file is not None:
        _can_draw(config)
        yield Output(option="--trainloop-report", file=file, text=_as_page(config), told="report")
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
    file: Path = config.invocation_params.dir / given
    if refusal := files.refusal(file):
        raise pytest.UsageError(f"{option} is {given!r}, {refusal}")
    return file


def _as_json(document: Mapping[str, Any]) -> str:
    from pytest_trainloop.report import json

    return json.text(document)


def _as_sarif(config: pytest.Config) -> Callable[[Mapping[str, Any]], str]:
    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.explain import rule
        from pytest_trainloop.plugin.github import alerts_of
        from pytest_trainloop.report import json, sarif
        from pytest_trainloop.report.entry import entries_of
        from pytest_trainloop.report.section import checked_nothing

        if nothing := checked_nothing(entries_of(document)):
            raise Withheld(f"nothing was checked, and an empty file would close the alerts ({nothing})")
        return json.text(sarif.document(alerts_of(config, document), document["environment"], rule))

    return text


def _can_draw(config: pytest.Config) -> None:
    if not config.getoption("trainloop"):
        raise pytest.UsageError("--trainloop-report shows loops that are run: it is needed with --trainloop")
    from pytest_trainloop.htmlreport import PACKAGES

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"--trainloop-report needs {', '.join(missing)}: pip install 'pytest-trainloop[report]'"
        )


def _as_page(config: pytest.Config) -> Callable[[Mapping[str, Any]], str]:
    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.htmlreport import page

        return page(document, folders=(config.invocation_params.dir, config.rootpath))

    return text
