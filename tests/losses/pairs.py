"""Losses with one fault each, beside their repaired twins, by the check and cause that must be named."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from ._pair import PAIRS, LossPair

for _found in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if _found.name.startswith("faults_"):
        importlib.import_module(f"tests.losses.{_found.name}")

__all__ = ["PAIRS", "LossPair"]
