"""A run in which every row of the model's input is the first: what a model that cannot use its input does not notice.

Rows are made alike where data comes in: at calls of layers with parameters of their own and no modules below them,
whose input has no history. Labels do not pass there, so they stay as they are.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from pytest_trainloop.evidence.hooked import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.observe.watch import Watch


class RowsAlike:
    """To be used by ``contexts`` of a run over batches with so many rows.

    ``changed`` tells that some input was not the same in all rows, ``passed_on`` that some went in as it was, since
    its rows could not be told.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.changed = False
        self.passed_on = False

    @property
    def made(self) -> bool:
        """Whether rows that differed were made alike wherever data came in."""
        return self.changed and not self.passed_on

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> Any:
            own = any(True for _ in module.parameters(recurse=False))
            if not own or any(True for _ in module.children()) or not args:
                return None
            with watch.quietly(), torch.no_grad():
                return tuple(self._alike(a) if isinstance(a, torch.Tensor) else a for a in args)

        with hooked(register_module_forward_pre_hook(enter)):
            yield

    def _alike(self, given: torch.Tensor) -> torch.Tensor:
        if given.requires_grad or given.layout is not torch.strided or given.is_nested:
            self.passed_on = self.passed_on or not given.requires_grad
            return given
        if given.dim() < 2 and not given.is_floating_point() and len(given) != self._rows:
            return given  # positions
        axis = next((d for d in (0, 1) if given.dim() > d and given.shape[d] == self._rows), None)
        if axis is None:
            self.passed_on = self.passed_on or not (given.dim() > 0 and given.shape[0] == 1)
            return given
        first = given.narrow(axis, 0, 1).expand_as(given)
        self.changed = self.changed or not torch.equal(first, given)
        return first.clone()
