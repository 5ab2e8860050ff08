"""What each backpropagated value of a loop's first steps was computed by, from the layers' outputs on.

See docs/how-it-decides.md#losses-written-by-hand.

One run in float64. A call is a *layer* where weights of more than one entry meet something else; the slice of a value
reaches back to the results of the last layers, to the tensors of the batch and to constants. It can be made again with
other values (``Slice.replay``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pytest_trainloop import nested
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.function_mode import FunctionMode, tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, tree_map, writes_in_place
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    AUTOGRAD_CALLS,
    CASTS,
    EQUALITIES,
    IN_PLACE_OPERATORS,
    INDEXING,
    SAMPLES,
    SHAPE_ONLY,
    TO_PYTHON,
    VIEWS,
)
from pytest_trainloop.tracing.loss_slice import Call, Kind, Ref, Slice, Value
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 2
"""Optimizer steps that are looked at."""

MOST_CALLS = 20_000
"""Calls that are kept between two steps."""

LONGEST = 3_000
"""Calls of one slice."""

LARGEST = 1 << 22
"""Entries of all tensors of one slice."""

MOST_SLICES = 12

_NO_RESULT = TO_PYTHON | AUTOGRAD_CALLS
_SOURCES = SHAPE_ONLY | SAMPLES
"""Their results are drawn or constant: no gradient passes, and another run would draw others."""

_NO_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad_"})


@dataclass(frozen=True, slots=True)
class Tapes:
    """The slices of a loop's backpropagated values, in order."""

    slices: tuple[Slice, ...]
    too_large: bool = False
    """Whether some were left out for their size."""

    @classmethod
    def of(cls, evidence: Evidence) -> Tapes:
        """The slices of the first steps: at most two of each sequence of calls.

        Raises ``CannotDecide`` where further runs cannot be made.
        """
        if not evidence.repeatable:
            raise CannotDecide("how the loss is computed takes a run of its own: return a TrainLoop from a marked test")
        tape = LossTape()
        evidence.rerun(
            contexts=tape.contexts,
            before_item=tape.take,
            double=True,
            enough=lambda record: record.rounds >= STEPS,
            may_raise=True,
        )
        return cls(tuple(tape.slices), tape.too_large)


@dataclass(slots=True, eq=False)
class _Live:
    """One tensor between two writes to it, while the run goes on."""

    tensor: torch.Tensor
    version: int
    kind: Kind
    made_by: _Seen | None = None
    path: Path | None = None
    name: str = ""
    kept: torch.Tensor | None = None
    """A copy, once it was about to be overwritten."""

    @property
    def weights(self) -> bool:
        return self.kind == "weights"


@dataclass(slots=True, eq=False)
class _Seen:
    """One call, with ``_Live`` tensors in its arguments."""

    number: int
    name: str
    func: Callable[..., Any] | None
    args: Any
    kwargs: Any
    inputs: tuple[_Live, ...]
    place: Place
    module: str
    writes: bool = False
    outputs: list[_Live] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        """Whether weights meet something else."""
        return any(v.weights and v.tensor.numel() > 1 for v in self.inputs) and not all(v.weights for v in self.inputs)


