"""The search for the fewest real and padded positions of one row that show a cause."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.compositions.composition import Composition

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from pytest_trainloop.checks.batch.padding_invariance.slices import BatchSlice


@dataclass(frozen=True, slots=True)
class Stretch:
    """Real positions next to the padding, and padded ones: what a slice leaves of rows."""

    real: int
    padded: int
    left: bool
    cut: Callable[[Any], Any] = field(compare=False, repr=False)

    def apply(self, batch: Any) -> Any:
        """All rows of the batch, cut to the stretch."""
        return self.cut(batch)

    def __str__(self) -> str:
        padded = f"{self.padded} padded position{'s' if self.padded > 1 else ''}"
        return f"{padded} {'before' if self.left else 'after'} {self.real} real one{'s' if self.real > 1 else ''}"


def composed(chosen: BatchSlice, cut: Callable[[Any, BatchSlice], Any]) -> Composition:
    """A slice as a composition; ``cut`` takes positions of a batch."""
    stretch = Stretch(
        chosen.last - chosen.first, chosen.padded, chosen.first > chosen.start, lambda batch: cut(batch, chosen)
    )
    return Composition(chosen.rows, change=stretch)


def slice_of(composition: Composition, within: BatchSlice) -> BatchSlice:
    """The slice that a composition is of."""
    stretch = composition.change
    if not isinstance(stretch, Stretch):
        raise TypeError(f"{composition} is no stretch of rows")
    chosen = replace(within, rows=composition.rows)
    if stretch.left:
        end = chosen.first + stretch.real
        return replace(chosen, start=chosen.first - stretch.padded, stop=end, last=end)
    begin = chosen.last - stretch.real
    return replace(chosen, start=begin, first=begin, stop=chosen.last + stretch.padded)


def stretches(full: BatchSlice, left: bool, cut: Callable[[Any, BatchSlice], Any]) -> SearchStrategy[Composition]:
    """Compositions of one of the slice's rows: shrinks to one real and one padded position of the first."""
    from hypothesis import strategies as st

    def made(drawn: tuple[int, int, int]) -> Composition:
        row, real, padded = drawn
        start = Stretch(real, padded, left, lambda batch: cut(batch, slice_of(composition, full)))
        composition = Composition((full.rows[row],), change=start)
        return composition

    real, padded = full.last - full.first, full.padded
    return st.tuples(st.integers(0, len(full.rows) - 1), st.integers(1, real), st.integers(1, padded)).map(made)
