"""Terms of a loss in a dict, and a dict of their weights that calls them by other names.

Both are found in the frames of the project that multiply a term by a number: a dict of single numbers with a history,
and one of plain numbers that has a key in common with it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.every_term_trains.names import words_of
from pytest_trainloop.ours import is_ours
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.recording.torch_names import MULTIPLICATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from pytest_trainloop.tracing.terms import Scalar

_PRODUCTS = MULTIPLICATIONS | {"__imul__"}
FRAMES = 3


@dataclass(frozen=True, slots=True)
class Unweighted:
    """A term that the weights do not name, and a weight that no term asks for."""

    term: str
    weight: str
    number: float
    place: str
    scalar: Scalar
    others: tuple[str, ...]
    """Names that both have."""


class WeightTables:
    """Looks at the products of a run; ``unweighted`` holds what was seen, one for each name."""

    def __init__(self) -> None:
        self.unweighted: dict[tuple[str, str], Unweighted] = {}
        self._seen: dict[tuple[str, int], int] = {}

    def look(self, name: str, args: tuple[Any, ...], scalar_of: Callable[[torch.Tensor], Scalar | None]) -> None:
        """Gets every call, by ``RootTerms``."""
        if name not in _PRODUCTS or not any(isinstance(a, torch.Tensor) and a.numel() == 1 for a in args):
            return
        place, site = here()
        if self._seen.get(site[:1][0] if site else ("", 0), 0) >= 4:
            return
        if site:
            self._seen[site[0]] = self._seen.get(site[0], 0) + 1
        tables = [table for frame in user_frames(FRAMES) for table in _tables(frame)]
        for terms in tables:
            for weights in tables:
                self._compare(terms, weights, str(place), scalar_of)

    def _compare(
        self,
        terms: Mapping[str, Any],
        weights: Mapping[str, Any],
        place: str,
        scalar_of: Callable[[torch.Tensor], Scalar | None],
    ) -> None:
        shared = [name for name in terms if _is_term(terms[name]) and _is_number(weights.get(name))]
        if not shared or any(isinstance(value, torch.Tensor) for value in weights.values()):
            return
        absent = [name for name in terms if _is_term(terms[name]) and not weights.get(name)]
        strays = [name for name in weights if name not in terms and _is_number(weights[name]) and weights[name]]
        for term in absent:
            alike = [stray for stray in strays if _alike(term, stray)]
            scalar = scalar_of(terms[term])
            if len(alike) == 1 and scalar is not None:
                found = Unweighted(term, alike[0], float(weights[alike[0]]), place, scalar, tuple(shared))
                self.unweighted.setdefault((term, alike[0]), found)


def _tables(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """The dicts with names as keys among the variables of a frame, and among the attributes of its objects."""
    for value in list(frame.f_locals.values()):
        if is_ours(value):
            continue
        inside = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
        for table in (value, *inside[:64]):
            if isinstance(table, Mapping) and 2 <= len(table) <= 64 and all(isinstance(key, str) for key in table):
                yield table


def _is_term(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _alike(one: str, other: str) -> bool:
    """Whether two names are of one thing: words in common beside "loss", or one within the other."""
    a, b = (words_of(name) - {"loss", "losses", "weight", "w", "lambda", "coef", "coeff"} for name in (one, other))
    short, long = sorted(("".join(sorted(a)), "".join(sorted(b))), key=len)
    if a & b:
        return True
    same = {x for x in a for y in b if len(min(x, y, key=len)) >= 2 and (x in y or y in x)}
    return bool(same) or (len(short) >= 3 and short in long)
