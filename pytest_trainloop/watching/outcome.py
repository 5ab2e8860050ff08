"""How the command ends: its exit status, and the JSON report."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_trainloop.report import Report

FAULT, NOTHING = 1, 2


def refuse(sentence: str) -> int:
    """Say why nothing is judged; the status for it."""
    sys.stderr.write(f"pytest_trainloop: {sentence}\n")
    sys.stderr.flush()
    return NOTHING


def write_json(path: Path, report: Report) -> None:
    """The JSON report of pytest's runs, of this one loop."""
    from pytest_trainloop.report.json import document, environment, text

    write_whole(path, text(document(report, environment(device="auto", seed=0))))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no half of it is ever there; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
