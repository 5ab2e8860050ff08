"""Lines of the user's files: what a finding names, and where the file is. Standard library only.

A finding says ``train.py:57   loss.backward()``, with a path that is relative to the folder in which the loop ran, or
with a bare name for a file outside of it. Whoever shows the line next to the source needs the file itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LINE = re.compile(r"(?P<file>[^\n]+?):(?P<line>[1-9]\d*)(?:   (?P<source>.*))?(?:\n|$)")
_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+).*(?:\n +(?P<source>\S.*))?', re.MULTILINE)

_NOT_SEARCHED = frozenset({"site-packages", "node_modules", "__pycache__", "build", "dist"})
_MOST_DECORATORS = 20
"""Lines of decorators that are passed over."""
_MOST_FOLDERS = 5000
"""Folders that are looked into for a file of which only the name is known."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code, as a message names it."""

    file: str
    number: int
    source: str = ""

    @classmethod
    def read(cls, text: str) -> Line | None:
        """The line that ``train.py:57   loss.backward()`` begins with; None for other texts."""
        found = _LINE.match(text)
        return cls(found["file"], int(found["line"]), (found["source"] or "").strip()) if found else None

    @classmethod
    def of_traceback(cls, text: str) -> Line | None:
        """The line of the last frame of a traceback; None where there is no frame."""
        frames = list(_FRAME.finditer(text))
        last = frames[-1] if frames else None
        return cls(last["file"], int(last["line"]), (last["source"] or "").strip()) if last else None


@dataclass(frozen=True, slots=True)
class At:
    """A line of a file that exists."""

    path: Path
    file: str
    """The path from the root of the repository, or the whole path outside of it."""
    number: int
    source: str
    """The line as the file has it, with its indent."""

    @property
    def inside(self) -> bool:
        """Whether the file lies in the repository."""
        return not Path(self.file).is_absolute()


class Places:
    """Files by the names that messages give them, for one session.

    ``bases`` are the folders that paths may be relative to, the likeliest first. ``root`` is the folder of the
    repository, which what is written for others is relative to.
    """

    def __init__(self, *bases: Path) -> None:
        self._bases = [base.resolve() for base in dict.fromkeys(bases)]
        self.root = repository(self._bases[-1])
        self._found: dict[Line, Path | None] = {}
        self._read: dict[Path, Sequence[str]] = {}
        self._by_name: dict[str, list[Path]] | None = None

    def find(self, line: Line) -> Path | None:
        """The file of a line; of several that it may be, one with this text at this number. None where there is none.

        A bare name may be that of a file anywhere in the repository.
        """
        if line not in self._found:
            known = [path for base in (*self._bases, self.root) if (path := base / line.file).is_file()]
            known += self._named(line.file) if Path(line.file).name == line.file else []
            exact = (path for path in known if self.text(path, line.number).strip() == line.source)
            self._found[line] = next(exact, known[0] if known else None)
        return self._found[line]

    def at(self, line: Line | None) -> At | None:
        """The line in its file; None where there is no such file, and for None."""
        path = self.find(line) if line else None
        if line is None or path is None:
            return None
        return At(path, self.relative(path), line.number, self.text(path, line.number) or line.source)

    def definition(self, line: Line) -> At | None:
        """The ``def`` of a function whose first decorator is at this line, or the line itself."""
        path = self.find(line)
        if path is None:
            return None
        for number in range(line.number, line.number + _MOST_DECORATORS):
            if self.text(path, number).lstrip().startswith(("def ", "async def ")):
                return self.at(Line(line.file, number))
        return self.at(line)

    def lines(self, path: Path) -> Sequence[str]:
        """The lines of a file, without their ends; none where it cannot be read."""
        if path not in self._read:
            try:
                self._read[path] = path.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                self._read[path] = ()
        return self._read[path]

    def text(self, path: Path, number: int) -> str:
        """One line of a file, counted from 1; empty where there is none."""
        lines = self.lines(path)
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def relative(self, path: Path) -> str:
        """A path from the root of the repository, with ``/``; the whole path for a file outside of it."""
        path = path.resolve()
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.as_posix()

    def shown(self, line: Line) -> str:
        """The file of a line from the first base that it lies in, as findings name it; as it is where it lies in none
        or is not found."""
        path = self.find(line)
        base = next((base for base in self._bases if path and path.resolve().is_relative_to(base)), None)
        return path.resolve().relative_to(base).as_posix() if path and base else line.file

    def _named(self, name: str) -> list[Path]:
        if self._by_name is None:
            self._by_name = {}
            for path in _sources(self.root):
                self._by_name.setdefault(path.name, []).append(path)
        return self._by_name.get(name, [])


def repository(start: Path) -> Path:
    """The root of the repository that a folder lies in; without one the workspace of the CI job, or the folder."""
    for folder in (start, *start.parents):
        if (folder / ".git").exists():
            return folder
    for variable in ("GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        given = os.environ.get(variable)
        if given and start.is_relative_to(Path(given).resolve()):
            return Path(given).resolve()
    return start


def _sources(root: Path) -> Iterator[Path]:
    """The Python files below a folder, but for those of installed packages and of what is hidden."""
    for count, (folder, below, names) in enumerate(os.walk(root)):
        if count == _MOST_FOLDERS:
            return
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in _NOT_SEARCHED)
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
