"""Which way each step of a game of two networks pushes the scores that one of them gives.

A critic is a module all of whose weights one optimizer holds. Its calls differ by what they are given: "made" is what
weights of another optimizer took part in computing, with history or not; "given" is the rest, data or noise.
In one further run the scores are moved by a constant, another one at each call from a line, so that a direction that
depends on the score (least squares) is seen on both sides of its target.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytest_trainloop.core import members
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.records.gradient_ledger import Ledger
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import name_of, watched
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules, on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import IN_PLACE_OPERATORS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

OFFSETS = (0.5, -0.5, 0.0, 3.0, -3.0, 0.25, -0.25, 0.75, -0.75, 1.5, -1.5, 6.0)
"""Between, below and above the targets of least squares: 0 and 1, or -1, 0 and 1."""

LEAST_OFFSETS = 3
"""Offsets at which both directions must be known."""

BOTH = -1
"""The optimizers of both sides, where both step with the gradient of one pass."""

_BOUNDED = ("SigmoidBackward", "SoftmaxBackward", "TanhBackward")
_MOVES = ("View", "Squeeze", "Unsqueeze", "Reshape", "Clamp", "Clone", "Mean")
_MOST_SCORES = 100_000


@dataclass(slots=True)
class ScoreCall:
    """One call of a critic."""

    critic: str
    owner: int
    """The optimizer that holds its weights."""
    made_by: frozenset[int]
    """The other optimizers whose weights took part in what it was given."""
    with_data: bool
    """Whether it was given other data of the batch as well, next to what they made."""
    offset: int
    place: Place
    pushes: dict[int, dict[int, float]] = field(default_factory=dict)
    """By the position of a backward pass and the number of the output: the sign of the gradient, 0 where it differs."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The directions in which one kind of step pushes the scores of one kind of input, by offset."""

    place: Place
    by_offset: dict[int, float]
    with_data: set[bool]

    def always(self, other: Pushed, factor: float) -> int:
        """At how many offsets this direction is the other times the factor; 0 where at any it is not, or at few."""
        both = self.by_offset.keys() & other.by_offset.keys()
        agree = all(self.by_offset[o] == factor * other.by_offset[o] for o in both)
        return len(both) if agree and len(both) >= LEAST_OFFSETS else 0

    def opposed(self, other: Pushed) -> int:
        """At how many offsets the two directions are opposed."""
        both = self.by_offset.keys() & other.by_offset.keys()
        return sum(self.by_offset[o] == -other.by_offset[o] for o in both)


class Output(NamedTuple):
    """One output of a critic, of what the weights of the optimizer ``maker`` made."""

    critic: str
    owner: int
    number: int
    maker: int


