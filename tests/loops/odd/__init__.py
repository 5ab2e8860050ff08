"""Odd but correct training loops: each looks wrong to some textbook rule, none has a fault.

Importing this package fills ``ODD``. A loop is added by one decorated function in any file beside this one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from pytest_trainloop.loop import TrainLoop

Make = Callable[..., TrainLoop]


@dataclass(frozen=True, slots=True)
class OddLoop:
    """One loop of the corpus. ``fixed_seed_ok``: two runs under one seed are bit-equal."""

    name: str
    make: Make
    why: str
    fixed_seed_ok: bool = True


ODD: dict[str, OddLoop] = {}


def odd(*, notes: str, fixed_seed_ok: bool = True) -> Callable[[Make], Make]:
    """Register a function that builds a loop; ``notes`` says why the loop looks odd."""

    def register(make: Make) -> Make:
        name = make.__name__
        if name in ODD:
            raise ValueError(f"two odd loops are named {name!r}: {ODD[name].make.__module__} and {make.__module__}")
        ODD[name] = OddLoop(name, make, notes, fixed_seed_ok)
        return make

    return register


for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
