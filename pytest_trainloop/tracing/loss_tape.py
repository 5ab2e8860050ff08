"""What each backpropagated value of a loop's first steps was computed by, from the layers' outputs on.

See docs/how-it-decides.md#losses-written-by-hand.

One run in float64, or the first steps of the one that is observed, made again in float64 from the layers' outputs on
(``widened``). A call is a *layer* where weights of more than one entry meet something else; the slice of a value
reaches back to the results of the last layers, to the tensors of the batch and to constants. It can be made again with
other values (``Slice.replay``).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pytest_trainloop import nested
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import has_values, tree_map, writes_in_place
from pytest_trainloop.recording.torch_names import (
    AUTOGRAD_CALLS,
    IN_PLACE_OPERATORS,
    SAMPLES,
    SHAPE_ONLY,
    TO_PYTHON,
)
from pytest_trainloop.tracing.batches_taken import batches_taken
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of, watched
from pytest_trainloop.tracing.taped import LONGEST, Live, Seen, behind, is_plain, slice_of
from pytest_trainloop.tracing.widened import widened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.nested import Path
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.loss_slice import Kind, Slice

STEPS = 2
"""Optimizer steps that are looked at."""

MOST_CALLS = 20_000
"""Calls that are kept between two steps."""

LARGEST = 1 << 22
"""Entries of all tensors of one slice."""

MOST_BYTES = 1 << 28
"""Of the results of one step of an observed run, which are kept until it ends: more are let go of, and the step is not
looked at."""

MOST_SLICES = 12

_NO_RESULT = TO_PYTHON | AUTOGRAD_CALLS
_SOURCES = SHAPE_ONLY | SAMPLES
"""Their results are drawn or constant: no gradient passes, and another run would draw others."""

_NO_WRITES = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad_"})


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
            enough=lambda record: record.rounds >= STEPS,
            may_raise=True,
        )
        return cls(tuple(tape.slices))


class LossTape(WatchingMode):
    """The mode that keeps the calls of a step, and makes a slice of each value that is backpropagated."""

    def __init__(self, *, most_bytes: float = math.inf) -> None:
        super().__init__()
        self.slices: list[Slice] = []
        self._most_bytes = most_bytes
        self._bytes = 0
        self._live: dict[int, Live] = {}
        self._by_storage: dict[int, list[Live]] = {}
        self._batch: list[tuple[Path, torch.Tensor]] = []
        self._count = 0
        self._steps = 0
        self._signatures: Counter[tuple[Any, ...]] = Counter()

    def take(self, _number: int, item: Any) -> None:
        """Note the tensors of a batch that is handed to the loop."""
        self._batch += list(nested.paths(item))

    def _forget(self) -> None:
        for lives in self._by_storage.values():
            for live in lives:
                live.made_by = None  # else calls and what they made hold each other, until the collector comes
        self._live.clear()
        self._by_storage.clear()
        self._count = self._bytes = 0

    def active(self) -> bool:
        """In the first steps only."""
        if self.watch.record.rounds >= STEPS or not self.watch.full:
            self._forget()
            self._batch.clear()
            return False
        return super().active()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if not watched(name) or name in _NO_RESULT:
            return passed_on(func, args, kwargs)
        with self.watch.suspended():
            seen = self._opened(name, func, args, kwargs)
        out = passed_on(func, args, kwargs)
        if seen is not None:
            with self.watch.suspended():
                self._closed(seen, args, out)
        return out

    def _opened(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Seen | None:
        if self.watch.record.steps != self._steps:
            self._steps = self.watch.record.steps
            self._forget()
        for path, tensor in self._batch:
            self._register(tensor, Live(tensor, _version(tensor), "batch", path=path))
        self._batch.clear()
        if self._count >= MOST_CALLS:
            return None
        self._count += 1
        inputs: list[Live] = []

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
            for live in self._by_storage.get(_memory(args[0]), ()):
                if live.kept is None:
                    live.kept = live.tensor.detach().clone()
        place, _ = here()
        return Seen(self._count, name, func, given[0], given[1], tuple(inputs), place, self.watch.module_path(), writes)

    def _closed(self, seen: Seen, args: tuple[Any, ...], out: Any) -> None:
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
            live = Live(result, _version(result), kind, seen)
            seen.outputs.append(live)
            self._register(result, live)
            self._bytes += result.numel() * result.element_size()
        if self._bytes > self._most_bytes:
            self._forget()
            self._count = MOST_CALLS

    def _register(self, tensor: torch.Tensor, live: Live) -> None:
        self._live[id(tensor)] = live
        self._by_storage.setdefault(_memory(tensor), []).append(live)

    def _of(self, tensor: torch.Tensor) -> Live:
        live = self._live.get(id(tensor))
        if live is not None and not live.weights and isinstance(tensor, nn.Parameter):
            live = None  # drawn or written in place before: a weight all the same
        version = _version(tensor)
        if live is not None and live.tensor is tensor:
            if live.weights and not live.name:  # its model was built before it was known
                live.name = self._name(tensor)
            if live.version == version or live.weights:
                return live
            before = tuple(dict.fromkeys((live, *self._by_storage.get(_memory(tensor), ())[-1:])))
            place, _ = here()
            unseen = Seen(self._count, "write", None, (), {}, before, place, self.watch.module_path())
            live = Live(tensor, version, live.kind if live.kind == "batch" else "unknown", unseen, live.path)
            unseen.outputs.append(live)
        else:
            kind: Kind = "constant"
            name = self._name(tensor)
            if name or self.watch.table.index(tensor) is not None or isinstance(tensor, nn.Parameter):
                kind = "weights"
            elif tensor.requires_grad:
                kind = "unknown"
            live = Live(tensor, version, kind, name=name)
        self._register(tensor, live)
        return live

    def _name(self, tensor: torch.Tensor) -> str:
        index = self.watch.table.index(tensor)
        return "" if index is None else self.watch.table.entries[index].name

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

    def _slice(self, root: Live, place: Place) -> Slice | None:
        lives, seen = behind(root)
        if len(seen) > LONGEST or sum(v.tensor.numel() for v in lives) > LARGEST:
            return None
        if not all(is_plain(v.tensor) for v in lives):
            return None
        signature = tuple((s.name, s.place.line) for s in seen)
        self._signatures[signature] += 1
        if self._signatures[signature] > STEPS or len(self.slices) >= MOST_SLICES:
            return None
        return slice_of(root, lives, seen, self._steps, place)

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        backward = _AtBackward(self)
        return backward.watching(watch), backward.on_while_full(watch), self.watching(watch), self.on_while_full(watch)

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch):
            try:
                yield
            finally:
                self._forget()


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


def _is_packed(value: Any) -> bool:
    """A packed sequence is made of tensors only, and asks them for their device."""
    return isinstance(value, PackedSequence)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() or not is_plain(tensor) else writes_in_place(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return storage_of(tensor) or id(tensor)
