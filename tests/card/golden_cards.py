"""The cards of the loops in ``loops/``, as they are stored in ``golden/``.

A loop is a file with a function ``make``. After a change that is meant: ``python scripts/cards.py``, and read the diff.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest_trainloop

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

CHECKS = ("evaluation_is_pure", "resume_equivalence", "data_order", "activations_alive")
"""Those whose findings are lines of the card."""


def loops() -> list[str]:
    """The names of all loops."""
    return sorted(file.stem for file in (FOLDER / "loops").glob("*.py"))


def golden(name: str) -> Path:
    """The file of the stored card."""
    return FOLDER / "golden" / f"{name}.card.txt"


def card_of(name: str) -> pytest_trainloop.Card:
    """The card of a loop as it is now. The working directory is to be that of the repository."""
    make = importlib.import_module(f"tests.card.loops.{name}").make
    return pytest_trainloop.card(make, checks=CHECKS)
