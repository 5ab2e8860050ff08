"""Which files a script wrote: they are its own business, and are listed."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_trainloop.recording import opened_files

MOST_ENTRIES = 50_000
"""Files under the working directory beyond which it is not compared: only what Python itself opened is listed then."""

NOT_LOOKED_AT = frozenset({".git", "__pycache__", ".venv", "node_modules", ".mypy_cache", ".ruff_cache"})


class WrittenFiles:
    """New and changed files of a run.

    Two looks complete each other. The working directory is compared before and after: torch writes checkpoints from
    C++, and child processes write too. Files elsewhere are those that Python opened for writing and that are still
    there.
    """

    def __init__(self) -> None:
        self._folder = Path.cwd()
        self._before = _stamps(self._folder)
        self._opened: dict[str, None] = {}
        opened_files.listen(self._note)

    def _note(self, path: str | bytes) -> None:
        self._opened[os.fspath(Path.cwd() / os.fsdecode(path))] = None

    def listed(self) -> list[str]:
        """The files, those under the working directory first and relative to it. Ends the watching."""
        opened_files.stop(self._note)
        after = _stamps(self._folder)
        inside: set[str] = set()
        if self._before is not None and after is not None:
            inside = {path for path, stamp in after.items() if self._before.get(path) != stamp}
        elsewhere = {path for path in list(self._opened) if self._counts(path)}
        if after is not None and self._before is not None:
            elsewhere = {path for path in elsewhere if not Path(path).is_relative_to(self._folder)}
        return [*sorted(os.path.relpath(path, self._folder) for path in inside), *sorted(elsewhere)]

    @staticmethod
    def _counts(path: str) -> bool:
        hidden = path.endswith(".pyc") or path.startswith(("/dev/", "/proc/")) or NOT_LOOKED_AT & set(Path(path).parts)
        return not hidden and Path(path).is_file()


def _stamps(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Size and time of change of each file below; None where there are too many to look at."""
    found: dict[str, tuple[int, int]] = {}
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_LOOKED_AT]
        for name in files:
            path = Path(top) / name
            try:
                seen = path.lstat()
            except OSError:
                continue
            found[str(path)] = (seen.st_size, seen.st_mtime_ns)
        if len(found) > MOST_ENTRIES:
            return None
    return found
