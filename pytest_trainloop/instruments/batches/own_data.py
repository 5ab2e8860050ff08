"""Whether a loop makes its own data: it draws from an environment or a loader of its own, and only counts the batches
that it is given.

With other numbers in these batches what it backpropagates is then the same, bit for bit, and none of their tensors
reaches a model.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.forward_pass import LONGEST
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.recording.hooks import after_modules
from pytest_trainloop.recording.shards import address
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.hooks import hooked, unless_suspended

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS_OF_A_RUN = 2
"""Optimizer steps of the run over other numbers: what only the second loss reads is read, too."""

TAKEN = 8
"""Different batches that it is given in turn, at most."""

HAND_OVER = "batches="
"""What to give to have its data judged."""


def makes_own_data(evidence: Evidence) -> bool:
    """Whether nothing in the batches that the loop is given makes a difference. To be asked for by
    ``evidence.shared(...)``; where it cannot be seen the loop is taken to read them."""
    seen, other = evidence.run(), _OtherNumbers()
    if seen.raised is not None:
        return False
    record = evidence.rerun(
        stream=other.stream,
        before_item=other.note,
        contexts=other.contexts,
        enough=lambda r: other.read or r.rounds >= STEPS_OF_A_RUN or len(r.backwards()) >= LONGEST,
        may_raise=True,
    )
    if other.read or not other.changed or record.raised is not None:
        return False
    first, again = _roots(seen), _roots(record)
    return bool(again) and first[: len(again)] == again and all(map(math.isfinite, again))


def require_given_data(evidence: Evidence, what: str) -> None:
    """Raises ``CannotDecide`` where the loop makes its own data, so that no batch can be composed for it."""
    if evidence.shared(makes_own_data):
        raise CannotDecide(
            f"fit makes its own data, and what it is given as batches changes nothing: {what}. Hand the data over, as "
            "batches=lambda n: (get_batch() for _ in range(n)), and let fit train on these",
            needs=HAND_OVER,
        )


@dataclass(slots=True)
class _OtherNumbers:
    """Batches of the loop's own with other numbers in them."""

    changed: bool = False
    """Whether any number could be changed."""
    read: bool = False
    """Whether a tensor of theirs reached a model."""
    _given: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors of the batches by address, which no other may take meanwhile."""

    def stream(self, loop: TrainLoop) -> Iterator[Any]:
        batches = [nested.copy(batch) for batch in first_batches(loop, 1 if loop.batches is None else TAKEN)]
        changes = [[_change(tensor) for tensor in nested.tensors(batch)] for batch in batches]
        self.changed = all(map(any, changes))
        return itertools.cycle(batches)

    def note(self, _number: int, item: Any) -> None:
        self._given |= {place: t for t in nested.tensors(item) if (place := address(t))}

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def leave(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            self.read = self.read or any(address(t) in self._given for t in nested.tensors((args, kwargs)))

        return (hooked(after_modules(unless_suspended(watch, leave), with_kwargs=True)),)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several entries lie in one place, so that none can be written to."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _change(tensor: torch.Tensor) -> bool:
    """Put other numbers into a tensor, those that it holds where they differ: on a GPU an id outside of its table ends
    the process."""
    if not address(tensor) or _is_expanded(tensor):
        return False
    with torch.no_grad():
        before = tensor.detach().clone()
        turned = before.flatten().flip(0)
        if torch.equal(turned, before.flatten()):
            turned = turned.roll(1)
        if torch.equal(turned, before.flatten()):
            turned = _another_constant(turned)
        tensor.copy_(turned.view(before.shape))
        return not torch.equal(tensor, before)


def _another_constant(values: torch.Tensor) -> torch.Tensor:
    if values.is_floating_point() or values.is_complex():
        return values * 0.5 + 0.25
    if values.dtype is torch.bool:
        return ~values
    return values + 1 if values.device.type == "cpu" else values


def _roots(record: Record) -> list[float]:
    return [root.value for backward in record.of(Backward) for root in backward.roots]
