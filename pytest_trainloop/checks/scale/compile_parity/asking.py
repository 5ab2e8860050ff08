"""Loops that ask whether they are compiled, and compute otherwise then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.patches import Patches
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTIONS = ("is_compiling", "is_dynamo_compiling")
"""Functions of ``torch.compiler``."""


@contextlib.contextmanager
def places_that_ask(places: dict[str, None]) -> Iterator[None]:
    """Note the lines that ask, in a run that is not compiled."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def asked() -> bool:
            place = here()[0]
            if place.file:
                places[str(place)] = None
            return bool(original())

        return asked

    with Patches() as patches:
        for name in QUESTIONS:
            patches.put(torch.compiler, name, wrap)
        yield


@contextlib.contextmanager
def answered_no() -> Iterator[None]:
    """Who asks is told that nothing is compiled, also where it is."""
    with Patches() as patches:
        for name in QUESTIONS:
            patches.put(torch.compiler, name, lambda original: _no)
        yield


def _no() -> bool:
    return False
