"""The files that a session writes at its end, each from the data of the JSON report."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

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
            text = self.text(document)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside = self.file.with_name(f".{self.file.name}.{os.getpid()}")
            try:
                # A lone surrogate, as of a file name that is no UTF-8, is no reason to write nothing.
                beside.write_text(text, encoding="utf-8", errors="backslashreplace")
                beside.replace(self.file)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            return Line(f"{self.option} was not written: {error}", "loud")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Line(f"{self.option} was not written; {reason}; please report it", "loud")
        return Line(f"{self.told}: {self.file.absolute().as_uri()}") if self.told else None


def asked_for(config: pytest.Config) -> Iterator[Output]:
    """The files that the options name. Raises ``pytest.UsageError`` for what cannot be written."""
    file = named_file(config, "--trainloop-json")
    if file is not None:
        yield Output(option="--trainloop-json", file=file, text=_as_json)
    file = named_file(config, "--trainloop-report")
    if file is not None:
        _can_draw(config)
        yield Output(option="--trainloop-report", file=file, text=_as_page(config), told="report")


def named_file(config: pytest.Config, option: str) -> Path | None:
    """The file that an option names, against the folder of the call."""
    given = config.getoption(option.lstrip("-").replace("-", "_"))
    if given is None:
        return None
    file: Path = config.invocation_params.dir / given
    if not given or file.is_dir():
        raise pytest.UsageError(f"{option} is {given!r}, a folder; a file to write is needed")
    return file


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def _can_draw(config: pytest.Config) -> None:
    if not config.getoption("trainloop"):
        raise pytest.UsageError("--trainloop-report shows loops that are run: it is needed with --trainloop")
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"--trainloop-report needs {' and '.join(missing)}: pip install 'pytest-trainloop[report]'"
        )


def _as_page(config: pytest.Config) -> Callable[[Mapping[str, Any]], str]:
    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.htmlreport import page

        return page(document, folders=(config.invocation_params.dir, config.rootpath))

    return text
