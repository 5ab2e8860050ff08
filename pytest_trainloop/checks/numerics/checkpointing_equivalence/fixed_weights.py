"""Runs whose weights stay where they began, and values that are kept of such a run in addition to its record."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.memory_layout import write
from pytest_trainloop.recording.hooks import after_steps, on_gradient
from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch

    Grads = dict[int, dict[int, torch.Tensor]]


@dataclass(slots=True)
class Run:
    """One run."""

    record: Record
    grads: Grads
    """Sampled entries of ``.grad`` after each backward pass, by position of the pass and index of the parameter, whose
    layout they have."""
    buffers: dict[str, torch.Tensor]
    """At the end of the run."""


@contextlib.contextmanager
def fixed_weights(watch: Watch) -> Iterator[None]:
    """Weights are restored after every optimizer step: an optimizer that divides by the size of a gradient would
    magnify its rounding."""
    start = [
        (tensor, tensor.detach().clone())
        for tensor in watch.table.tensors
        if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta
    ]

    def restore(*_: Any) -> None:
        with watch.suspended(), torch.no_grad():
            for tensor, first in start:
                if tensor.shape == first.shape and tensor.dtype == first.dtype and not torch.equal(tensor, first):
                    write(tensor, first)

    with hooked(after_steps(restore)):
        yield


@contextlib.contextmanager
def values_kept(watch: Watch, grads: Grads, buffers: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep gradients as they are accumulated, and the buffers of every module at the end."""

    def note(index: int, tensor: torch.Tensor) -> None:
        if watch.backward is None or tensor.grad is None or tensor.grad.layout is not torch.strided:
            return
        with watch.suspended(), torch.no_grad():
            grads.setdefault(watch.backward.at, {})[index] = spaced(tensor.grad.detach()).clone()

    handles = [
        on_gradient(tensor, functools.partial(note, index), after=True)
        for index, tensor in enumerate(watch.table.tensors)
        if tensor.is_leaf and tensor.requires_grad and readable(tensor)
    ]
    try:
        with hooked(*filter(None, handles)):
            yield
    finally:
        with watch.suspended(), torch.no_grad():
            buffers.update(_buffers(watch))


def _buffers(watch: Watch) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in watch.table.named_modules():
        for name, buffer in members.named_buffers(module, recurse=False):
            if readable(buffer) and buffer.layout is torch.strided:
                yield f"{path}.{name}" if path else name, buffer.detach().clone()
