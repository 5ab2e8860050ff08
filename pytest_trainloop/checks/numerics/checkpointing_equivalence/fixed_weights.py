"""Runs whose weights stay where they began, and what is kept of such a run beside its record."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_trainloop.recording.samples import readable, spaced
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch


@dataclass(slots=True)
class Kept:
    """``grads`` are sampled entries of what stood in ``.grad`` after each backward pass, by its position and the
    parameter's index: there its layout is the parameter's, whatever the order in which parts came. ``buffers`` are
    those of the run's end."""

    grads: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its record, and what was kept beside it."""

    record: Record
    kept: Kept


@contextlib.contextmanager
def weights_held(watch: Watch) -> Iterator[None]:
    """Weights are put back after every optimizer step: an optimizer that divides by a gradient's size would make much
    of its rounding."""
    start = [
        (tensor, tensor.detach().clone())
        for tensor in watch.book.tensors
        if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta
    ]

    def put_back(*_: Any) -> None:
        with watch.quietly(), torch.no_grad():
            for tensor, first in start:
                if tensor.shape == first.shape and tensor.dtype == first.dtype and not torch.equal(tensor, first):
                    tensor.copy_(first)

    with hooked(register_optimizer_step_post_hook(put_back)):
        yield


@contextlib.contextmanager
def kept(watch: Watch, into: Kept) -> Iterator[None]:
    """Gradients as they are accumulated, and the buffers of every module as they are in the end."""

    def note(index: int, tensor: torch.Tensor) -> None:
        if watch.backward is None or tensor.grad is None or tensor.grad.layout is not torch.strided:
            return
        with watch.quietly(), torch.no_grad():
            into.grads.setdefault(watch.backward.at, {})[index] = spaced(tensor.grad.detach()).clone()

    handles = [
        tensor.register_post_accumulate_grad_hook(functools.partial(note, index))  # type: ignore[no-untyped-call]
        for index, tensor in enumerate(watch.book.tensors)
        if tensor.is_leaf and tensor.requires_grad and readable(tensor)
    ]
    try:
        with hooked(*handles):
            yield
    finally:
        with watch.quietly(), torch.no_grad():
            into.buffers.update(_buffers(watch))


def _buffers(watch: Watch) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in watch.book.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if readable(buffer) and buffer.layout is torch.strided:
                yield f"{path}.{name}" if path else name, buffer.detach().clone()
