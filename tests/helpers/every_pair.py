"""Tests that run with every pair of a corpus, and with one cheap pair a cause."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def number(name: str) -> int:
    """A number of a name by which a part of a corpus is chosen: it stays when others come and go."""
    return zlib.crc32(name.encode())


def quick(pairs: Mapping[str, Any]) -> set[str]:
    """Names of the pairs that stand for their causes: the one that says so, else the first by name."""
    chosen: dict[tuple[str, str], str] = {}
    for name, pair in sorted(pairs.items(), key=lambda entry: (not getattr(entry[1], "quick", False), entry[0])):
        chosen.setdefault((pair.check, pair.cause), name)
    return set(chosen.values())


def parametrized(pairs: Mapping[str, Any]) -> Any:
    """Run a test with every pair; ``-m quick`` selects one a cause, ``-k`` goes by check, cause and name."""
    chosen = quick(pairs)
    return _parametrized(pairs, lambda name: [pytest.mark.quick] if name in chosen else [])


def parametrized_eighth(pairs: Mapping[str, Any]) -> Any:
    """The same for one cheap pair a cause and every eighth of the others; the rest has the marker ``corpus``."""
    chosen = quick(pairs)

    def marks(name: str) -> list[Any]:
        return [pytest.mark.quick] if name in chosen else [] if number(name) % 8 == 0 else [pytest.mark.corpus]

    return _parametrized(pairs, marks)


def parametrized_quick(pairs: Mapping[str, Any], *, every: int = 1) -> Any:
    """The same for one cheap pair a cause, or of every so manieth cause; the others have the marker ``corpus``."""
    chosen = {name for name in quick(pairs) if number(name) % every == 0}
    return _parametrized(pairs, lambda name: [pytest.mark.quick if name in chosen else pytest.mark.corpus])


def parametrized_in_corpus(pairs: Mapping[str, Any]) -> Any:
    """The same for a test that is a part of the marker ``corpus`` only."""
    return _parametrized(pairs, lambda name: [pytest.mark.corpus])


def _parametrized(pairs: Mapping[str, Any], marks: Callable[[str], list[Any]]) -> Any:
    params = [pytest.param(pair, id=_id(pair), marks=marks(name)) for name, pair in pairs.items()]
    return pytest.mark.parametrize("pair", params)


def _id(pair: Any) -> str:
    own = pair.name if pair.name.startswith(f"{pair.cause}-") else f"{pair.cause}-{pair.name}"
    return f"{pair.check}-{own}"
