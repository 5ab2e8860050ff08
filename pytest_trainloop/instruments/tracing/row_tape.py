"""One step of a loop, written down call by call, to be compared with the same step on a batch with other values in
some rows.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.

Both steps have the same shapes, the same weights and the same random numbers, so that what does not depend on the
changed rows is the same bit for bit: every kernel sums in the same order. Of each result the tape keeps a checksum for
every index of the axes that may hold rows, and of each backpropagated value its gradient with respect to the data that
entered the model: a row's share.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass, Op, axis_of
from pytest_trainloop.instruments.tracing.provenance_queries import ancestors
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.samples import as_real
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.shards import local
from pytest_trainloop.recording.torch_internals import has_values, past_dispatch_modes
from pytest_trainloop.recording.torch_names import IN_PLACE_OPERATORS

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.tracing.provenance import Node
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

LARGEST = 1 << 24
"""Entries of a result up to which it is compared."""

PART = 1 << 18
"""Entries of which a checksum is made at once."""

FEW = 1 << 12
"""Places up to which their factors are kept."""


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of a torch function, as plain data."""

    number: int
    """Its number in the pass, by which it is replaced."""
    name: str
    place: Place
    module: str
    carries_gradient: bool
    inputs: tuple[int, ...]
    """The calls that made what it is given, by their place on the tape; -1 for a tensor of the batch."""
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[dict[int, torch.Tensor], ...]
    """Of each result, for each axis that may hold rows, a checksum for each index; of axis -1 one of all entries."""
    given: tuple[tuple[int, ...], ...] = ()
    """The shapes of the tensors that it is given."""

    @property
    def named(self) -> str:
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass(frozen=True, slots=True)
class RowGradients:
    """What one backpropagated value gives a tensor of data that entered the model, by its rows."""

    value: torch.Tensor
    """(rows, ...): what entered."""
    gradient: torch.Tensor
    """(rows, entries), in float64."""


@dataclass(slots=True)
class Tape:
    """What one step left."""

    calls: list[TapedCall] = field(default_factory=list)
    shares: list[RowGradients] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """What was backpropagated."""
    roots: list[int] = field(default_factory=list)
    entered: set[Path] = field(default_factory=set)
    """The tensors of the batch that something which enters the model was made of."""
    refused: str = ""
    double: bool = False

    def comparable(self, other: Tape) -> bool:
        """Whether both made the same calls over the same shapes, and have shares of the same tensors."""
        calls = [(c.name, c.shapes) for c in self.calls] == [(c.name, c.shapes) for c in other.calls]
        shapes = [s.gradient.shape for s in self.shares] == [s.gradient.shape for s in other.shares]
        return calls and shapes and bool(self.shares) and not (self.refused or other.refused)


