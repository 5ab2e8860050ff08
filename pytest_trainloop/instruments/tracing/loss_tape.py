"""What each backpropagated value of a loop's first steps was computed by, from the layers' outputs on.

See docs/how-it-decides.md#losses-written-by-hand.

One run in float64, or the first steps of the one that is observed, made again in float64 from the layers' outputs on
(``widened``). A call is a *layer* where weights of more than one entry meet something else; the slice of a value
reaches back to the results of the last layers, to the tensors of the batch and to constants. It can be made again with
other values (``Slice.replay``).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import present
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing import loss_slice
from pytest_trainloop.instruments.tracing.batches_taken import batches_taken
from pytest_trainloop.instruments.tracing.loss_slice import Ref, Slice
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.tape import Tape, Value, unseen
from pytest_trainloop.instruments.tracing.widened import widened
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, tree_map
from pytest_trainloop.recording.torch_names import (
    ACTIVATIONS,
    CASTS,
    EQUALITIES,
    INDEXING,
    SAMPLES,
    SHAPE_ONLY,
    VIEWS,
)

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.tracing.loss_slice import Kind
    from pytest_trainloop.instruments.tracing.tape import Call
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

TAPED_STEPS = 2
"""Optimizer steps that are looked at."""

LONGEST = 3_000
"""Calls of one slice."""

LARGEST = 1 << 22
"""Entries of all tensors of one slice."""

MOST_BYTES = 1 << 28
"""Of the results of one step of an observed run, which are kept until it ends: more are let go of, and the step is not
looked at."""

MOST_SLICES = 12

_SOURCES = SHAPE_ONLY | SAMPLES
"""Their results are drawn or constant: no gradient passes, and another run would draw others."""

_PURE = VIEWS | CASTS | INDEXING | ACTIVATIONS | EQUALITIES | frozenset({"one_hot", "normalize"})


class Tapes:
    """The slices of a loop's backpropagated values, in order; as an instrument, those of the observed run."""

    def __init__(self, slices: tuple[Slice, ...] | None = None) -> None:
        self._slices = slices
        self._tape: LossTape | None = None

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Raises ``CannotDecide`` where none of an observed run can be looked at."""
        if self._slices is None:
            taken = [] if self._tape is None else self._tape.slices
            self._slices = tuple(filter(None, map(widened, taken)))
        if self._tape is not None and not self._slices:
            raise CannotDecide(
                "no loss of the observed steps could be followed, or all are too large: return a TrainLoop from a "
                "marked test"
            )
        return self._slices

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What the observed run is made in."""
        self._tape = LossTape(most_bytes=MOST_BYTES)
        return (*self._tape.contexts(watch), batches_taken(self._tape.take, watch))

    @classmethod
    def of(cls, evidence: Evidence) -> Tapes:
        """The slices of the first steps: at most two of each sequence of calls."""
        tape = LossTape()
        evidence.rerun(
            contexts=tape.contexts,
            before_item=tape.take,
            double=True,
            enough=lambda record: record.rounds >= TAPED_STEPS,
            may_raise=True,
        )
        return cls(tuple(tape.slices))


