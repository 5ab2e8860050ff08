"""Loops with one fault each, beside their repaired twins, by name in ``PAIRS``."""

import importlib
import pkgutil

from ._pair import PAIRS, Pair

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = ["PAIRS", "Pair"]