class ScoreRecorder(WatchingMode):
    """Records the calls of critics in a run that is made in its ``contexts``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ScoreCall] = []
        self._tags: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[int]]] = {}
        self._owners: dict[int, int | None] = {}
        self._inside: list[int | None] = []
        self._counts: dict[tuple[Any, ...], Iterator[int]] = defaultdict(lambda: itertools.cycle(range(len(OFFSETS))))

    @classmethod
    def of(cls, evidence: Evidence) -> dict[Output, dict[str, Pushed]]:
        """The games of the loop, from one further run; none where fewer than two optimizers step."""
        record = evidence.run()
        stepping = [o for o in record.optimizers if o.steps and o.parameters]
        if not any(set(a.parameters).isdisjoint(b.parameters) for a in stepping for b in stepping):
            return {}
        found = cls()
        return _games(
            evidence.rerun(contexts=found.contexts, varied="with a constant added to the scores"), found.calls
        )

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        enter = before_modules(self._enter)
        with super().watching(watch), hooked(enter, after_modules(self._leave, with_kwargs=True, always_call=True)):
            try:
                yield
            finally:
                self._tags.clear()

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        name = name_of(func)
        if not watched(name):
            return out
        with self.watch.suspended():
            tags = self._of(tensors_in(args, kwargs))
            if tags:
                written = name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
                self._tag(tensors_in(args[:1] if written else out), tags)
        return out

    def _of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        found: set[int] = set()
        for tensor in tensors:
            known = self._tags.get(id(tensor))
            if known is not None and known[0]() is tensor:
                found |= known[1]
            elif (index := self.watch.table.index(tensor)) is not None and (o := self._holder({index})) is not None:
                found.add(o)
        return frozenset(found)

    def _tag(self, tensors: Iterable[torch.Tensor], tags: frozenset[int]) -> None:
        if len(self._tags) > _MOST_SCORES:
            self._tags = {key: entry for key, entry in self._tags.items() if entry[0]() is not None}
        for tensor in tensors:
            self._tags[id(tensor)] = (weakref.ref(tensor), tags)

    def _holder(self, indices: set[int]) -> int | None:
        """The optimizer with the fewest weights that holds all of these."""
        holding = [o for o in self.watch.record.optimizers if indices and indices <= set(o.parameters)]
        return min(holding, key=lambda o: len(set(o.parameters))).index if holding else None

    def _owner(self, module: nn.Module) -> int | None:
        if self._owners.get(id(module)) is None:
            indices = {i for p in members.parameters(module) if (i := self.watch.table.index(p)) is not None}
            self._owners[id(module)] = self._holder(indices)
        return self._owners[id(module)]

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if self._watch is not None and not self.watch.is_suspended:
            self._inside.append(self._owner(module))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._watch is None or self.watch.is_suspended or not self._inside:
            return None
        owner = self._inside.pop()
        looked_at = self.active() and torch.is_grad_enabled() and self.watch.full
        if owner is None or owner in self._inside or not looked_at:
            return None
        with self.watch.suspended():
            return self._called(module, owner, (args, kwargs), output)

    def _called(self, module: nn.Module, owner: int, given: Any, output: Any) -> Any:
        scores = list(nested.tensors(output))
        if not any(t.requires_grad for t in scores):
            return None
        place, site = here()
        path = self.watch.table.path_of(module)
        tensors = [t for t in tensors_in(given) if t.is_floating_point()]
        tags = [self._of([t]) - {owner} for t in tensors]
        made_by: frozenset[int] = frozenset().union(*tags)
        offset = next(self._counts[path, site, made_by, any(t.requires_grad for t in tensors)])
        call = ScoreCall(path, owner, made_by, not all(tags), offset, place)
        self.calls.append(call)
        moved = {}
        for number, tensor in enumerate(scores):
            if not tensor.requires_grad or not tensor.is_floating_point():
                continue
            if not _is_bounded(tensor):
                moved[id(tensor)] = tensor + OFFSETS[offset]
                self._tag([moved[id(tensor)]], self._of([tensor]))
            on_gradient(moved.get(id(tensor), tensor), self._pushing(call, number))
        return nested.mapped(output, lambda _, tensor: moved.get(id(tensor), tensor), torch.is_tensor)

    def _pushing(self, call: ScoreCall, number: int) -> Callable[[torch.Tensor | None], None]:
        def pushed(gradient: torch.Tensor | None) -> None:
            if gradient is None or self._watch is None:
                return
            backward = self.watch.backward
            if backward is not None and backward.kind == "backward":
                with self.watch.suspended():
                    above, below = bool((gradient > 0).any()), bool((gradient < 0).any())
                    call.pushes.setdefault(backward.at, {})[number] = float(above) - float(below)

        return pushed


def _is_bounded(output: torch.Tensor) -> bool:
    """Whether the last operation bounds it: a probability that is moved may be refused, and is on one side of any
    target as it is."""
    node = output.grad_fn
    for _ in range(6):
        if node is None or not node.name().startswith(_MOVES):
            break
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_BOUNDED)


def _games(record: Record, calls: list[ScoreCall]) -> dict[Output, dict[str, Pushed]]:
    """What pushes each output of a critic: its own step its scores of data ("given") and of what is made ("made"), the
    maker's step the latter ("back"); "shared" and "shared given" in passes that both step with."""
    holder = {i: min(held, key=lambda o: len(set(record.optimizers[o].parameters))) for i, held in record.held.items()}
    stepped = {p.at: {holder[i] for i in p.used if i in holder} for p in Ledger(record).passes}
    pushed: dict[tuple[Any, ...], list[tuple[ScoreCall, float]]] = defaultdict(list)
    for call in calls:
        for at, signs in call.pushes.items():
            steps = stepped.get(at, set())
            if not 1 <= len(steps) <= 2 or len(call.made_by) > 1:
                continue
            by, maker = min(steps) if len(steps) == 1 else BOTH, next(iter(call.made_by), None)
            turned = -1.0 if any(record.optimizers[o].maximizes for o in steps) else 1.0
            for number, sign in signs.items():
                pushed[call.critic, call.owner, number, maker, by].append((call, sign * turned))
    found: dict[Output, dict[str, Pushed]] = defaultdict(dict)
    for output in {Output(*key[:4]): None for key in pushed if key[3] is not None}:
        critic, owner, number, maker = output
        kinds = {"given": (None, owner), "made": (maker, owner), "back": (maker, maker)}
        kinds |= {"shared": (maker, BOTH), "shared given": (None, BOTH)}
        for kind, (made_by, by) in kinds.items():
            seen = pushed.get((critic, owner, number, made_by, by))
            if not seen:
                continue
            signs_at: dict[int, set[float]] = defaultdict(set)
            for call, sign in seen:
                signs_at[call.offset].add(sign)
            known = {offset: next(iter(signs)) for offset, signs in signs_at.items() if len(signs) == 1}
            by_offset = {offset: sign for offset, sign in known.items() if sign}
            found[output][kind] = Pushed(seen[0][0].place, by_offset, {call.with_data for call, _ in seen})
    return found


def may_hold_one_label(batch: Any) -> bool:
    """Whether some tensor of the batch holds a single value: labels that happen to be all one class."""
    tensors = [t.detach() for t in nested.tensors(batch) if t.numel()]
    return any(bool((t == t.flatten()[0]).all()) for t in tensors)
