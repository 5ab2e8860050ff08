"""The file of one loop's baseline: where it lies, and what this run does with it. Standard library only."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.core.report import files

if TYPE_CHECKING:
    from pathlib import Path

Mode = Literal["check", "update", "new"]
"""Compare with the file; write it in any case; write it where there is none, else compare."""

Done = Literal["recorded", "updated", "unchanged"]

FOLDER = "trainloop_baselines"
"""The folder next to a test file that holds what is stored of its loops."""


@dataclass(slots=True)
class BaselineFile:
    """The file of one loop."""

    path: Path
    shown: str
    """The path as messages show it."""
    mode: Mode = "check"
    command: str = "check_loop(..., update=True)"
    """The command that writes the file again."""
    first: str = "check_loop(..., update=True)"
    """What writes it where there is none yet."""
    flag: str = "update=True"
    """What a skip names where there is no file yet."""
    text: str | None = None
    """What the check recorded, to be written by whoever asked for it."""
    changes: tuple[str, ...] = ()
    """What is recorded otherwise than in the file that was there, a sentence each."""

    @property
    def is_there(self) -> bool:
        return self.path.is_file()

    @property
    def is_to_be_recorded(self) -> bool:
        """Whether this run records the baseline instead of comparing it."""
        return is_written(self.mode, is_there=self.is_there)

    def read(self) -> str:
        """The text of the file. Raises ``UsageError`` where it cannot be read."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise UsageError(f"the baseline {self.shown} cannot be read: {reason}; {self.repair}") from None

    @property
    def repair(self) -> str:
        """What to do about a file that is no baseline."""
        return f"restore it from version control, or record it again: {self.command}"


def is_written(mode: Mode, *, is_there: bool) -> bool:
    """Whether a stored file is written in this mode."""
    return mode == "update" or (mode == "new" and not is_there)


def write(path: Path, text: str) -> Done:
    """Write a text whole or not at all, folders included; a file that has it already is left alone.

    Raises ``OSError`` where the file cannot be written.
    """
    there = path.is_file()
    with contextlib.suppress(OSError, UnicodeError):
        if there and path.read_text(encoding="utf-8") == text:
            return "unchanged"
    files.write(path, text)
    return "updated" if there else "recorded"
