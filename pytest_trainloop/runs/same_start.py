"""Runs of one loop in float64 from the same start, with one difference between them.

See docs/how-it-decides.md#one-start-for-every-run.

The runs are made under one seed, without randomness. Their initial weights and buffers are compared by name with those
of the first run; where they differ (a knob that changes how the model is built draws other numbers), they are
overwritten.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core import members
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare.memory_layout import write
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.reachable_state.stored import StoredTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.run import RunPlan


class SameStart:
    """A ``RunPlan.prepare`` that gives every run the weights and buffers that the first one began with.

    ``rename`` maps names that differ by how the model is wrapped to the same.
    """

    def __init__(self, rename: Callable[[str], str] = str) -> None:
        self._first: StoredTensors | None = None
        self._rename = rename

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What every run begins with, by name; nothing before the first."""
        return self._first or {}

    def __call__(self, watch: Watch) -> None:
        """Raises ``CannotDecide`` where the two have other tensors, or tensors of other shapes."""
        state = {self._rename(name): tensor for name, tensor in state_of(watch)}
        if self._first is None:
            self._first = StoredTensors.of(state)
            return
        if state.keys() != self._first.keys():
            other = sorted(state.keys() ^ self._first.keys())[0]
            raise CannotDecide(f"the model is built differently from one run to the next: {other} is only in one")
        for name, tensor in state.items():
            first = self._first[name]
            if first.shape != tensor.shape or first.dtype != tensor.dtype:
                raise CannotDecide(f"{name} is built in shape {tuple(first.shape)} once and {tuple(tensor.shape)} then")
            if not torch.equal(first, tensor):
                with torch.no_grad():
                    write(tensor, first)


class SameValues:
    """A ``RunPlan.prepare`` that gives runs of different precision the same weights, in the dtype of each run.

    Buffers are left as they were built: those that a project computes in low precision are part of the comparison.
    """

    def __init__(self) -> None:
        self._first = StoredTensors({})

    def __call__(self, watch: Watch) -> None:
        """Raises ``CannotDecide`` where a later run has tensors of other shapes."""
        state = dict(_weights(watch))
        if not self._first:
            self._first = StoredTensors.of(state)
            return
        for name, first in self._first.items():
            tensor = state.get(name)
            if tensor is None or tensor.shape != first.shape:
                raise CannotDecide(f"the model is built differently in another precision: {name} is not the same")
            with torch.no_grad():
                write(tensor, first)


def _weights(watch: Watch) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
        if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta:
            yield entry.name, tensor


def state_of(watch: Watch) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights and buffers of a run's model, by name."""
    yield from _weights(watch)
    for path, module in watch.table.named_modules():
        for name, buffer in members.named_buffers(module, recurse=False):
            if not torch.nn.parameter.is_lazy(buffer) and not buffer.is_meta:
                yield f"{path}.{name}" if path else name, buffer


def from_same_start(
    plan: RunPlan, start: Callable[[Watch], None], items: Callable[[TrainLoop], Sequence[Any]]
) -> RunPlan:
    """The plan of one of the runs: one pass over the items, in float64, without randomness, from the same start."""
    return replace(
        plan, prepare=start, contexts=lambda watch: (NoRandomness(),), items=items, double=True, read_ahead=None
    )