class LossTape(WatchingMode):
    """The mode that keeps the calls of a step, and makes a slice of each value that is backpropagated."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[Slice] = []
        self.too_large = False
        self._live: dict[int, _Live] = {}
        self._by_storage: dict[int, list[_Live]] = {}
        self._batch: list[tuple[Path, torch.Tensor]] = []
        self._count = 0
        self._steps = 0
        self._signatures: Counter[tuple[Any, ...]] = Counter()

    def take(self, _number: int, item: Any) -> None:
        """Note the tensors of a batch that is handed to the loop."""
        self._batch += list(nested.paths(item))

    def _forget(self) -> None:
        self._live.clear()
        self._by_storage.clear()
        self._count = 0

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not watched(name) or name in _NO_RESULT:
            return func(*args, **kwargs)
        with self.watch.suspended():
            seen = self._opened(name, func, args, kwargs)
        out = func(*args, **kwargs)
        if seen is not None:
            with self.watch.suspended():
                self._closed(seen, args, out)
        return out

    def _opened(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Seen | None:
        if self.watch.record.steps != self._steps:
            self._steps = self.watch.record.steps
            self._forget()
        for path, tensor in self._batch:
            self._register(tensor, _Live(tensor, _version(tensor), "batch", path=path))
        self._batch.clear()
        if self._count >= MOST_CALLS:
            return None
        self._count += 1
        inputs: list[_Live] = []

        def put(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            inputs.append(self._of(value))
            return inputs[-1]

        given = tree_map(put, (args, dict(kwargs)), is_leaf=_is_packed)
        writes = name in IN_PLACE_OPERATORS or (
            name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
        )
        if writes and args and isinstance(args[0], torch.Tensor):
            for live in self._by_storage.get(_storage(args[0]), ()):
                if live.kept is None:
                    live.kept = live.tensor.detach().clone()
        place, _ = here()
        return _Seen(
            self._count, name, func, given[0], given[1], tuple(inputs), place, self.watch.module_path(), writes
        )

    def _closed(self, seen: _Seen, args: tuple[Any, ...], out: Any) -> None:
        if seen.writes:
            out = args[0] if args else out
        elif isinstance(out, torch.Tensor) and args and out is args[0]:
            if seen.inputs[0].version == _version(out):
                return
            seen.writes = True
        known = {id(v.tensor) for v in seen.inputs}
        for result in tensors_in(out):
            if not seen.writes and id(result) in known:
                continue
            kind: Kind = "made"
            if seen.name in _SOURCES:
                kind = "constant"
            elif seen.inputs and all(v.weights for v in seen.inputs):
                kind = "weights"
            elif seen.is_layer:
                kind = "layer"
            live = _Live(result, _version(result), kind, seen)
            seen.outputs.append(live)
            self._register(result, live)

    def _register(self, tensor: torch.Tensor, live: _Live) -> None:
        self._live[id(tensor)] = live
        self._by_storage.setdefault(_storage(tensor), []).append(live)

    def _of(self, tensor: torch.Tensor) -> _Live:
        live = self._live.get(id(tensor))
        version = _version(tensor)
        if live is not None and live.tensor is tensor:
            if live.version == version or live.weights:
                return live
            before = tuple(dict.fromkeys((live, *self._by_storage.get(_storage(tensor), ())[-1:])))
            place, _ = here()
            unseen = _Seen(self._count, "write", None, (), {}, before, place, self.watch.module_path())
            live = _Live(tensor, version, live.kind if live.kind == "batch" else "unknown", unseen, live.path)
            unseen.outputs.append(live)
        else:
            index = self.watch.table.index(tensor)
            kind: Kind = "constant"
            name = ""
            if index is not None or isinstance(tensor, nn.Parameter):
                kind, name = "weights", "" if index is None else self.watch.table.entries[index].name
            elif tensor.requires_grad:
                kind = "unknown"
            live = _Live(tensor, version, kind, name=name)
        self._register(tensor, live)
        return live

    def backpropagated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments of each backward pass before it is made."""
        if self._watch is None or self.watch.is_suspended or self.watch.stepping:
            return
        with self.watch.suspended():
            place, _ = here()
            for root in tensors_in(args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))):
                live = self._live.get(id(root))
                if live is None or live.tensor is not root or not has_values(root) or not root.requires_grad:
                    continue
                found = self._slice(live, place)
                if found is not None:
                    self.slices.append(found)

    def _slice(self, root: _Live, place: Place) -> Slice | None:
        lives, seen = _behind(root)
        if len(seen) > LONGEST or sum(v.tensor.numel() for v in lives) > LARGEST:
            self.too_large = True
            return None
        if not all(_plain(v.tensor) for v in lives):
            return None
        signature = tuple((s.name, s.place.line) for s in seen)
        self._signatures[signature] += 1
        if self._signatures[signature] > STEPS or len(self.slices) >= MOST_SLICES:
            return None
        lives, seen, stands_for = _once(lives, seen)
        numbers = {id(live): number for number, live in enumerate(lives)}
        numbers |= {twin: numbers[id(live)] for twin, live in stands_for.items()}
        made_by = {id(s): number for number, s in enumerate(seen)}
        calls = tuple(_call(s, number, numbers) for number, s in enumerate(seen))
        values = tuple(_value(v, number, made_by) for number, v in enumerate(lives))
        return Slice(values, calls, numbers[id(root)], self._steps, place)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), self, _AtBackward(self))

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                self._forget()