@dataclass(eq=False)
class RowTape(ForwardPass):
    """The mode that writes a tape of a step over ``rows`` rows. It makes every tensor of data a leaf."""

    rows: int = 0
    coarse: bool = False
    """Whether results are compared to eight binary digits: what differs by rounding alone is equal then."""
    shared_draws: bool = False
    """Whether what is drawn is the same for every row; else it is drawn as the loop draws it, under one seed."""
    at_root: Callable[[RowTape], None] = lambda tape: None
    """Called when a value is backpropagated: the operations so far have their tensors still."""
    tape: Tape = field(default_factory=Tape)
    _made_by: dict[int, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)
    _given: dict[int, Path] = field(default_factory=dict)
    _nodes: list[Node] = field(default_factory=list)
    """Kept alive, so that no other node takes the place of one in memory."""
    _weights: float = math.nan

    def __post_init__(self) -> None:
        super().__post_init__()
        self.everywhere = True

    def _draws(self, name: str) -> bool:
        return not self.shared_draws

    def take(self, item: Any) -> None:
        """Note the tensors of a batch that the loop gets."""
        for path, tensor in nested.paths(item):
            self.lineage.adopt(tensor)
            node = self.lineage.of(tensor)
            self._given[id(node)] = path
            self._nodes.append(node)
            self._made_by[id(tensor)] = (weakref.ref(tensor), -1)

    def made_of(self, tensor: torch.Tensor) -> set[Path]:
        """The tensors of the batch that a tensor was computed from."""
        return {path for node in ancestors(self.lineage.of(tensor)) if (path := self._given.get(id(node))) is not None}

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (*super().contexts(watch), _AtBackward(self))

    def backpropagated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments of each backward pass before it is made."""
        if self._watch is not None and self.active():
            with self.watch.suspended():
                self._shared_out(args, kwargs)

    def _kept(self, watch: Watch, op: Op, out: Any) -> Any:
        inputs = tuple(dict.fromkeys(at for t in op.inputs if (at := self.made_by(t)) is not None))
        out = super()._kept(watch, op, out)
        with watch.suspended():
            self._write(op, inputs, out)
        return out

    def made_by(self, tensor: torch.Tensor) -> int | None:
        """The call that made a tensor, by its place on the tape; -1 for one of the batch, None for any other."""
        known = self._made_by.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _write(self, op: Op, inputs: tuple[int, ...], out: Any) -> None:
        name = op.name
        written = name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        results = [t for t in tensors_in(op.args[:1] if written else out) if _readable(t)]
        given = tuple(tuple(t.shape) for t in op.inputs)
        at = len(self.tape.calls)
        self.tape.calls.append(
            TapedCall(
                op.number,
                name,
                op.place,
                op.module,
                any(t.requires_grad for t in results),
                inputs,
                tuple(tuple(t.shape) for t in results),
                tuple(_checksums(_rounded(t) if self.coarse else t, self.rows) for t in map(local, results)),
                given,
            )
        )
        for t in results:
            self._made_by[id(t)] = (weakref.ref(t), at)

    def _sum_of_weights(self) -> float:
        sums: dict[torch.device, torch.Tensor] = {}  # a model may lie on several
        for tensor in self.watch.table.tensors:
            if _readable(tensor) and tensor.is_floating_point() and not is_lazy(tensor):
                own = tensor.detach().double().sum()
                sums[own.device] = sums[own.device] + own if own.device in sums else own
        return sum(map(float, sums.values()))

    def _shared_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the gradient of what is backpropagated with respect to what entered the model."""
        weights_now = self._sum_of_weights()
        if self.tape.shares and weights_now != self._weights:
            return  # a later pass of a step that evaluates several points: what it gives follows from the first
        self._weights = weights_now
        self.at_root(self)
        roots = [t for t in tensors_in(args[0]) if t.requires_grad]
        weight = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
        weights = list(tensors_in(weight)) or None
        entered = [(e.leaf, axis) for e in self.data_inputs if (axis := _rows_axis(e.leaf, self.rows)) is not None]
        for entry in self.data_inputs:
            for node in ancestors(entry.source) if entry.source is not None else ():
                if (path := self._given.get(id(node))) is not None:
                    self.tape.entered.add(path)
        if not roots or not entered:
            return
        if not all(map(has_values, roots)):  # the project traces or exports its model
            return
        leaves = [leaf for leaf, _ in entered]
        try:
            found = torch.autograd.grad(roots, leaves, weights, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            self.tape.refused = str(error).partition("\n")[0]
            return
        for (leaf, axis), gradient in zip(entered, found, strict=True):
            if gradient is not None:
                by_rows = gradient.detach().double().movedim(axis, 0)
                value = leaf.detach().movedim(axis, 0).clone()
                self.tape.shares.append(RowGradients(value, by_rows.reshape(len(by_rows), -1).clone()))
        self.tape.values += [float(root.detach().sum()) for root in roots]
        self.tape.roots += [at for root in roots if (at := self.made_by(root)) is not None and at >= 0]


class _AtBackward(FunctionMode):
    """The innermost mode: others pass a backward pass on to the engine themselves."""

    def __init__(self, tape: RowTape) -> None:
        super().__init__()
        self._tape = tape

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "backward" and args:
            self._tape.backpropagated(args, kwargs)
        return passed_on(func, args, kwargs)


def _readable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """To eight binary digits. A run in float64 turns casts to another dtype away."""
    if not tensor.is_floating_point():
        return tensor
    mantissa, exponent = torch.frexp(tensor.detach())
    return torch.ldexp((mantissa * 256).round(), exponent)


def _rows_axis(tensor: torch.Tensor, rows: int) -> int | None:
    """The axis of rows; the first where it is as long as several batches one after the other."""
    axis = axis_of(tensor, rows)
    if axis is None and tensor.dim() and len(tensor) >= rows and len(tensor) % rows == 0:
        return 0
    return axis


def _checksums(tensor: torch.Tensor, rows: int) -> dict[int, torch.Tensor]:
    if not 0 < tensor.numel() <= LARGEST:
        return {}
    past = past_dispatch_modes() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None
    try:
        given = tensor.detach()
        axes = [d for d, size in enumerate(given.shape) if size == rows]
        if not axes and given.dim() and len(given) % rows == 0:
            axes = [0]
        return {-1: _checksum(given.reshape(1, -1)), **{d: _checksum(given.movedim(d, 0)) for d in axes}}
    finally:
        del past


def _checksum(by_rows: torch.Tensor) -> torch.Tensor:
    """Of each row a sum with an odd factor for each place, modulo 2**64: one entry that changes always changes it.

    A large row is added up in parts, since its bits and factors take several times its memory.
    """
    if by_rows.numel() <= PART:
        return _sums(by_rows.reshape(len(by_rows), -1), 0)
    return torch.cat([_sum_in_parts(row.reshape(-1)) for row in by_rows])


def _sum_in_parts(row: torch.Tensor) -> torch.Tensor:
    parts = [_sums(row[None, first : first + PART], first) for first in range(0, len(row), PART)]
    return torch.stack(parts).sum(0)


def _sums(by_rows: torch.Tensor, first: int) -> torch.Tensor:
    """The sums over part of each row, from place ``first`` on."""
    bits = _bits(by_rows)
    each = bits.shape[1] // max(1, by_rows.shape[1])  # 2 for complex numbers
    return (bits * _factors(first * each, bits.shape[1], bits.device)).sum(1).cpu()


@functools.lru_cache(maxsize=64)
def _factors_of_few(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device) * 0x5851F42D4C957F2E + 1


def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """An odd number for each place; those of few places are kept."""
    made = _factors_of_few if count <= FEW else _factors_of_few.__wrapped__
    return made(first, count, device)


def _bits(by_rows: torch.Tensor) -> torch.Tensor:
    plain = as_real(by_rows).flatten(-2) if by_rows.is_complex() else by_rows
    if not plain.is_floating_point():
        return plain.long()
    return (plain.double() + 0.0).contiguous().view(torch.int64)  # -0.0 is 0.0


def changed_rows(one: TapedCall, other: TapedCall, axis: int) -> set[int]:
    """The indices of an axis at which any result of a call differs between two tapes."""
    found: set[int] = set()
    for a, b in zip(one.sums, other.sums, strict=True):
        if axis in a and axis in b and a[axis].shape == b[axis].shape:
            found |= set((a[axis] != b[axis]).nonzero().flatten().tolist())
    return found


def changed(one: TapedCall, other: TapedCall) -> bool:
    """Whether any entry of a call's results differs between two tapes."""
    return any(-1 in a and -1 in b and not torch.equal(a[-1], b[-1]) for a, b in zip(one.sums, other.sums, strict=True))


def leads_to(tape: Tape, roots: Iterable[int]) -> set[int]:
    """The calls that these were computed from, themselves included, by their place on the tape."""
    found: set[int] = set()
    todo = [at for at in roots if at >= 0]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend(before for before in tape.calls[at].inputs if before >= 0)
    return found
