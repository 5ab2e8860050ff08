"""Random numbers keyed by row: what a loop draws for a row is the same for this row in every batch that holds it.

Which axis of a draw is that of rows is read off two runs over different numbers of rows (``DrawAxes.between``), never
guessed from a size that may be equal by chance:
- an axis whose size is the number of rows in both runs has a number for each row;
- one that grows in proportion (several samples of a row, two views behind each other, positions of all rows) has the
  same along all of it, since the order of rows in it is not known;
- one that does not grow has its own numbers, but for the first of a draw without an axis of rows: how many there are
  may depend on what the rows hold.
What fits none of these is drawn the same for all rows, and ``DrawAxes.unknown`` says where.

Draws of one kind and number of axes are matched by their order in a batch, where it is the same in both runs: two
views get two noises. Where there are as many more as rows (a loop over rows), each row's is the same.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.recording.shards import address
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.shared_draws import drawn, same_for_every_row, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

Axis = Literal["rows", "fixed", "grows"]
"""The kind of an axis of a draw: one entry for each row; as many for any number of rows; several for each row."""

Kind = tuple[str, int]
"""The name of a function that draws, and the number of axes of what it gave."""


@dataclass(slots=True)
class DrawLog:
    """The shapes of what a run drew for its first batch, by kind and in order, and the line of each."""

    shapes: dict[Kind, list[tuple[int, ...]]] = field(default_factory=dict)
    places: dict[Kind, list[str]] = field(default_factory=dict)

    def may_have_rows_behind(self, rows: int) -> bool:
        """Whether an axis but the first has as many entries as there are rows, or as some of equal parts of them."""
        return any(n > 1 and rows % n == 0 for shapes in self.shapes.values() for shape in shapes for n in shape[1:])

    def note(self, kind: Kind, shape: Sequence[int]) -> None:
        self.shapes.setdefault(kind, []).append(tuple(shape))
        self.places.setdefault(kind, []).append(str(here()[0]))


@dataclass(frozen=True, slots=True)
class DrawAxes:
    """The kinds of the axes of each draw; ``in_order``: kinds of draws that are matched by their position in the
    sequence."""

    axes: Mapping[Kind, tuple[tuple[Axis, ...], ...]] = field(default_factory=dict)
    in_order: frozenset[Kind] = frozenset()
    unknown: tuple[str, ...] = ()
    """Draws of which no axis of rows is known, as ``randn of shape (4, 4), train.py:12``."""

    @classmethod
    def between(cls, many: DrawLog, few: DrawLog, rows: int, fewer_rows: int) -> DrawAxes:
        """From the draws of two runs, over ``rows`` rows and over fewer."""
        known: dict[Kind, tuple[tuple[Axis, ...], ...]] = {}
        in_order: set[Kind] = set()
        unknown: dict[str, None] = {}
        for kind, shapes in many.shapes.items():
            fewer = few.shapes.get(kind, [])
            if len(fewer) == len(shapes):
                in_order.add(kind)
            elif len(set(fewer)) == len(set(shapes)) == 1:
                shapes, fewer = shapes[:1], fewer[:1]
            else:
                fewer = []
            read = [_axes(a, b, rows, fewer_rows) for a, b in zip(shapes, fewer, strict=False)]
            for nth, found in enumerate(read or [None] * len(shapes)):
                if found is None:
                    unknown[f"{kind[0]} of shape {shapes[nth]}, {many.places[kind][nth]}"] = None
            sure = [axes for axes in read if axes is not None]
            if sure and len(sure) == len(read):
                known[kind] = tuple(sure)
            else:
                in_order.discard(kind)
        return cls(known, frozenset(in_order), tuple(unknown))

    def of(self, kind: Kind, nth: int) -> tuple[Axis, ...] | None:
        """The axes of the nth draw of a kind in a batch; None where they are not known."""
        known = self.axes.get(kind, ())
        if kind not in self.in_order:
            return known[0] if known else None
        return known[nth] if nth < len(known) else None


def _axes(many: Sequence[int], few: Sequence[int], rows: int, fewer: int) -> tuple[Axis, ...] | None:
    found: list[Axis] = []
    for a, b in zip(many, few, strict=True):
        if (a, b) == (rows, fewer):
            found.append("rows")
        elif a == b:
            found.append("fixed")
        elif a * fewer == b * rows:
            found.append("grows")
        else:
            return None
    return tuple(found)


class RowDraws(NoRandomness):
    """``NoRandomness`` in which draws are keyed by the rows of the batch that the loop has at hand.

    ``keys`` are those of the rows of each item that the loop is given, in order; ``next_item`` is to be called with
    each of them (``RunPlan.before_item``). A loop may take several items before it uses one: at hand is the one whose
    tensors torch was last called with. Without keys all rows get the same, along whichever axis they are. Without
    ``axes`` they are taken to be the first axis, and ``log`` notes what is drawn.
    """

    def __init__(self, keys: Sequence[Sequence[Hashable]], axes: DrawAxes | None = None) -> None:
        super().__init__()
        self._keys = [[zlib.crc32(repr(key).encode()) for key in rows] for rows in keys]
        self._axes = axes
        self.log = DrawLog()
        self._item = 0
        self._items: dict[int, tuple[int, torch.Tensor]] = {}
        """The tensors of each item by address, which no other may take meanwhile."""
        self._drawn: dict[tuple[int, Kind], int] = {}

    def next_item(self, number: int, item: Any) -> None:
        """Note that the loop takes an item."""
        self._item = number
        if self._axes is not None and self._axes.axes:
            self._items |= {place: (number, t) for t in nested.tensors(item) if (place := address(t))}

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._items and args and type(args[0]) is torch.Tensor:
            self._look_at(args[:2])
        return super().call(name, func, args, kwargs)

    def _look_at(self, args: tuple[Any, ...]) -> None:
        for value in args:
            if type(value) is torch.Tensor:
                self._item, _ = self._items.get(address(value), (self._item, None))

    def replaced(self, name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not drawn(name, out):
            return out
        kind = name, out.dim()
        nth = self._drawn.get((self._item, kind), 0)
        self._drawn[self._item, kind] = nth + 1
        if self._axes is None or not self._axes.axes:
            if not self._item:
                self.log.note(kind, out.shape)
            return shared(name, out, args, kwargs)
        axes = self._axes.of(kind, nth)
        keys = self._keys[self._item % len(self._keys)] if self._keys else []
        by_row = axes is not None and "rows" in axes
        if axes is None or (keys and any(a == "rows" and n != len(keys) for a, n in zip(axes, out.shape, strict=True))):
            return shared(name, out, args, kwargs)

        def coordinates(shape: Sequence[int]) -> list[torch.Tensor]:
            along = same_for_every_row((0, *shape))[1:] if by_row else same_for_every_row(shape)
            found = []
            for axis, places in zip(axes, along, strict=True):
                of_rows = torch.tensor(keys) if keys and axis == "rows" else torch.zeros_like(places)
                found.append(places if axis == "fixed" else of_rows)
            return found

        return shared(name, out, args, kwargs, coordinates, str(nth) if keys and kind in self._axes.in_order else "")
