"""What the runner of GitHub Actions reads: annotations at the user's lines, and the summary of the job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.report import jobsummary
from pytest_trainloop.core.report.alerts import Alert, alerts
from pytest_trainloop.core.report.annotations import commands
from pytest_trainloop.core.report.entry import entries_of
from pytest_trainloop.core.report.section import Line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.core.report.lines import Places


def is_runner() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def alerts_of(document: Mapping[str, Any], places: Places) -> list[Alert]:
    """The alerts in the data of a report, with these files."""
    from pytest_trainloop.core import registry

    proofs = {name: check.proofs for name, check in registry.registered().items()}
    return alerts(document, places, proofs)


def tell(
    document: Mapping[str, Any],
    failures: Sequence[Alert],
    more: Sequence[Alert] = (),
    *,
    errors: bool = True,
    nothing: str = "",
) -> list[Line]:
    """Write the commands and the summary; what could not be written, for the terminal.

    ``more`` is no failure of a test. ``errors`` is False where another tool annotates failures; ``nothing`` says why
    nothing was checked.
    """
    found = [*failures, *more]
    lines = [*commands(failures, errors=errors, nothing=nothing), *commands(more)]
    if lines:
        # In one piece, from the beginning of a line: the other stream may be in the middle of a line.
        sys.stderr.write("\n" + "".join(f"{command}\n" for command in lines))
    given = os.environ.get("GITHUB_STEP_SUMMARY")
    if not given:
        return []
    file = Path(given)
    try:
        room = jobsummary.LIMIT - (file.stat().st_size if file.exists() else 0)
        text = jobsummary.markdown(entries_of(document), found, nothing=nothing, room=room)
        with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)  # behind what other steps' tools have written there
    except OSError as error:
        return [Line(f"the summary of the job was not written: {error}", "warn")]
    return []
