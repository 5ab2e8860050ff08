"""The files that a run writes at its end, each from the data of the JSON report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.report import files
from pytest_trainloop.core.report.section import Line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_trainloop.core.report.lines import Places

    Text = Callable[[Mapping[str, Any]], str]
    """What a file holds, from the data of the JSON report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One file that was asked for."""

    option: str
    file: Path
    text: Text
    label: str = ""
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
        return Line(f"{self.label}: {self.file.absolute().as_uri()}") if self.label else None


class Withheld(Exception):
    """Why a file is better not written."""


def json_file(file: Path) -> Output:
    """``--trainloop-json``."""

    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.core.report import json

        return json.text(document)

    return Output(option="--trainloop-json", file=file, text=text)


def sarif_file(file: Path, places: Callable[[], Places]) -> Output:
    """``--trainloop-sarif``; ``places`` gives the files of the run."""

    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.core.report import json, sarif
        from pytest_trainloop.core.report.entry import entries_of
        from pytest_trainloop.core.report.section import checked_nothing
        from pytest_trainloop.judging.explain import rule
        from pytest_trainloop.views.outputs.github import alerts_of

        if nothing := checked_nothing(entries_of(document)):
            raise Withheld(f"nothing was checked, and an empty file would close the alerts ({nothing})")
        return json.text(sarif.document(alerts_of(document, places()), document["environment"], rule))

    return Output(option="--trainloop-sarif", file=file, text=text)


def html_file(file: Path, folders: Sequence[Path]) -> Output:
    """``--trainloop-report``; source lines are read in ``folders``."""

    def text(document: Mapping[str, Any]) -> str:
        from pytest_trainloop.views.htmlreport import page

        return page(document, folders=folders)

    return Output(option="--trainloop-report", file=file, text=text, label="report")
