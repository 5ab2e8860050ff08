"""Which tensors of the batch make a difference, by putting the first row, and then the last, in the place of all rows.

All else is as it was: the seed, the weights (each moved a little, so that nothing hides behind a layer that starts at
zero), the other tensors. What is computed is the same bit for bit, or it depends on that tensor.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from pytest_trainloop import nested
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.dependence import moved_a_little
from pytest_trainloop.recording.events import Backward
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.hooks import call_from_outside, hooked
from pytest_trainloop.tracing.forward_pass import LONGEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

MOST = 8
"""Tensors of a batch that are tried one by one."""

STEPS = 2
"""Optimizer steps of each run: what only the second loss depends on counts as well."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the batch whose rows differ: its place there, in words, and whether a model is handed it."""

    name: str
    number: int
    handed: bool


@dataclass(frozen=True, slots=True)
class Unread:
    """``leaves`` are tensors that a model is handed and nothing depends on. ``all_of_them``: no output of any model
    depends on anything in the batch."""

    leaves: tuple[Leaf, ...]
    all_of_them: bool
    place: str


@dataclass(slots=True)
class _Seen:
    """Of one run: what was backpropagated, what models gave in training passes before the first step, the tensors that
    they were handed, and where the first call stands."""

    roots: list[tuple[float, ...]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    handed: set[int] = field(default_factory=set)
    place: str = ""

    @property
    def judged(self) -> bool:
        return bool(self.outputs)


class Inputs:
    """The runs behind ``input_dependence``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._leaves: list[Leaf] = []

    def unread(self) -> Unread | None:
        """What a model is handed and does not read, if there is any. Raises ``CannotDecide`` where nothing can be
        told."""
        as_it_is = self._once(frozenset())
        if not as_it_is.judged:
            raise CannotDecide("no model of the loop is called with a gradient before its first step")
        if not all(bool(t.isfinite().all()) for t in as_it_is.outputs):
            raise CannotDecide("what the model gives is not finite (see finite)")
        differing = [leaf.number for leaf in self._leaves]
        if not differing:
            raise CannotDecide("all rows of the batch are the same: whether they are read cannot be seen")
        reads = any(len(self._seen.parameters[i].shape) > 1 for i in self._seen.held)
        blank = [self._once(frozenset(differing), row) for row in (0, -1)] if reads else []
        blind = reads and all(_same(as_it_is.outputs, other.outputs) for other in blank)
        if blind and all(as_it_is.roots == other.roots for other in blank) and not self._handed:
            return None  # the loop makes its own data
        ignored = tuple(
            leaf for leaf in self._leaves[:MOST] if (leaf.handed or blind) and self._ignored(as_it_is, leaf)
        )
        return Unread(ignored, blind, as_it_is.place) if ignored else None

    @property
    def _handed(self) -> bool:
        return any(leaf.handed for leaf in self._leaves)

    def _ignored(self, as_it_is: _Seen, leaf: Leaf) -> bool:
        others = (self._once(frozenset({leaf.number}), row) for row in (0, -1))
        return all(_same(as_it_is.outputs, other.outputs) and as_it_is.roots == other.roots for other in others)

    def _once(self, alike: frozenset[int], row: int = 0) -> _Seen:
        seen = _Seen()

        def stream(loop: TrainLoop) -> Iterator[Any]:
            batch = nested.copy(first_batches(loop, 1)[0] if loop.batch is None else loop.batch)
            for number, tensor in enumerate(nested.tensors(batch)):
                if number in alike:
                    _all_alike(tensor, row)
            self._note(batch, alike)
            return itertools.repeat(batch)

        def handed(number: int, item: Any) -> None:
            if number == 0:
                given.extend(t.data_ptr() for t in nested.tensors(item))

        given: list[int] = []
        plan = replace(
            self._plan,
            stream=stream,
            before_item=handed,
            prepare=moved_a_little,
            enough=lambda record: record.rounds >= STEPS or len(record.backwards()) >= LONGEST,
            contexts=lambda watch: (self._watching(watch, seen, given),),
        )
        record = self._run(plan)
        seen.roots = [tuple(root.value for root in b.roots) for b in record.of(Backward)]
        if not alike:
            self._leaves = [replace(leaf, handed=given[leaf.number] in seen.handed) for leaf in self._leaves if given]
        return seen

    def _note(self, batch: Any, alike: frozenset[int]) -> None:
        if not alike:
            names = dict(named(batch))
            self._leaves = [
                Leaf(names.get(id(t), f"tensor {n}"), n, False)
                for n, t in enumerate(nested.tensors(batch))
                if _rows_differ(t)
            ]

    @contextlib.contextmanager
    def _watching(self, watch: Watch, seen: _Seen, given: list[int]) -> Iterator[None]:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = call_from_outside(watch, module)
            if call is None or not torch.is_grad_enabled() or watch.record.steps or watch.backward is not None:
                return
            with watch.quietly():
                seen.place = seen.place or str(call.place)
                seen.handed |= {t.data_ptr() for t in nested.tensors((args, kwargs)) if t.data_ptr() in given}
                seen.outputs += [t.detach().clone() for t in nested.tensors(output)]

        with hooked(register_module_forward_hook(leave, with_kwargs=True)):
            yield


def _same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _rows_differ(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0 and len(tensor) > 1
    return plain and not torch.equal(tensor, tensor[:1].expand_as(tensor))


def _all_alike(tensor: torch.Tensor, row: int) -> None:
    with torch.no_grad():
        tensor.copy_(tensor[row].clone().expand_as(tensor))


def named(batch: Any) -> Iterator[tuple[int, str]]:
    """The tensors of a nest by identity, and where each stands: ``batch["input_ids"]``, ``batch[1]``."""
    todo: list[tuple[Any, str]] = [(batch, "batch")]
    seen: set[int] = set()
    while todo:
        value, path = todo.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield id(value), path
        elif hasattr(value, "items"):
            todo += [(v, f"{path}[{k!r}]") for k, v in value.items()]
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            todo += [(v, f"{path}[{i}]") for i, v in enumerate(value)]
        elif hasattr(value, "_asdict"):
            todo += [(v, f"{path}.{k}") for k, v in value._asdict().items()]
        elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
            todo += [(v, f"{path}.{k}") for k, v in vars(value).items()]
