"""Importing the files that hold the corpora: all of them, or under ``-k`` those that can hold what is asked for."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
V = TypeVar("V")

WORDS: list[str] = []
"""The words of ``-k``, without the operators; empty without ``-k`` and where it denies a word."""

_BY_REGISTRY = {"tests/loops/test_corpus.py", "tests/losses/test_corpus.py", "tests/checks/test_every_check.py"}
"""Test files whose ids are names that do not occur in them: those of pairs, checks and causes."""


def set_words(expression: str) -> None:
    """Note the words of ``-k``. "step_order-not_zeroed" counts as two: an id is made of both."""
    words = re.findall(r"[^\s()]+", expression.lower())
    asked = () if "not" in words else (word for word in words if word not in ("and", "or"))
    WORDS[:] = [part for word in asked for part in re.findall(r"\w+", word)]


def may_match(file: Path) -> bool:
    """Whether a test of this file can be one that ``-k`` selects: a word occurs in its path, in its text, or in that of
    a file of the tests which it imports."""
    name = file.relative_to(ROOT).as_posix()
    return not WORDS or name in _BY_REGISTRY or any(_mentioned(path) for path in (file, *_imported(file)))


def all_need_frameworks(file: Path) -> bool:
    """Whether all tests of a file are marked ``integration``."""
    return (
        re.search(r"^pytestmark = .*pytest\.mark\.integration", file.read_text(encoding="utf-8"), re.MULTILINE)
        is not None
    )


@cache
def _mentioned(file: Path) -> bool:
    text = f"{file.relative_to(ROOT).as_posix()}\n{file.read_text(encoding='utf-8')}".lower()
    return any(word in text for word in WORDS)


@cache
def _asks_for_a_whole_corpus() -> bool:
    """Whether a word occurs in the name of a test that runs with every loop."""
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in _BY_REGISTRY)
    names = [name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    return any(word in name for word in WORDS for name in names)


@cache
def _imported(file: Path) -> tuple[Path, ...]:
    modules = re.findall(r"^(?:from|import) (tests[\w.]*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    paths = [ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    return tuple(path for path in paths if path.is_file())


def import_all(*patterns: str, every: bool = False) -> None:
    """Import the modules whose files match one of these patterns below the top of the repository; under ``-k`` those
    that may match, or ``every`` one."""
    files = {file for pattern in patterns for file in ROOT.glob(pattern)}
    every = every or _asks_for_a_whole_corpus()
    for file in sorted(files):
        if every or may_match(file):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


class Corpus(dict[str, V]):
    """What a corpus holds by name. Asked for a name that it lacks it imports the files that ``-k`` has left out."""

    def __init__(self, home: str) -> None:
        super().__init__()
        self._home = home

    def __missing__(self, name: str) -> V:
        self.load_all()
        if name not in self:
            raise KeyError(name)
        return self[name]

    def load_all(self) -> None:
        """Import the files that ``-k`` has left out."""
        home: Any = importlib.import_module(self._home)
        import_all(*home.FILES, every=True)
