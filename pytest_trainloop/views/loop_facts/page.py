"""The card as data and as text, and the difference between two cards. Standard library only.

A stored card is compared line by line without line numbers: an edit above the loop moves all of them and changes
nothing.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MARK = "*"
"""Put behind a value that differs from the common one."""

_WIDTH = 12
"""Columns of the label."""

_CONTEXT = 1
"""Unchanged lines around a change in a diff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the card."""

    label: str
    """What the line is about: "clip"; of a further line about the same, "  group 0" or an empty string."""
    text: str
    where: str = ""
    """``train.py:116``, relative to the project; empty where the fact has no line."""
    odd: bool = False
    """Whether a value in it differs from the common one, and is marked so."""
    seen: bool = True
    """Whether it was looked at: not where a check that knows it was not run."""

    def __str__(self) -> str:
        text = f"{self.label:<{_WIDTH}}{self.text}"
        return f"{text}   {self.where}" if self.where else text


@dataclass(frozen=True, slots=True)
class Card:
    """The facts about one loop, in a fixed order; ``str()`` is the page."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def __getitem__(self, label: str) -> str:
        """The texts under a label, one a line. Raises ``KeyError`` for a label that is not there."""
        found: list[str] = []
        under = ""
        for line in self.lines:
            under = line.label if line.label and not line.label.startswith(" ") else under
            if under == label:
                found.append(str(line)[_WIDTH:] if under == line.label else f"{line.label.strip()} {line.text}".strip())
        if not found:
            raise KeyError(label)
        return "\n".join(found)

    @property
    def odd(self) -> tuple[Line, ...]:
        """The lines with a mark."""
        return tuple(line for line in self.lines if line.odd)

    def to_json(self) -> dict[str, Any]:
        """The card as plain data."""
        return {"lines": [asdict(line) for line in self.lines]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Card:
        """The card that :meth:`to_json` wrote."""
        return cls(tuple(Line(**line) for line in data["lines"]))

    def changes(self, stored: str) -> list[str]:
        """A unified diff from the text of a stored card to this one; empty where nothing but line numbers differs.

        Lines that were not looked at in this run are taken as they are stored.
        """
        old, new = stored.rstrip("\n").split("\n"), self.text(stored).split("\n")
        diff = difflib.unified_diff(
            list(map(_Compared, old)), list(map(_Compared, new)), "stored", "now", lineterm="", n=_CONTEXT
        )
        return list(diff)

    def text(self, stored: str = "") -> str:
        """The page, with the lines that were not looked at in this run as they are stored."""
        old = stored.rstrip("\n").split("\n") if stored.strip() else []
        return "\n".join(text for line in self.lines for text in self._taken(line, old))

    def _taken(self, line: Line, old: list[str]) -> list[str]:
        return [str(line)] if line.seen or not old else (list(_under(line.label, old)) or [str(line)])


def _under(label: str, lines: list[str]) -> Iterator[str]:
    """The stored lines of one label: its first and those below that carry none of their own."""
    inside = False
    for line in lines:
        if not line.startswith(" "):
            inside = line[:_WIDTH].rstrip() == label
        if inside:
            yield line


CALLS = "zero forward backward grad scale unscale update clip write step schedule".split()
"""What the line "one step" is made of, each with its line in parentheses."""

_NUMBERS = re.compile(rf"(?<=\.py):\d+|(?P<call>\b(?:{'|'.join(CALLS)})(?: [\w.\[\]]+)?)\((?:[\w./-]+:)?\d+\)")
"""Line numbers: ``train.py:116``, ``step(116)``."""


class _Compared(str):
    """A line that equals another one with other line numbers."""

    _key: str

    def __new__(cls, text: str) -> _Compared:
        made = super().__new__(cls, text)
        made._key = _NUMBERS.sub(lambda found: found["call"] or "", text)
        return made

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, _Compared) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)
