"""The torch calls of the loop in its first steps, each with what it was given and what it gave.

Values are kept as marks (a digest, whether all entries are zero) that are taken before and after the call: it may write
in place.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of, watched
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import raw_bytes, readable, shape_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import AUTOGRAD_CALLS, IN_PLACE_OPERATORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from pytest_trainloop.recording.events import Place, Site
    from pytest_trainloop.recording.watch import Watch

MOST_CALLS = 20_000
"""Calls that are kept."""

_PLAIN = (int, float, str, slice, tuple, type(...))


@dataclass(slots=True, eq=False)
class Value:
    """One tensor at one moment. ``of_batch`` is its place in the batch, if it came from one."""

    made_by: Call | None = None
    of_batch: str = ""
    number: int = -1
    """The number of the batch that it came with."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    history: bool = False
    zero: bool = False
    """Whether it has entries and all are zero."""
    zeros: int = 0
    """How many entries are zero."""
    whole: bool = False
    """Whether all entries are whole numbers."""
    smallest: float = float("nan")
    """The smallest entry."""
    largest: float = float("nan")
    digest: int = 0
    """Equal for equal entries."""
    parameter: bool = False
    """Whether it is a parameter, of whatever module."""

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def source(self, through: Set[str]) -> Value:
        """What it was taken from by calls of these functions alone, each by its first input."""
        value = self
        while value.made_by is not None and value.made_by.name in through and value.made_by.inputs:
            value = value.made_by.inputs[0]
        return value

    def origins(self, most: int = 2_000) -> Iterator[Value]:
        """It, and all values that it was made of, each once, the nearest first."""
        todo, seen = [self], {id(self)}
        while todo and len(seen) < most:
            value = todo.pop(0)
            yield value
            for parent in value.made_by.inputs if value.made_by else ():
                if id(parent) not in seen:
                    seen.add(id(parent))
                    todo.append(parent)


@dataclass(slots=True, eq=False)
class Call:
    """One call of a torch function; ``plain`` are its arguments with None in the place of tensors and other objects."""

    number: int
    name: str
    place: Place
    site: Site
    plain: tuple[Any, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    grad: bool = True
    """Whether gradients were on."""
    step: int = 0
    """Optimizer steps that were made before it."""
    writes: bool = False
    """Whether it wrote into its first argument."""


@dataclass(eq=False)
class Calls(WatchingMode):
    """Keeps the calls until the first optimizer step; ``others`` makes what takes the place of some calls' results."""

    others: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    """By the number of the call: given its function, arguments and keywords."""
    steps: int = 1
    """Optimizer steps up to which calls are kept."""
    calls: list[Call] = field(default_factory=list)
    roots: list[Value] = field(default_factory=list)
    """What was backpropagated."""
    batch: list[Value] = field(default_factory=list)
    """The tensors of the batches."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Copies of these."""
    _known: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        WatchingMode.__init__(self)

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            yield
        self._known.clear()

    def active(self) -> bool:
        if not super().active():
            return False
        record = self.watch.record
        return not record.begun if self.steps == 1 else record.rounds < self.steps

    def take(self, number: int, item: Any) -> None:
        """Note the tensors of a batch: for ``RunPlan.before_item``."""
        with self.watch.suspended():
            for path, tensor in nested.paths(item):
                value = self._noted(tensor)
                value.of_batch, value.number = nested.shown(path), number
                self.batch.append(value)
                self.tensors.append(tensor.detach().clone())

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if name == "backward":
            with watch.suspended():
                self.roots += [self.of(t) for t in tensors_in(args[:1], kwargs.get("tensors"))]
        if name in AUTOGRAD_CALLS or not watched(name) or len(self.calls) >= MOST_CALLS:
            return passed_on(func, args, kwargs)
        with watch.suspended():
            made = Call(
                len(self.calls),
                name.strip("_") if name in IN_PLACE_OPERATORS else name,
                *here(),
                tuple(a if isinstance(a, _PLAIN) else None for a in args),
                tuple(self.of(t) for t in tensors_in(args, kwargs)),
                grad=torch.is_grad_enabled(),
                step=self.watch.record.rounds if self.steps > 1 else 0,
                writes=_writes(name),
            )
            self.looked_at(made, args, kwargs)
            self.calls.append(made)
        other = self.others.get(made.number)
        out = passed_on(func, args, kwargs) if other is None else other(func, args, kwargs)
        if name == "__iter__":
            rows = list(out)
            out = iter(rows)
        with watch.suspended():
            results = tensors_in(args[:1] if made.writes else rows if name == "__iter__" else out)
            made.outputs = tuple(self._noted(t, made) for t in results)
        return out

    def looked_at(self, made: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For what derives from this class: a call that is about to be made."""

    def of(self, tensor: torch.Tensor) -> Value:
        """The mark of a tensor, taken now where it is not known."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else self._noted(tensor)

    def _noted(self, tensor: torch.Tensor, made_by: Call | None = None) -> Value:
        value = _marked(tensor)
        value.made_by = made_by
        self._known[id(tensor)] = (weakref.ref(tensor), value)
        return value


def _writes(name: str) -> bool:
    return name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _marked(tensor: torch.Tensor) -> Value:
    parameter = isinstance(tensor, torch.nn.Parameter)
    value = Value(shape=shape_of(tensor), dtype=tensor.dtype, history=tensor.requires_grad, parameter=parameter)
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and readable(tensor)
    if not plain or tensor.numel() == 0:
        return value
    entries = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    value.digest = hash(raw_bytes(entries))
    if entries.is_floating_point() and entries.itemsize < 2:
        entries = entries.float()  # torch has hardly any function for these dtypes
    value.zeros = entries.numel() - int(entries.count_nonzero())
    value.zero = value.zeros == entries.numel()
    if not entries.is_complex():
        value.smallest, value.largest = float(entries.min()), float(entries.max())
        value.whole = not entries.is_floating_point() or bool((entries == entries.round()).all())
    return value


def lost_at(one: Sequence[Call], other: Sequence[Call]) -> str:
    """The only line whose calls are given other values in two runs and give the same ones; empty where several lines
    do, or a call is made in one run alone."""
    lines = set[str]()
    for mine, theirs in zip(one, other, strict=False):
        if (mine.name, mine.place) != (theirs.name, theirs.place):
            return ""
        if digests(mine.inputs) != digests(theirs.inputs) and digests(mine.outputs) == digests(theirs.outputs):
            lines.add(str(mine.place))
    return lines.pop() if len(lines) == 1 else ""


def digests(values: Sequence[Value]) -> list[tuple[Any, ...]]:
    return [(value.shape, value.digest) for value in values]
