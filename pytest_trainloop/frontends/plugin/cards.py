"""``--trainloop-card``: an item for each loop that takes its card, and the stored cards next to the tests.

The item comes behind the checks of its loop, uses their runs and results, and always passes. The card travels on its
report to whoever prints it: a stored card is read and written there, by one process.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trainloop.core.errors import BrokenCheck
from pytest_trainloop.declare.baseline_file import is_written, write
from pytest_trainloop.frontends.plugin import pictures, stored
from pytest_trainloop.frontends.plugin.collect import marked_function
from pytest_trainloop.frontends.plugin.nodeids import CARD, check_in, loop_of
from pytest_trainloop.views.loop_facts.page import Card, Line

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.declare.baseline_file import Mode
    from pytest_trainloop.judging.battery import Subject

PROPERTY = "trainloop-card"
"""The key in an item's user properties; the value is one JSON string."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Put each card behind the last check of its loop, whoever else orders the items."""
    yield
    cards: dict[str, pytest.Item] = {}
    last: dict[str, int] = {}
    for number, item in enumerate(items):
        found = marked_function(item)
        if found is not None:
            loop = loop_of(item.nodeid, found[0])
            last[loop] = number
            if found[0] == CARD:
                cards[loop] = item
    behind = {last[loop]: card for loop, card in cards.items()}
    moved = {id(card) for card in cards.values()}
    ordered: list[pytest.Item] = []
    for number, item in enumerate(items):
        ordered += [] if id(item) in moved else [item]
        ordered += [behind[number]] if number in behind else []
    items[:] = ordered


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Do not count cards as passed tests: a card checks nothing."""
    made = report.when == "call" and report.passed and check_in(report.nodeid) == CARD
    return ("cards", "c", "CARD") if made and PROPERTY in dict(report.user_properties) else None


def take(item: pytest.Function, loop: str, subject: Subject, results: Mapping[str, Result]) -> None:
    """Note the card of a loop on its item, and its pictures where they are drawn. Whatever goes wrong is a warning: it
    fails nobody's session."""
    from pytest_trainloop.views.loop_facts.make import card_of

    base = item.config.rootpath
    try:
        if pictures.wanted(item.config):
            from pytest_trainloop.views.pictures.make import card_and_pictures

            card, drawn = card_and_pictures(subject, results, base=base)
            pictures.note(item, loop, drawn)
        else:
            card = card_of(subject, results, base=base)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"the card could not be made; {reason}; please report it", BrokenCheck, stacklevel=2)
        card = Card((Line(label="run", text=f"none seen: a mistake in the card ({reason})"),))
    note(item, loop, card)


def note(item: pytest.Item, loop: str, card: Card) -> None:
    """Put a card on the item's report."""
    file = stored.shown(stored.file_of(item, loop, stored.CARD), item.config.rootpath)
    taken = Taken(loop=loop, file=file, card=card)
    item.user_properties.append((PROPERTY, json.dumps(taken.to_json())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The card of one loop, as its item took it."""

    loop: str
    file: str
    card: Card

    def to_json(self) -> dict[str, Any]:
        return {"loop": self.loop, "file": self.file, "card": self.card.to_json()}

    @classmethod
    def from_report(cls, report: pytest.TestReport) -> list[Taken]:
        """The cards that a report carries."""
        found = [json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY]
        return [cls(loop=f["loop"], file=f["file"], card=Card.from_json(f["card"])) for f in found]


class Cards:
    """The cards of a session: compared with the stored ones, stored where that is asked for, and shown."""

    def __init__(self, root: Path, *, mode: Mode, shown: bool = True) -> None:
        self._root = root
        self._mode = mode
        self._in_terminal = shown
        self._taken: dict[str, Taken] = {}
        self._changes: dict[str, list[str] | None] = {}

    def note(self, report: pytest.TestReport) -> None:
        for taken in Taken.from_report(report) if report.when == "call" else ():
            self._taken[taken.loop] = taken

    def settle(self) -> None:
        """Compare each card with the stored one, and store it with ``--trainloop-update``."""
        for loop, taken in sorted(self._taken.items()):
            file = self._root / taken.file
            text = file.read_text(encoding="utf-8") if file.is_file() else None
            self._changes[loop] = None if text is None else taken.card.changes(text)
            if is_written(self._mode, is_there=text is not None) and taken.card.text(text or "") != (text or "").rstrip(
                "\n"
            ):
                write(file, f"{taken.card.text(text or '')}\n")

    def to_json(self) -> dict[str, dict[str, Any]]:
        """By loop: the lines, the file of the stored card, and the difference from it (None where none is stored)."""
        return {
            loop: {**taken.card.to_json(), "file": taken.file, "changes": self._changes.get(loop)}
            for loop, taken in sorted(self._taken.items())
        }

    def shown(self) -> list[tuple[str, list[str]]]:
        """The lines for the terminal, by loop: the page; where a card is stored what changed since."""
        if not self._in_terminal:
            return []
        return [(loop, self._shown(taken)) for loop, taken in sorted(self._taken.items())]

    def _shown(self, taken: Taken) -> list[str]:
        changes = self._changes.get(taken.loop)
        if changes is None:
            done = (
                "stored in" if self._mode != "check" else "not stored yet; --trainloop-card --trainloop-update writes"
            )
            return [*str(taken.card).splitlines(), f"{done} {taken.file}"]
        if not changes:
            return [f"unchanged: {taken.file}"]
        return [*changes, f"{'stored in' if self._mode == 'update' else 'differs from'} {taken.file}"]
