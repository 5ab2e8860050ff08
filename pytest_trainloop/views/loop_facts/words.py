"""Numbers and names as the card shows them: two digits, the same on every machine. Standard library only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.views.loop_facts.page import MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG = 80
"""Characters of several names."""

_PLAIN = range(-3, 6)
"""Powers of ten that are written out."""


def two(value: float) -> str:
    """A number to two digits: 0.00097, 1,200, 1e-7."""
    if math.isnan(value) or math.isinf(value):
        return str(value)
    mantissa, _, power = f"{value:.1e}".partition("e")
    if float(mantissa) == 0:
        return "0"
    if int(power) in _PLAIN:
        rounded = float(f"{value:.1e}")
        return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:.{1 - int(power)}f}".rstrip("0").rstrip(".")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def percent(part: float) -> str:
    """A share to two digits: "0.31 %"; all and nothing as such."""
    return f"{two(100 * part)} %"


def span(first: float, last: float) -> str:
    """A value at the first and at the last moment; one number where they agree to two digits."""
    return two(first) if two(first) == two(last) else f"{two(first)} -> {two(last)}"


def marked(text: str, odd: bool) -> str:
    """The text, with the mark behind it where the value is not the common one."""
    return f"{text} {MARK}" if odd else text


def names(of: Sequence[str], most: int = 3) -> str:
    """The first names, fewer of long ones, and how many more there are."""
    while most > 1 and len(", ".join(of[:most])) > LONG:
        most -= 1
    shown = ", ".join(of[:most])
    return shown if len(of) <= most else f"{shown} and {len(of) - most:,} more"


_PLURALS = {"matrix": "matrices", "bias": "biases"}


def numbered(number: int, thing: str) -> str:
    """A number of things: "1 step", "2,000 steps", "2 passes", "3 matrices"."""
    if number == 1:
        return f"1 {thing}"
    plural = _PLURALS.get(thing) or f"{thing}{'es' if thing.endswith(('s', 'ch', 'x')) else 's'}"
    return f"{number:,} {plural}"
