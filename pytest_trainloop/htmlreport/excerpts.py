"""A few lines of the user's source around a line that a finding names, read when the page is made.

A line is shown only where the file still has it, word for word: a report may be turned into a page after an edit.
"""

from __future__ import annotations

import os
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

AROUND = 3
"""Lines shown above and below."""

_LONGEST = 400
"""Characters of a line that are shown."""

_LARGEST = 1_000_000
"""Characters of a file that are coloured; the lines of a larger one are shown plain."""

_MOST_FOLDERS = 5_000
"""Folders that are looked through for a file of which only the name is known."""

_NOT_SOURCE = frozenset({"site-packages", "node_modules", "__pycache__", "build", "dist"})

Tokens = tuple[tuple[str, str], ...]
"""The pieces of a line: their kind ("keyword", "string", "comment", "number", "name", "" for plain), and the text."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    number: int
    tokens: Tokens
    labels: tuple[str, ...] = ()
    """What the finding says of this line: "change", "seen at"."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    file: str
    lines: tuple[SourceLine, ...]


@dataclass(slots=True)
class Sources:
    """Finds and reads files in ``folders``, the first that has one."""

    folders: tuple[Path, ...]
    _found: dict[str, list[Path]] = field(default_factory=dict)
    _by_name: dict[str, list[Path]] | None = None
    _texts: dict[Path, str] = field(default_factory=dict)
    _coloured: dict[Path, list[Tokens]] = field(default_factory=dict)

    def excerpts(self, places: Mapping[str, str]) -> list[Excerpt]:
        """The excerpts for ``file:line   source`` by label; places near each other in one file share one.

        A place whose file is not found, or holds another line there, has none.
        """
        labels: dict[tuple[str, Path], dict[int, list[str]]] = {}
        for label, place in places.items():
            shown, line, code = parts(place)
            at = self._where(shown, line, code)
            if at is not None:
                labels.setdefault((shown, at[0]), {}).setdefault(at[1], []).append(label)
        return [
            self._excerpt(shown, file, group, own)
            for (shown, file), own in labels.items()
            for group in _groups(sorted(own))
        ]

    def _where(self, shown: str, line: int, code: str) -> tuple[Path, int] | None:
        """The file and the line that hold ``code``: the line that was named, else the nearest."""
        if not shown or not line or not code:
            return None
        found = []
        for file in self._files(shown):
            lines = self._text(file).rstrip("\n").split("\n")
            same = [number for number, text in enumerate(lines, 1) if text.strip() == code.strip()]
            if same:
                found.append((file, min(same, key=lambda number: abs(number - line))))
        exact = [at for at in found if at[1] == line]
        only = exact if len(exact) == 1 else found
        return only[0] if len(only) == 1 else None

    def _files(self, shown: str) -> list[Path]:
        if shown not in self._found:
            direct = (file for folder in self.folders if (file := folder / shown).is_file())
            nearest = next(direct, None)
            self._found[shown] = [nearest] if nearest else self._elsewhere(shown)
        return self._found[shown]

    def _elsewhere(self, shown: str) -> list[Path]:
        """Files below the folders that end like this: messages shorten what lies outside of the working directory."""
        if self._by_name is None:
            self._by_name = {}
            for file in dict.fromkeys(file for folder in self.folders for file in _python_files(folder)):
                self._by_name.setdefault(file.name, []).append(file)
        name = Path(shown)
        return [file for file in self._by_name.get(name.name, []) if file.parts[-len(name.parts) :] == name.parts]

    def _excerpt(self, shown: str, file: Path, group: tuple[int, ...], labels: Mapping[int, Sequence[str]]) -> Excerpt:
        if file not in self._coloured:
            text = self._text(file).rstrip("\n")
            plain = len(text) > _LARGEST or file.suffix not in (".py", ".pyi")
            self._coloured[file] = [(("", line[:_LONGEST]),) for line in text.split("\n")] if plain else _coloured(text)
        lines = self._coloured[file]
        numbers = range(max(1, group[0] - AROUND), min(len(lines), group[-1] + AROUND) + 1)
        indent = min(found for n in numbers if (found := _indent(lines[n - 1])) is not None)  # a line named has text
        return Excerpt(
            shown, tuple(SourceLine(n, _without(lines[n - 1], indent), tuple(labels.get(n, ()))) for n in numbers)
        )

    def _text(self, file: Path) -> str:
        if file not in self._texts:
            try:
                with tokenize.open(file) as stream:
                    self._texts[file] = stream.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                self._texts[file] = ""
        return self._texts[file]


def parts(place: str) -> tuple[str, int, str]:
    """File, line and source of a ``file:line   source``; an empty file for other text."""
    at, _, code = place.partition("   ")
    file, colon, number = at.rpartition(":")
    return (file, int(number), code.strip()) if colon and number.isdecimal() else ("", 0, "")


def _groups(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Line numbers that one excerpt shows."""
    group: list[int] = []
    for number in numbers:
        if group and number - group[-1] > 2 * AROUND + 1:
            yield tuple(group)
            group = []
        group.append(number)
    if group:
        yield tuple(group)


def _coloured(text: str) -> list[Tokens]:
    """The pieces of every line: coloured as a whole, since a line may lie inside of a string."""
    from pygments import lex
    from pygments.lexers.python import PythonLexer

    lines: list[list[tuple[str, str]]] = [[]]
    for kind, value in lex(text, PythonLexer(stripnl=False, ensurenl=False)):
        for i, piece in enumerate(value.split("\n")):
            if i:
                lines.append([])
            if piece:
                lines[-1].append((_kind(str(kind)), piece))
    return [tuple(_shortened(line)) for line in lines]


def _indent(line: Tokens) -> int | None:
    """Blanks at the beginning of a line; None for a line without anything else."""
    text = "".join(text for _, text in line)
    return len(text) - len(text.lstrip()) if text.strip() else None


def _without(line: Tokens, indent: int) -> Tokens:
    """A line without its first letters."""
    shorter = []
    for kind, text in line:
        shorter.append((kind, text[indent:]))
        indent = max(0, indent - len(text))
    return tuple((kind, text) for kind, text in shorter if text)


def _shortened(line: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    left = _LONGEST
    for kind, text in line:
        if left > 0:
            yield kind, text[:left] + ("…" if len(text) > left else "")
        left -= len(text)


_KINDS = {
    "Token.Keyword": "keyword",
    "Token.Operator.Word": "keyword",
    "Token.Literal.String": "string",
    "Token.Comment": "comment",
    "Token.Literal.Number": "number",
    "Token.Name.Function": "name",
    "Token.Name.Class": "name",
    "Token.Name.Decorator": "name",
}


def _kind(kind: str) -> str:
    return next((name for start, name in _KINDS.items() if kind.startswith(start)), "")


def _python_files(folder: Path) -> Iterator[Path]:
    """The Python files of a project, without those of its environments."""
    seen = 0
    for here, folders, files in os.walk(folder):
        seen += 1
        if seen > _MOST_FOLDERS:
            return
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_SOURCE)
        yield from (Path(here, name) for name in sorted(files) if name.endswith(".py"))
