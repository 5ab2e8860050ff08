"""Where what is stored of a loop lies: next to its test file, a folder a test file, a file a loop."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.declare.baseline_file import FOLDER

if TYPE_CHECKING:
    import pytest

CARD = ".card.txt"
BASELINE = ".json"
ON_CUDA = ".cuda.json"
"""The suffixes: of a card, of a baseline, and of one of a run with ``--trainloop-device=cuda``, where other random
numbers are drawn."""

_LONGEST = 120
"""Characters of a name; a longer one ends in a part of its hash, as one with characters that a file cannot have."""


def file_of(item: pytest.Item, loop: str, suffix: str) -> Path:
    """The file of a loop; ``loop`` is its node id."""
    return folder_of(item.path) / f"{name_of(loop, item.name)}{suffix}"


def folder_of(module: Path) -> Path:
    """The folder of a test file."""
    return module.parent / FOLDER / module.stem


def name_of(loop: str, otherwise: str = "") -> str:
    """The name of a loop's files: ``TestGPT.test_tiny[8]``."""
    inside = loop.partition("::")[2].replace("::", ".") or otherwise
    name = re.sub(r"[^\w.\[\]=,+-]", "_", inside)
    if name == inside and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(inside.encode()).hexdigest()[:8]}"


def shown(file: Path, root: Path) -> str:
    """A file relative to the root directory, as it is shown."""
    return Path(os.path.relpath(file, root)).as_posix()
