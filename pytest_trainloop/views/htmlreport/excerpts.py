"""A few lines of the user's source around a line that a finding names, read when the page is made.

A line is shown only where the file still has it, word for word: a report may be turned into a page after an edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_trainloop.core.report.lines import Line, Places

AROUND = 3
"""Lines shown above and below."""

_LONGEST = 400
"""Characters of a line that are shown."""

_MOST_LINES = 20_000
"""Lines of a file that are coloured; those of a longer one are shown plain."""

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
    """The file, as the finding names it."""
    lines: tuple[SourceLine, ...]


class Sources:
    """Shows lines of the files that ``places`` finds."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._coloured: dict[Path, Sequence[Tokens]] = {}

    def name(self, line: Line) -> str:
        """The file of a line as findings name it: relative to the folder in which pytest ran, if it lies there."""
        return self._places.shown(line)

    def excerpts(self, named: Mapping[str, Line | None]) -> list[Excerpt]:
        """The excerpts for lines by label; lines near each other in one file share one.

        A line whose file is not found, or does not hold it any more, has none.
        """
        labels: dict[tuple[str, Path], dict[int, list[str]]] = {}
        for label, line in named.items():
            path = self._places.find(line) if line and line.source else None
            number = self._number(path, line) if path and line else None
            if path and line and number:
                labels.setdefault((self.name(line), path), {}).setdefault(number, []).append(label)
        return [
            self._excerpt(file, path, group, own)
            for (file, path), own in labels.items()
            for group in _groups(sorted(own))
        ]

    def _number(self, path: Path, line: Line) -> int | None:
        """Where a file has a line: at its number, else the nearest with the same text."""
        same = [i for i, text in enumerate(self._places.lines(path), 1) if text.strip() == line.source]
        return min(same, key=lambda i: abs(i - line.number), default=None)

    def _excerpt(self, file: str, path: Path, group: Sequence[int], labels: Mapping[int, Sequence[str]]) -> Excerpt:
        if path not in self._coloured:
            text = self._places.lines(path)
            plain = len(text) > _MOST_LINES or path.suffix not in (".py", ".pyi")
            self._coloured[path] = [(("", line[:_LONGEST]),) for line in text] if plain else _coloured(text)
        lines = self._coloured[path]
        first, last = max(1, group[0] - AROUND), min(len(lines), group[-1] + AROUND)
        while _indent(lines[first - 1]) is None:  # a line named has text, so that both end
            first += 1
        while _indent(lines[last - 1]) is None:
            last -= 1
        numbers = range(first, last + 1)
        indent = min(found for n in numbers if (found := _indent(lines[n - 1])) is not None)
        shown = (SourceLine(n, _without(lines[n - 1], indent), tuple(labels.get(n, ()))) for n in numbers)
        return Excerpt(file, tuple(shown))


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


def _coloured(text: Sequence[str]) -> list[Tokens]:
    """The pieces of every line: coloured as a whole, since a line may lie inside of a string."""
    from pygments import lex
    from pygments.lexers.python import PythonLexer

    lines: list[list[tuple[str, str]]] = [[]]
    for kind, value in lex("\n".join(text), PythonLexer(stripnl=False, ensurenl=False)):
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
