"""Runs in which the rows of the model's input are others: all of them the first, or each its neighbour's.

Rows are changed where data comes in: at calls of layers with parameters of their own and no modules below them, whose
input has no history. Labels do not pass there, so they stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.tracing.arguments import takes_data
from pytest_trainloop.recording.hooks import before_modules
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.recording.watch import Watch

Change = Callable[[torch.Tensor, int], torch.Tensor]
"""Other rows along an axis."""


def all_the_first(given: torch.Tensor, axis: int) -> torch.Tensor:
    return given.narrow(axis, 0, 1).expand_as(given).clone()


def each_its_neighbours(given: torch.Tensor, axis: int) -> torch.Tensor:
    return given.roll(1, axis)


class OtherRows:
    """To be used by ``contexts`` of a run over batches with so many rows.

    ``came`` tells that some input had rows, ``changed`` that some became another, ``equal_rows`` that all rows of a
    floating-point input were equal (NeRF's sample points on all rays: places_drawn_from_a_learned_histogram),
    ``passed_on`` that some went in as it was, since its rows could not be found.
    """

    def __init__(self, rows: int, change: Change) -> None:
        self._rows = rows
        self._change = change
        self.changed = False
        self.passed_on = False
        self.came = False
        self.equal_rows = False

    @property
    def made(self) -> bool:
        """Whether rows became others wherever data came in."""
        return self.changed and not self.passed_on and not self.equal_rows

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> Any:
            if not takes_data(module, args):
                return None
            with watch.suspended(), torch.no_grad():
                return tuple(self._other(a) if isinstance(a, torch.Tensor) else a for a in args)

        with hooked(before_modules(unless_suspended(watch, enter))):
            yield

    def _other(self, given: torch.Tensor) -> torch.Tensor:
        if given.requires_grad or given.layout is not torch.strided or given.is_nested:
            self.passed_on = self.passed_on or not given.requires_grad
            return given
        if given.dim() < 2 and not given.is_floating_point() and len(given) != self._rows:
            return given  # positions
        axis = next((d for d in (0, 1) if given.dim() > d and given.shape[d] == self._rows), None)
        if axis is None:
            self.passed_on = self.passed_on or not (given.dim() > 0 and given.shape[0] == 1)
            return given
        self.came = True
        other = self._change(given, axis)
        same = torch.equal(other, given)
        self.changed = self.changed or not same
        self.equal_rows = self.equal_rows or (same and given.is_floating_point())
        return other
