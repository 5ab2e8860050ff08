"""A run with inputs scaled to unit size: whether a loss is too high because of the inputs or of the weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.hooks import before_modules
from pytest_trainloop.runs.hooks import hooked, unless_suspended
from pytest_trainloop.tracing.arguments import takes_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.recording.watch import Watch

LARGE = 3.0
"""Root mean square from which an input is not of unit size."""


class UnitInputs:
    """Divides inputs by their root mean square where that is large, in a run that is made in its ``contexts``;
    ``largest`` is the largest root mean square."""

    def __init__(self) -> None:
        self.largest = 0.0

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> Any:
            if not takes_data(module, args):
                return None
            with watch.suspended(), torch.no_grad():
                return tuple(self._of_unit_size(a) for a in args)

        with hooked(before_modules(unless_suspended(watch, enter))):
            yield

    def _of_unit_size(self, given: Any) -> Any:
        if not isinstance(given, torch.Tensor) or not given.is_floating_point() or given.requires_grad:
            return given
        size = float(given.double().square().mean().sqrt())
        self.largest = max(self.largest, size)
        return given / size if size > LARGE else given