class _AtBackward(FunctionMode):
    """The innermost mode: a pass that is under way is looked at no more by the others."""

    def __init__(self, tape: LossTape) -> None:
        super().__init__()
        self._tape = tape

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("backward", "grad"):  # of an attribute that is read the name is "__get__"
            self._tape.backpropagated(args, kwargs)
        return func(*args, **kwargs)


def _behind(root: _Live) -> tuple[list[_Live], list[_Seen]]:
    """The values that a root was computed from, up to layers, and the calls between in order."""
    lives: dict[int, _Live] = {}
    calls: dict[int, _Seen] = {}
    todo = [root]
    while todo and len(calls) <= LONGEST:
        live = todo.pop()
        if id(live) in lives:
            continue
        lives[id(live)] = live
        seen = live.made_by
        if seen is None or live.kind in ("layer", "constant", "weights", "batch") or id(seen) in calls:
            continue
        calls[id(seen)] = seen
        todo.extend(seen.inputs)
        todo.extend(seen.outputs)
    ordered = sorted(calls.values(), key=lambda s: s.number)
    return list(lives.values()), ordered


_PURE = VIEWS | CASTS | INDEXING | ACTIVATIONS | EQUALITIES | frozenset({"one_hot", "normalize"})


def _once(lives: list[_Live], calls: list[_Seen]) -> tuple[list[_Live], list[_Seen], dict[int, _Live]]:
    """Values and calls without those that repeat an earlier call with the same arguments, and what stands for the
    results of these: ``p[:, 0]`` that is written twice is one value."""
    stands_for: dict[int, _Live] = {}
    first: dict[str, _Seen] = {}
    kept = []

    def named(value: Any) -> Any:
        return f"value {id(stands_for.get(id(value), value))}" if isinstance(value, _Live) else value

    for seen in calls:
        if seen.name in _PURE and not seen.writes:
            key = f"{seen.name} {tree_map(named, (seen.args, seen.kwargs))!r}"
            twin = first.setdefault(key, seen)
            same = len(twin.outputs) == len(seen.outputs) and all(
                a.kept is None and b.kept is None for a, b in zip(twin.outputs, seen.outputs, strict=True)
            )
            if twin is not seen and same:
                stands_for.update((id(b), a) for a, b in zip(twin.outputs, seen.outputs, strict=True))
                continue
        kept.append(seen)
    return [v for v in lives if id(v) not in stands_for], kept, stands_for


def _call(seen: _Seen, number: int, numbers: dict[int, int]) -> Call:
    def put(value: Any) -> Any:
        return Ref(numbers[id(value)]) if isinstance(value, _Live) else value

    args, kwargs = tree_map(put, (seen.args, seen.kwargs))
    return Call(
        number,
        seen.name,
        seen.func,
        args,
        kwargs,
        tuple(numbers[id(v)] for v in seen.inputs),
        tuple(numbers[id(v)] for v in seen.outputs),
        seen.place,
        seen.module,
        seen.writes,
    )


def _value(live: _Live, number: int, made_by: dict[int, int]) -> Value:
    seen = live.made_by
    tensor = live.tensor.detach().clone() if live.kept is None else live.kept
    names = [v.name for v in _parameters(seen)] if seen is not None and live.kind == "layer" else []
    return Value(
        number,
        tensor,
        live.kind,
        live.tensor.requires_grad,
        None if seen is None else made_by.get(id(seen)) if live.kind in ("made", "unknown") else None,
        live.path,
        tuple(names),
        None if seen is None else seen.place,
        "" if seen is None else seen.module,
        "" if seen is None else seen.name,
        live.name,
    )


def _parameters(seen: _Seen) -> list[_Live]:
    """The parameters of a layer."""
    found: dict[int, _Live] = {}
    todo = [v for v in seen.inputs if v.weights]
    while todo:
        live = todo.pop()
        if live.made_by is None:
            found[id(live)] = live
        else:
            todo.extend(v for v in live.made_by.inputs if id(v) not in found)
    return list(found.values())


def _is_packed(value: Any) -> bool:
    """A packed sequence is made of tensors only, and asks them for their device."""
    return isinstance(value, PackedSequence)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() or not _plain(tensor) else writes_in_place(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _plain(tensor) else id(tensor)