class LossTape(Tape):
    """A tape that holds all tensors of a step, with copies of those that are written to. It makes a slice of each value
    that is backpropagated."""

    most = 20_000

    def __init__(self, *, most_bytes: float = math.inf) -> None:
        super().__init__()
        self.slices: list[Slice] = []
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kind_of: dict[int, Kind] = {}
        self._paths: dict[int, Path] = {}
        self._copies: dict[int, torch.Tensor] = {}
        """Of values that were about to be overwritten."""
        self._in_memory: dict[int, list[Value]] = {}
        self._outputs: dict[int, list[Value]] = {}
        """What each call gave, by its number."""
        self._signatures: Counter[tuple[Any, ...]] = Counter()

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        backward = _AtBackward(self)
        return backward.watching(watch), backward.on_while_full(watch), *super().contexts(watch)

    def active(self) -> bool:
        """In the first steps only."""
        if self.watch.record.rounds >= TAPED_STEPS or not self.watch.full:
            self.forget()
            return False
        return super().active()

    def forget(self) -> None:
        super().forget()
        for held in (self._known, self._kind_of, self._paths, self._copies, self._in_memory, self._outputs):
            held.clear()
        self._bytes = 0

    def take(self, _number: int, item: Any) -> None:
        """Note the tensors of a batch that the loop is given."""
        self._notice_a_step()
        for path, tensor in nested.paths(item):
            value = self._noted(Value(tensor), tensor)
            self._kind_of[id(value)], self._paths[id(value)] = "batch", path

    def _noted(self, value: Value, tensor: torch.Tensor) -> Value:
        value.keep()
        self._kind_of[id(value)] = self._kind_in_slice(value, tensor)
        self._in_memory.setdefault(_memory(tensor), []).append(value)
        if value.call is not None:
            self._outputs.setdefault(value.call.number, []).append(value)
            self._bytes += tensor.numel() * tensor.element_size()
        return super()._noted(value, tensor)

    def _kind_in_slice(self, value: Value, tensor: torch.Tensor) -> Kind:
        call = value.call
        if value.parameter or (call is None and self.watch.table.index(tensor) is not None):
            return "weights"
        if call is None:
            return "unknown" if value.history else "constant"
        kinds = [self._kind_of[id(v)] for v in call.inputs]
        if call.func is unseen:
            if kinds[0] == "batch":
                self._paths[id(value)] = self._paths[id(call.inputs[0])]
            return kinds[0] if kinds[0] in ("batch", "weights") else "unknown"
        if call.name in _SOURCES:
            return "constant"
        if kinds and all(kind == "weights" for kind in kinds):
            return "weights"
        large = any(kind == "weights" and not v.is_number for kind, v in zip(kinds, call.inputs, strict=True))
        return "layer" if large else "made"

    def _begun(
        self, watch: Watch, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        call = super()._begun(watch, name, func, args, kwargs)
        if call.writes and args and isinstance(args[0], torch.Tensor) and self.count <= self.most:
            for value in self._in_memory.get(_memory(args[0]), ()):
                if id(value) not in self._copies:
                    with watch.suspended():
                        copy = self._copies[id(value)] = _now(value).detach().clone()
                    self._bytes += copy.numel() * copy.element_size()
        return call

    def _results(self, call: Call, args: tuple[Any, ...], out: Any) -> list[torch.Tensor]:
        """What gives an argument back as it was has made nothing."""
        results, given = super()._results(call, args, out), {id(v.now) for v in call.inputs}
        return results if call.writes else [t for t in results if id(t) not in given]

    def _ended(self, call: Call, args: tuple[Any, ...], out: Any) -> None:
        super()._ended(call, args, out)
        if self._bytes > self._most_bytes:
            self.forget()
            self.count = self.most + 1

    def backpropagated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called with the arguments of each backward pass before it is made."""
        if self._watch is None or self.watch.is_suspended or self.watch.stepping:
            return
        with self.watch.suspended():
            place, _ = here()
            for root in tensors_in(args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))):
                value = self._known.get(id(root))
                if (
                    value is None
                    or value.call is None
                    or value.now is not root
                    or not has_values(root)
                    or not root.requires_grad
                ):
                    continue
                found = self._slice(value, place)
                if found is not None:
                    self.slices.append(found)

    def _slice(self, root: Value, place: Place) -> Slice | None:
        values, calls = self._behind(root)
        tensors = list(map(_now, values))
        if len(calls) > LONGEST or sum(t.numel() for t in tensors) > LARGEST or not all(map(is_plain, tensors)):
            return None
        signature = tuple((call.name, call.place.line) for call in calls)
        self._signatures[signature] += 1
        if self._signatures[signature] > TAPED_STEPS or len(self.slices) >= MOST_SLICES:
            return None
        return self._slice_of(root, values, calls, place)

    def _behind(self, root: Value) -> tuple[list[Value], list[Call]]:
        """The values that a root was computed from, up to layers, and the calls between in order."""
        values: dict[int, Value] = {}
        calls: dict[int, Call] = {}
        todo = [root]
        while todo and len(calls) <= LONGEST:
            value = todo.pop()
            if id(value) in values:
                continue
            values[id(value)] = value
            call = value.call
            if call is None or self._kind_of[id(value)] not in ("made", "unknown") or call.number in calls:
                continue
            calls[call.number] = call
            todo.extend(call.inputs)
            todo.extend(self._outputs[call.number])
        return list(values.values()), [calls[number] for number in sorted(calls)]

    def _slice_of(self, root: Value, values: list[Value], calls: list[Call], place: Place) -> Slice:
        """Without calls that repeat an earlier one with the same arguments: ``p[:, 0]`` written twice is one value."""
        twins: dict[int, Value] = {}
        first: dict[str, Call] = {}
        kept = []

        def named(value: Any) -> Any:
            return f"value {id(twins.get(id(value), value))}" if isinstance(value, Value) else value

        for call in calls:
            if call.name in _PURE and not call.writes:
                earlier = first.setdefault(f"{call.name} {tree_map(named, (call.args, call.kwargs))!r}", call)
                pair = self._outputs[earlier.number], self._outputs[call.number]
                written = any(id(v) in self._copies for outputs in pair for v in outputs)
                if earlier is not call and len(pair[0]) == len(pair[1]) and not written:
                    twins.update((id(b), a) for a, b in zip(*pair, strict=True))
                    continue
            kept.append(call)
        values = [v for v in values if id(v) not in twins]
        numbers = {id(value): number for number, value in enumerate(values)}
        numbers |= {twin: numbers[id(value)] for twin, value in twins.items()}
        made_by = {call.number: number for number, call in enumerate(kept)}
        return Slice(
            tuple(self._slice_value(value, number, made_by) for number, value in enumerate(values)),
            tuple(self._slice_call(call, number, numbers) for number, call in enumerate(kept)),
            numbers[id(root)],
            self._step,
            place,
        )

    def _slice_call(self, call: Call, number: int, numbers: dict[int, int]) -> loss_slice.Call:
        def put(value: Any) -> Any:
            return Ref(numbers[id(value)]) if isinstance(value, Value) else value

        args, kwargs = tree_map(put, (call.args, dict(call.kwargs)), is_leaf=_is_packed)
        inputs, outputs = (tuple(numbers[id(v)] for v in side) for side in (call.inputs, self._outputs[call.number]))
        func = None if call.func is unseen else call.func
        return loss_slice.Call(
            number, call.name, func, args, kwargs, inputs, outputs, call.place, call.module, call.writes
        )

    def _slice_value(self, value: Value, number: int, made_by: dict[int, int]) -> loss_slice.Value:
        call, kind, now = value.call, self._kind_of[id(value)], _now(value)
        copy = self._copies.get(id(value))
        return loss_slice.Value(
            number,
            now.detach().clone() if copy is None else copy,
            kind,
            now.requires_grad,
            made_by.get(call.number) if call is not None and kind in ("made", "unknown") else None,
            self._paths.get(id(value)),
            tuple(self._weights_of(call)) if call is not None and kind == "layer" else (),
            None if call is None else call.place,
            "" if call is None else call.module,
            "" if call is None else call.name,
            self._name(value) if kind == "weights" and call is None else "",
        )

    def _weights_of(self, layer: Call) -> Iterator[str]:
        """The names of the parameters of a layer."""
        todo, seen = [v for v in layer.inputs if self._kind_of[id(v)] == "weights"], set[int]()
        while todo:
            value = todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                if value.call is None:
                    yield self._name(value)
                todo.extend(value.parents)

    def _name(self, value: Value) -> str:
        index = self.watch.table.index(_now(value))
        return "" if index is None else self.watch.table.entries[index].name


class _AtBackward(WatchingMode):
    """The innermost mode: a pass that is under way is looked at no more by the others."""

    def __init__(self, tape: LossTape) -> None:
        super().__init__()
        self._tape = tape

    def active(self) -> bool:
        """Also in a backward pass, which has begun when the call of ``autograd.grad`` is seen."""
        return True

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("backward", "grad"):  # of an attribute that is read the name is "__get__"
            self._tape.backpropagated(args, kwargs)
        return passed_on(func, args, kwargs)


def _now(value: Value) -> torch.Tensor:
    return present(value.now, "a tensor that the tape holds")


def _is_packed(value: Any) -> bool:
    """A packed sequence is made of tensors only, and asks them for their device."""
    return isinstance(value, PackedSequence)


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _memory(tensor: torch.Tensor) -> int:
    """What views of one tensor have in common."""
    return storage_of(tensor) or -id(tensor)
