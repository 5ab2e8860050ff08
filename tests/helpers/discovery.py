"""Importing the files that hold the corpora."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def import_all(*patterns: str) -> None:
    """Import every module whose file matches one of these patterns below the top of the repository."""
    files = {file.relative_to(ROOT) for pattern in patterns for file in ROOT.glob(pattern)}
    for file in sorted(files):
        importlib.import_module(".".join(file.with_suffix("").parts))
