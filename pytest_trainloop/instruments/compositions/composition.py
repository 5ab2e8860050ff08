"""What a batch is composed of: rows of the example batch, cut into micro-batches, and what else is changed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pytest_trainloop.core.finding import SmallestBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 8
"""Rows that are listed one by one."""


class Change(Protocol):
    """What is changed of a batch besides its rows, in words as "1 more padded position on the left". Hashable: equal
    changes make equal batches."""

    def apply(self, batch: Any) -> Any:
        """The changed batch. Given is a copy of the whole example batch; the rows are taken from what is returned."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Composition:
    """A batch, or the micro-batches of one window. Its ``str`` is what a failure shows as ``smallest``."""

    rows: tuple[int, ...]
    """Rows of the example batch, in this order; one may occur several times."""
    parts: tuple[int, ...] = ()
    """The sizes of the micro-batches, in order; none for one batch."""
    change: Change | None = None

    def __post_init__(self) -> None:
        if not self.rows or (self.parts and (sum(self.parts) != len(self.rows) or min(self.parts) < 1)):
            raise ValueError(f"{len(self.rows)} rows cannot be cut into micro-batches of {list(self.parts)}")

    @classmethod
    def evenly(cls, rows: Sequence[int], k: int) -> Composition:
        """These rows in k micro-batches of equally many rows; what is left over is left out."""
        size = len(rows) // k
        return cls(tuple(rows[: k * size]), (size,) * k)

    def __str__(self) -> str:
        return f"{self._of_rows()}{f' with {self.change}' if self.change is not None else ''}"

    def _of_rows(self) -> str:
        if len(self.rows) > SHOWN:
            return f"{len(self.rows)} rows{f' as {list(self.parts)}' if self.parts else ''}"
        if len(self.parts) < 2:
            return f"row{'' if len(self.rows) == 1 else 's'} {list(self.rows)}"
        parts = [f"row {p.rows[0]}" if len(p.rows) == 1 else f"rows {list(p.rows)}" for p in self.split()]
        return f"{len(parts)} micro-batches: {', '.join(parts[:-1])}, and {parts[-1]}"

    def split(self) -> tuple[Composition, ...]:
        """The micro-batches, each as a composition of its own; the whole where it is one batch."""
        ends = [0, *itertools.accumulate(self.parts or (len(self.rows),))]
        return tuple(Composition(self.rows[a:b], change=self.change) for a, b in itertools.pairwise(ends))

    def whole(self) -> Composition:
        """The same rows in one batch."""
        return Composition(self.rows, change=self.change)

    def as_data(self) -> SmallestBatch:
        """The composition as plain data, for ``Finding.composition``."""
        return SmallestBatch(self.rows, self.parts, "" if self.change is None else str(self.change))
