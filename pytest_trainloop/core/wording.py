"""Names in sentences. Standard library only."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def some(names: Sequence[str], most: int = 2) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def module_of(names: Sequence[str]) -> str:
    """The innermost module that holds all of these parameters; empty where none does, or none has a name."""
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for segments in zip(*parts, strict=False):
        if len(set(segments)) > 1:
            break
        common.append(segments[0])
    return ".".join(common)


def count(number: int, thing: str) -> str:
    """A number of things: ``count(1, "loss")`` is "1 loss", ``count(2, "pass")`` "2 passes"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith(('s', 'tch', 'x')) else 's'}"


def share(part: float) -> str:
    """A relative difference: 0.59 is "59 %"."""
    percent = 100 * part
    if percent >= 0.1 or percent == 0:
        return f"{percent:.3g} %"
    return f"{float(f'{percent:.2g}'):f}".rstrip("0") + " %" if percent >= 1e-4 else f"{percent:.1e} %"


def direction(cosine: float) -> str:
    """How far two vectors agree in direction, with what the number means."""
    return f"direction agreement {cosine:.4g} (1 = same)"


def them(names: Sequence[str]) -> str:
    return "them" if len(names) > 1 else "it"


def they(names: Sequence[str]) -> str:
    return "they" if len(names) > 1 else "it"


def be(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def verb(names: Sequence[str], plural: str) -> str:
    """A regular verb in the right number: ``verb(["a"], "get")`` is "gets"."""
    return plural if len(names) > 1 else f"{plural}s"


class _Template(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if spec.startswith("?"):
            yes, _, no = spec[1:].rpartition("|")
            return yes if value else no
        if isinstance(value, tuple):
            agreeing = {"": some, "are": be, "they": they, "them": them}
            return agreeing[spec](value) if spec in agreeing else verb(value, spec)
        if isinstance(value, int) and spec:
            return count(value, spec)
        return share(value) if spec == "share" else format(value, spec)


def filled(template: str, facts: Mapping[str, Any]) -> str:
    """The template with these facts: ``{names}`` names a few, ``{names:are}``, ``{names:they}``, ``{names:them}`` and
    ``{names:get}`` (any verb) agree with them, ``{steps:step}`` is "1 step" or "2 steps", ``{part:share}`` a
    percentage, ``{late:?yes|no}`` one of two texts (the second holds no ``|``)."""
    return _Template().vformat(template, (), facts)
