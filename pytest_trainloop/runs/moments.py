"""A moment of a run to which code of the project can be taken back: the random states, and what modules hold besides
weights (buffers, other tensors, counters)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.runs.process_state import preserved, random_states, restore_random

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

_PLAIN = (bool, int, float)


class Moment:
    """What is there now, beside the weights."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.random = random_states()
        self._held = [(module, _held(module)) for module in modules]
        self._kept = [(m, {n: _copied(v) for n, v in held.items() if n != "training"}) for m, held in self._held]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was at that moment, and at the end as before the block.

        Tensors are exchanged, not written to: a graph that is yet to be backpropagated may have kept them.
        """
        now = [(module, _held(module)) for module, _ in self._held]
        with preserved():
            try:
                for module, kept in self._kept:
                    for name, value in kept.items():
                        _put(module, name, _copied(value))
                restore_random(self.random)
                yield
            finally:
                for module, held in now:
                    for name, value in held.items():
                        _put(module, name, value)


def _held(module: nn.Module) -> dict[str, Any]:
    buffers = {n: b for n, b in members.named_buffers(module, recurse=False) if not torch.nn.parameter.is_lazy(b)}
    return buffers | {name: value for name, value in vars(module).items() if _is_state(value)}


def _is_state(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and not value.requires_grad)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put(module: nn.Module, name: str, value: Any) -> None:
    if name in vars(module):
        vars(module)[name] = value
    else:
        setattr(module, name, value)
