"""The colours of a map: how a value becomes an opacity, and where a 0 is marked. Numbers as one writes them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_DECADES = 2.0
"""Powers of ten that a logarithmic ramp spans at least: a row is far below the others at a tenth of their size, and a
factor of three must not look like it."""


def span(picture: Mapping[str, Any]) -> tuple[str, str]:
    """The values at the two ends of the ramp of a map; empty where the map has no value."""
    if not _known(picture["cells"], picture["colour"]):
        return "", ""
    low, high = _ends(picture["cells"], picture["colour"])
    if _is_log(picture["colour"]):
        low, high = 10**low, 10**high
    return plain(low), plain(high)


def opacity(cells: Sequence[Sequence[float | None]], colour: Mapping[str, Any]) -> list[list[float]]:
    """Each cell's place on the ramp; 0 for a gap, and a little for the lower end."""
    log = _is_log(colour)
    low, high = _ends(cells, colour)
    width, least = high - low or 1.0, 0.14 if log else 0.04  # so that a small value does not look like 0

    def share(cell: float) -> float:
        return ((math.log10(cell) if log else cell) - low) / width

    return [
        [0.0 if cell is None or (log and cell <= 0) else least + (1 - least) * share(cell) for cell in row]
        for row in cells
    ]


def zeros(row: Sequence[float | None], colour: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The stretches of a row, from where and how long, whose 0 is marked: none where a 0 means nothing of its own."""
    if not colour.get("zero"):
        return []
    found, at = [], 0
    for is_zero, cells in itertools.groupby(row, lambda cell: cell == 0):
        length = len(list(cells))
        if is_zero:
            found.append((at - 0.5, float(length)))
        at += length
    return found


def plain(value: float | str, digits: int = 3) -> str:
    """A number as one writes it: 0.003, 3e-4, 12,000."""
    if isinstance(value, str):
        return value
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{max(digits, 5)}g}" if float(value).is_integer() else f"{value:.{digits}g}"
        return f"{int(value):,}" if float(value).is_integer() else text
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def _is_log(colour: Mapping[str, Any]) -> bool:
    return colour.get("scale") == "log"


def _known(cells: Sequence[Sequence[float | None]], colour: Mapping[str, Any]) -> list[float]:
    """The values that have a place on the ramp."""
    log = _is_log(colour)
    return [cell for row in cells for cell in row if cell is not None and (cell > 0 or not log)]


def _ends(cells: Sequence[Sequence[float | None]], colour: Mapping[str, Any]) -> tuple[float, float]:
    """The ends of the ramp, as logarithms where it is logarithmic."""
    known = _known(cells, colour)
    if _is_log(colour):
        known = [math.log10(value) for value in known]
        high = max(known, default=1.0)
        return min(*known, high - LEAST_DECADES) if known else high - LEAST_DECADES, high
    return min([0.0, *known]), max(known, default=1.0)
