"""The file of a baseline as ``check_loop`` is given it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.baseline_file import BaselineFile, write
from pytest_trainloop.baselines.as_json import trajectory_of
from pytest_trainloop.errors import UsageError
from pytest_trainloop.fields import a

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.finding import Result
    from pytest_trainloop.selection import Plan

CHECK = "baseline"
"""The check that records and compares."""


def given(file: str | os.PathLike[str] | None, update: bool | Literal["new"], plan: Plan) -> BaselineFile | None:
    """The file, None for none. Raises ``UsageError`` for what can be no baseline, before any loop runs."""
    if update not in (True, False, "new"):
        raise UsageError(f'check_loop got update={update!r}; True, False or "new" is needed')
    if file is None:
        if update:
            raise UsageError("check_loop got update= without baseline=, the file to write")
        return None
    if not isinstance(file, (str, os.PathLike)):
        raise UsageError(f"check_loop got baseline={a(file)}; the path of a file is needed")
    path = Path(file)
    if not str(file) or path.is_dir():
        raise UsageError(f"check_loop got baseline={str(file)!r}, a folder; the path of a file is needed")
    chosen = CHECK in plan.checks and CHECK not in plan.skip
    if update and not chosen:
        raise UsageError(f"check_loop got update=, and only= or skip= leaves out the check {CHECK}, which records")
    made = BaselineFile(path=path, shown=str(file), mode="new" if update == "new" else "update" if update else "check")
    if chosen and made.is_there and not made.is_to_be_recorded:
        trajectory_of(made.read(), made.shown, made.repair)
    return made


def store(file: BaselineFile | None, results: Sequence[Result]) -> None:
    """Write what the check recorded, where it passed. Raises ``UsageError`` where the file cannot be written."""
    if file is None or file.text is None or not any(r.check == CHECK and r.outcome == "passed" for r in results):
        return
    try:
        write(file.path, file.text)
    except OSError as error:
        raise UsageError(f"the baseline {file.shown} cannot be written: {error.strerror or error}") from None
