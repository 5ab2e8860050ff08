"""What user code writes into weights outside of steps, and what it averages or compares them with.

A tensor is known by its memory: two with one memory have the same numbers for ever, whatever their names. Sums of
weights times numbers are followed within a step: one whose factors add up to 1 is an average.
"""

from __future__ import annotations

import ast
import functools
import linecache
import textwrap
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.wiring.target_networks.network_passes import NetworkPasses
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.samples import storage_of
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here, user_frames
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    DISTANCE_LOSSES,
    DIVISIONS,
    IN_PLACE_OPERATORS,
    MULTIPLICATIONS,
    SUBTRACTIONS,
)
from pytest_trainloop.runs.second_run import SecondRun

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

Memory = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Address, offset, shape and strides."""

Terms = tuple[tuple[Memory, float], ...]
"""Tensors as they are now, and the numbers that they are multiplied by, in a sum."""

_ROUNDING = 1e-6

_ALIASES = frozenset({"detach", "data"})
_COMPARISONS = (SUBTRACTIONS - {"rsub", "__rsub__"}) | DISTANCE_LOSSES | {"dist"}
_FOREACH = frozenset({"_foreach_mul_", "_foreach_add_", "_foreach_sub_", "_foreach_lerp_", "_foreach_copy_"})
_IN_PLACE = frozenset({"mul_", "__imul__", "add_", "__iadd__", "sub_", "__isub__", "lerp_", "copy_"})


@dataclass(slots=True)
class Write:
    """One write of a copy or an average into a weight."""

    name: str
    place: Place
    step: int
    passes: int
    """Backward passes before it."""
    average: bool
    own: bool
    """Whether all that is written comes from the memory that is written to."""
    kept: bool
    """Whether what is copied was taken before the weight changed last."""
    fresh: bool
    """Whether it was taken in this step."""
    of: tuple[str, ...] = ()
    """The weights that are averaged."""


@dataclass(slots=True)
class Average:
    """An average of two tensors, one of them a weight, that is a tensor of its own."""

    names: tuple[str, ...]
    """The weights among the two."""
    place: Place
    step: int
    passes: int
    result: weakref.ref[torch.Tensor]
    read: bool = False


@dataclass(slots=True)
class Difference:
    """Of a weight and of a tensor of its shape: 0 for ever where both are one memory."""

    name: str
    place: Place
    step: int
    own: bool
    trains: bool = False
    """Whether a backward pass goes through it, or it is added to a gradient."""


class WeightWrites(WatchingMode):
    """The watched run made again with an eye on writes, averages and differences of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.averages: list[Average] = []
        self.differences: list[Difference] = []
        self.leaving: list[tuple[Place, int, tuple[str, str], float]] = []
        """Writes that take a tensor away from a weight: the line, the step, the names of both, how the gap grows."""
        self.norms = False
        """Whether a batch norm was called."""
        self._sums: dict[int, tuple[weakref.ref[torch.Tensor], int, Terms]] = {}
        self._results: dict[int, Average] = {}
        self._zeros: dict[int, tuple[weakref.ref[torch.Tensor], Difference]] = {}
        self._scaled: dict[Memory, tuple[int, float]] = {}
        """Weights that were multiplied in place: the step, and the number."""
        self._taken: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, int], Place]] = {}
        """Views of weights, how often these had changed when they were made, and the line that made them."""
        self._last_view: dict[tuple[Memory, Place], weakref.ref[torch.Tensor]] = {}
        self._outlived: set[tuple[Memory, Place]] = set()
        """Weights of which a line made another view while the one that it made in an earlier step was still kept."""
        self._changes: Counter[int] = Counter()
        self._names: dict[Memory, str] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._known_at = (-1, -1)
        self.networks: NetworkPasses | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> WeightWrites:
        return evidence.shared(SecondRun).heard(cls)

    @classmethod
    def listening(cls, evidence: Evidence) -> WeightWrites:
        found, record = cls(), evidence.run()
        found.networks = NetworkPasses(frozenset(record.name(i) for i in record.held))
        return found

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        networks = () if self.networks is None else (self.networks.watching(watch),)
        return (*networks, *super().contexts(watch))

    def take_batch(self, number: int, item: Any) -> None:
        """Batches are none of its business."""

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
            name = "data="
        self.norms |= name == "batch_norm"
        with self.watch.suspended():
            self._settle()
            for tensor in tensors_in(args, kwargs) if self._results else ():
                average = self._results.get(id(tensor))
                if average is not None and average.result() is tensor:
                    average.read = True
            if name in _FOREACH:
                for each in _single_calls(args, kwargs):
                    self._written(name.removeprefix("_foreach_"), *each)
            elif name in _IN_PLACE or name == "data=":
                self._written(name, args, kwargs)
        out = passed_on(func, args, kwargs)
        with self.watch.suspended():
            self._made(name, args, kwargs, out)
            if self.networks is not None:
                self.networks.follow(name, tensors_in(args, kwargs), tensors_in(out))
        return out

    def _settle(self) -> None:
        """Names of weights by where they are now, once a step."""
        table = self.watch.table
        now = (self.watch.record.steps, len(table.tensors))
        if now == self._known_at:
            return
        self._known_at = now
        self._sums.clear()
        self._zeros.clear()
        self._names = {}
        for entry, tensor in zip(table.entries, table.tensors, strict=True):
            memory = memory_of(tensor)
            if memory is not None and tensor.is_floating_point():
                self._names.setdefault(memory, entry.name)
                self._shapes.add(memory[2])

    def _terms(self, tensor: torch.Tensor) -> Terms:
        known = self._sums.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == self.watch.record.steps:
            return known[2]
        if tensor.grad_fn is not None or tuple(tensor.shape) not in self._shapes:
            return ()
        memory = memory_of(tensor)
        return () if memory is None else ((memory, 1.0),)

    def _sum(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Terms:
        """What the call gives as a sum of tensors; nothing where it is none."""
        if len(args) < 2:
            return ()
        one, other = args[0], args[1]
        if name in MULTIPLICATIONS or name in DIVISIONS:
            if _number(one) is not None and name in MULTIPLICATIONS:
                one, other = other, one
            number = _number(other)
            if not isinstance(one, torch.Tensor) or number is None or (name in DIVISIONS and not number):
                return ()
            return _times(self._terms(one), 1 / number if name in DIVISIONS else number)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
            return ()
        mine, others = self._terms(one), self._terms(other)
        if not mine or not others:
            return ()
        if name == "lerp":
            weight = _number(args[2] if len(args) > 2 else kwargs.get("weight"))
            return () if weight is None else (*_times(mine, 1 - weight), *_times(others, weight))
        if name in ADDITIONS or name in SUBTRACTIONS:
            alpha = _number(kwargs.get("alpha", 1.0))
            if alpha is None:
                return ()
            if name in ("rsub", "__rsub__"):
                mine, others = others, mine
            return (*mine, *_times(others, -alpha if name in SUBTRACTIONS else alpha))
        return ()

    def _written(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a write of a copy or an average; called before it is made."""
        target, given = (*args, None)[:2]
        memory = memory_of(target) if isinstance(target, torch.Tensor) else None
        if memory is None:
            return
        if name == "data=":
            self._known_at = (-1, -1)
        if isinstance(given, torch.Tensor) and name in ("add_", "__iadd__", "sub_", "__isub__", "data="):
            self._note_gradient(target, given)
        base = name.strip("_")
        base = base[1:] if name in IN_PLACE_OPERATORS else base
        step, scaled = self._scaled.pop(memory, (-1, 1.0))
        scaled = scaled if step == self.watch.record.steps else 1.0
        alias = isinstance(given, torch.Tensor) and memory_of(given) == memory
        if base == "mul" and (number := _number(given)) is not None:
            self._scaled[memory] = (self.watch.record.steps, scaled * number)
        elif base in ("copy", "data=") and isinstance(given, torch.Tensor):
            terms = self._terms(given)
            self._note_leaving(memory, terms)
            if alias and base == "copy":
                self._note_write(target, memory, given, ((memory, 1.0),))
            elif len(terms) > 1 or base == "copy":
                self._note_write(target, memory, given, terms)
        elif base in ("add", "sub", "lerp") and isinstance(given, torch.Tensor):
            terms = self._sum(base, args, kwargs)
            if scaled != 1.0:
                terms = tuple((m, f * scaled if m == memory and n == 0 else f) for n, (m, f) in enumerate(terms))
            self._note_leaving(memory, terms)
            if len(terms) > 1 and (base == "lerp" or _is_average(terms)):
                self._note_write(target, memory, given, terms)
        self._changes[memory[0]] += base != "data="

    def _note_write(self, target: torch.Tensor, memory: Memory, given: torch.Tensor, terms: Terms) -> None:
        weight = self._names.get(memory)
        average = _is_average(terms)
        if weight is None and not average:
            return
        made, stamp, line = self._taken.get(id(given), (None, None, None))
        known = made is not None and made() is given
        now = (self.watch.record.steps, self._changes[memory[0]])
        own = bool(terms) and all(m == memory for m, _ in terms) and (average or terms[0][1] == 1.0)
        itself = self.watch.table.index(given) is not None
        kept = own and not average and not itself
        sources = dict.fromkeys(m for m, _ in terms if m in self._names and m != memory)
        place = here()[0]
        if average and len(sources) == 1:
            self.averaged(memory, next(iter(sources)), place)
        self.writes.append(
            Write(
                weight or "",
                place,
                now[0],
                self.watch.backward_passes,
                average,
                own,
                kept and (stamp != now or (memory, line) in self._outlived if known else now[0] > 0),
                itself or self._taken_now(given),
                tuple(dict.fromkeys(self._names[source] for source in sources)),
            )
        )

    def _note_leaving(self, memory: Memory, terms: Terms) -> None:
        """Note that a tensor becomes itself and more of its difference from a weight: the gap grows without end."""
        parts = _parts(terms)
        weight = next((m for m in parts if m != memory and m in self._names), None)
        if len(parts) == 2 and weight is not None:
            gap, sign = parts.get(memory, 0.0), parts[weight]
            if gap > 1.0 + _ROUNDING and abs(gap + sign - 1.0) < _ROUNDING:
                self.leaving.append((here()[0], self.watch.record.steps, (self.name(memory), self.name(weight)), gap))

    def averaged(self, memory: Memory, source: Memory, place: Place) -> None:
        """Called when a weight of an average is moved towards its source."""

    def name(self, memory: Memory) -> str:
        return self._names.get(memory, "")

    def _taken_now(self, tensor: torch.Tensor) -> bool:
        """Whether it is a view of a weight that was made in this step."""
        made, stamp, _line = self._taken.get(id(tensor), (None, (-1, 0), None))
        return made is not None and made() is tensor and stamp[0] == self.watch.record.steps

    def _note_gradient(self, target: torch.Tensor, given: torch.Tensor) -> None:
        """A difference that is added to a gradient."""
        known = self._zeros.get(id(given))
        if known is not None and known[0]() is given:
            grads = (memory_of(t.grad) for t in self.watch.table.tensors if t.is_leaf and t.grad is not None)
            known[1].trains |= memory_of(target) in set(grads)

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(out, torch.Tensor) or name in _IN_PLACE or not args:
            return
        if name in _ALIASES and isinstance(args[0], torch.Tensor):
            memory = memory_of(out)
            if memory is not None and memory in self._names:
                stamp, line = (self.watch.record.steps, self._changes[memory[0]]), here()[0]
                before = self._last_view.get((memory, line), lambda: None)()
                if before is not None and self._taken[id(before)][1] != stamp:
                    self._outlived.add((memory, line))  # the best weights so far, until better ones came
                self._last_view[memory, line] = weakref.ref(out)
                self._taken[id(out)] = (weakref.ref(out), stamp, line)
            return
        if name in MULTIPLICATIONS and self._zeros:
            known = next((k for t in tensors_in(args) if (k := self._zeros.get(id(t))) and k[0]() is t), None)
            if known is not None:
                self._zeros[id(out)] = (weakref.ref(out), known[1])
        if name in _COMPARISONS:
            self._compared(args, kwargs, out)
        terms = self._sum(name, args, kwargs)
        if not terms:
            return
        self._sums[id(out)] = (weakref.ref(out), self.watch.record.steps, terms)
        if _is_average(terms):
            names = tuple(dict.fromkeys(self._names[m] for m, _ in terms if m in self._names))
            distinct = len({m for m, _ in terms})
            if names and distinct == 2:
                at = here()[0]
                average = Average(names, at, self.watch.record.steps, self.watch.backward_passes, weakref.ref(out))
                self.averages.append(average)
                self._results[id(out)] = average

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        """Note a difference of a weight and something of its shape."""
        one, other = args[0], args[1] if len(args) > 1 else kwargs.get("target", kwargs.get("other"))
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
            return
        here_is = memory_of(one)
        name = self._names.get(here_is) if here_is is not None else None
        if name is None or one.grad_fn is not None or other.grad_fn is not None:
            return
        own = here_is == memory_of(other)
        if own and out.requires_grad and one is not other:
            own = not any(self._taken_now(side) for side in (one, other))  # w - w.detach() has a slope
        if own and _written_alike(user_frames(1)):
            return
        difference = Difference(name, here()[0], self.watch.record.steps, own)
        self.differences.append(difference)
        if out.requires_grad:
            on_gradient(out, lambda _gradient: setattr(difference, "trains", True))
        else:
            self._zeros[id(out)] = (weakref.ref(out), difference)


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Where the entries of a tensor are; None where it has no memory of its own."""
    address = storage_of(tensor)
    return (address, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()) if address else None


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        plain = value.dim() == 0 and value.is_cpu and not value.requires_grad and not value.is_complex()
        return float(value) if plain else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _times(terms: Terms, number: float) -> Terms:
    return tuple((memory, factor * number) for memory, factor in terms)


def _is_average(terms: Terms) -> bool:
    """Whether the factors add up to 1, and each tensor has a part of its own."""
    parts = _parts(terms)
    between = all(_ROUNDING < part < 1.0 + _ROUNDING for part in parts.values())
    return len(terms) > 1 and between and abs(sum(parts.values()) - 1.0) < _ROUNDING


def _parts(terms: Terms) -> dict[Memory, float]:
    """The factor of each tensor."""
    parts: dict[Memory, float] = defaultdict(float)
    for memory, factor in terms:
        parts[memory] += factor
    return parts


def _single_calls(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of one tensor that a call of lists makes."""
    for number, target in enumerate(args[0] if args and isinstance(args[0], (list, tuple)) else ()):
        yield (
            (target, *(a[number] if isinstance(a, (list, tuple)) and number < len(a) else a for a in args[1:])),
            kwargs,
        )


def _written_alike(frames: Sequence[FrameType]) -> bool:
    """Whether the line compares an expression with itself, or with what is detached of it: a way to write 0, or a
    slope."""
    if not frames:
        return True
    return _alike_at(frames[0].f_code.co_filename, frames[0].f_lineno)


@functools.lru_cache(maxsize=256)
def _alike_at(file: str, line: int) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(linecache.getline(file, line)).strip().rstrip(":"))
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else []
        sides = node.args[:2] if isinstance(node, ast.Call) and len(node.args) > 1 else sides
        if len(sides) == 2 and ast.dump(_bare(sides[0])) == ast.dump(_bare(sides[1])):
            return True
    return False


def _bare(node: ast.expr) -> ast.expr:
    """An expression without ``.data`` and ``.detach()`` at its end."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        else:
            return node
