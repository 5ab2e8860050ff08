"""An odd but correct training loop: it looks wrong to some textbook rule, and has no fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytest_trainloop import TrainLoop
from tests.helpers.discovery import Corpus

Make = Callable[..., TrainLoop]


@dataclass(frozen=True, slots=True)
class OddLoop:
    """One loop of the corpus. ``fixed_seed_ok``: two runs under one seed are bit-equal."""

    name: str
    make: Make
    why: str
    fixed_seed_ok: bool = True


ODD: Corpus[OddLoop] = Corpus("tests.loops.corpus")


def odd(*, notes: str, fixed_seed_ok: bool = True, name: str = "{}") -> Callable[[Make], Make]:
    """Register a function that builds a loop; ``notes`` says why the loop looks odd, ``name`` what it is called, with
    {} for the function's own name."""
    called = name

    def register(make: Make) -> Make:
        name = called.format(make.__name__)
        if name in ODD:
            raise ValueError(f"two odd loops are named {name!r}: {ODD[name].make.__module__} and {make.__module__}")
        ODD[name] = OddLoop(name, make, notes, fixed_seed_ok)
        return make

    return register
