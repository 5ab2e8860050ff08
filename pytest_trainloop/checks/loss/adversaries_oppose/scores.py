"""Which way each step of a game of two networks pushes the scores that one of them gives.

A critic is a module all of whose weights one optimizer holds. Its calls are told apart by what they are given: "made"
is what weights of another optimizer took part in computing, with history or not; "given" is the rest, data or noise.
In one further run the scores are moved by a constant, another one at each call from a line, so that a direction that
depends on the score (least squares) is seen on both sides of its target.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members, nested
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules, before_modules, on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import IN_PLACE_OPERATORS
from pytest_trainloop.records.gradient_ledger import Ledger
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

OFFSETS = (0.5, -0.5, 0.0, 3.0, -3.0, 0.25, -0.25, 0.75, -0.75, 1.5, -1.5, 6.0)
"""Between, below and above the targets of least squares: 0 and 1, or -1, 0 and 1."""

LEAST = 3
"""Offsets at which both directions must be known."""

BOTH = -1
"""Stands for the optimizers of both sides, where both step with the gradient of one pass."""

_BOUNDED = ("SigmoidBackward", "SoftmaxBackward", "TanhBackward")
_MOVES = ("View", "Squeeze", "Unsqueeze", "Reshape", "Clamp", "Clone", "Mean")
_MOST = 100_000


@dataclass(slots=True)
class ScoreCall:
    """One call of a critic."""

    critic: str
    owner: int
    """The optimizer that holds its weights."""
    made_by: frozenset[int]
    """The other optimizers whose weights took part in what it was given."""
    beside_data: bool
    """Whether it was given other data of the batch as well, beside what they made."""
    offset: int
    place: Place
    pushes: dict[int, dict[int, float]] = field(default_factory=dict)
    """By the position of a backward pass and the number of the output: the sign of the gradient, 0 where it differs."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The directions in which one kind of step pushes the scores of one kind of input, by offset."""

    place: Place
    by_offset: dict[int, float]


@dataclass(frozen=True, slots=True)
class Game:
    """What the steps of a critic and of what plays with it do to one of its outputs."""

    critic: str
    given: Pushed
    """The critic's step, on what no other trained weights made."""
    made: Pushed
    """The critic's step, on what the other one made."""
    back: Pushed
    """The other one's step, on what it made."""
    beside_data: bool


@dataclass(frozen=True, slots=True)
class Mixed:
    """Steps of one side of a game that use the gradient of the other side's loss beside that of its own."""

    critic: str
    stepped: str
    """The class of the optimizer whose step it is."""
    by_critic: bool
    """Whether this is the critic's optimizer."""
    step: Place
    offsets: int
    """The constants at which the two losses push the scores of what is made against each other."""


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
    def of(cls, evidence: Evidence) -> list[Game | Mixed]:
        """The games of the loop, from one further run; none where fewer than two optimizers step."""
        record = evidence.run()
        stepping = [o for o in record.optimizers if o.steps and o.parameters]
        if not any(set(a.parameters).isdisjoint(b.parameters) for a in stepping for b in stepping):
            return []
        found = cls()
        record = evidence.rerun(contexts=found.contexts, varied="with a constant added to the scores")
        return list(games(record, found.calls))

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
        if len(self._tags) > _MOST:
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
        if (
            owner is None
            or owner in self._inside
            or not self.active()
            or not torch.is_grad_enabled()
            or not self.watch.full
        ):
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
        moved = output
        if isinstance(output, torch.Tensor) and not _is_bounded(output):
            moved = output + OFFSETS[offset]
            self._tag([moved], self._of([output]))
            scores = [moved]
        for number, tensor in enumerate(scores):
            if tensor.requires_grad and tensor.is_floating_point():
                on_gradient(tensor, self._pushing(call, number))
        return moved

    def _pushing(self, call: ScoreCall, number: int) -> Callable[[torch.Tensor | None], None]:
        def pushed(gradient: torch.Tensor | None) -> None:
            if gradient is None or self._watch is None:
                return
            backward = self.watch.backward
            if backward is not None and backward.kind == "backward":
                with self.watch.suspended():
                    call.pushes.setdefault(backward.at, {})[number] = _sign(gradient.detach())

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


def _sign(gradient: torch.Tensor) -> float:
    above, below = bool((gradient > 0).any()), bool((gradient < 0).any())
    return float(above) - float(below)


def games(record: Record, calls: list[ScoreCall]) -> Iterator[Game | Mixed]:
    """Each output of a critic that is given what another optimizer's weights made, in steps of both."""
    holder = {i: min(held, key=lambda o: len(set(record.optimizers[o].parameters))) for i, held in record.held.items()}
    stepped: dict[int, set[int]] = {}
    for outcome in Ledger(record).passes:
        stepped[outcome.at] = {holder[i] for i in outcome.used if i in holder}
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
    for (critic, owner, number, maker, by), back in pushed.items():
        made = pushed.get((critic, owner, number, maker, owner), [])
        given = pushed.get((critic, owner, number, None, owner), [])
        if maker is not None and by == maker and made and given:
            beside = all(call.beside_data for call, _ in made)
            yield Game(critic, _all(given), _all(made), _all(back), beside)
        if maker is not None and by == BOTH and not any(call.beside_data for call, _ in back):
            yield from _mixed(record, pushed, (critic, owner, number, maker))


def _mixed(record: Record, pushed: Mapping[Any, list[tuple[ScoreCall, float]]], of: tuple[Any, ...]) -> Iterator[Mixed]:
    """Whether passes that both optimizers step with are those of the one side, and push what is made against the
    passes that only the other side steps with."""
    critic, owner, number, maker = of
    shared, made = _all(pushed[critic, owner, number, maker, BOTH]), pushed.get((critic, owner, number, maker, owner))
    given, back = pushed.get((critic, owner, number, None, owner)), pushed.get((critic, owner, number, maker, maker))
    both_given = pushed.get((critic, owner, number, None, BOTH))
    if made and given:  # the shared passes may be the maker's
        offsets = always(shared, _all(made), -1.0)
        if offsets and opposed_at(_all(given), _all(made)) >= 2:
            yield Mixed(critic, record.optimizers[owner].kind, True, _step_of(record, owner), offsets)
    if back and both_given:  # or the critic's
        offsets = always(shared, _all(back), -1.0)
        if offsets and opposed_at(_all(both_given), shared) >= 2:
            yield Mixed(critic, record.optimizers[maker].kind, False, _step_of(record, maker), offsets)


def _step_of(record: Record, optimizer: int) -> Place:
    return next(step.place for step in record.innermost_steps() if step.optimizer == optimizer)


def _all(pushed: list[tuple[ScoreCall, float]]) -> Pushed:
    signs: dict[int, set[float]] = defaultdict(set)
    for call, sign in pushed:
        signs[call.offset].add(sign)
    known = {offset: next(iter(found)) for offset, found in signs.items() if len(found) == 1}
    return Pushed(pushed[0][0].place, {offset: sign for offset, sign in known.items() if sign})


def always(one: Pushed, other: Pushed, factor: float) -> int:
    """At how many offsets the one direction is the other times the factor; 0 where at any it is not, or at few."""
    both = one.by_offset.keys() & other.by_offset.keys()
    agree = all(one.by_offset[o] == factor * other.by_offset[o] for o in both)
    return len(both) if agree and len(both) >= LEAST else 0


def one_way(game: Game) -> int:
    """At how many offsets all three directions are known and one and the same; 0 where at any they are not."""
    three = (game.given, game.made, game.back)
    signs = {sign for pushed in three for sign in pushed.by_offset.values()}
    return min(len(pushed.by_offset) for pushed in three) if len(signs) == 1 else 0


def may_hold_one_label(batch: Any) -> bool:
    """Whether some tensor of the batch holds a single value: labels that happen to be all one class."""
    tensors = [t.detach() for t in nested.tensors(batch) if t.numel()]
    return any(bool((t == t.flatten()[0]).all()) for t in tensors)


def opposed_at(one: Pushed, other: Pushed) -> int:
    """At how many offsets the two directions are opposed."""
    return sum(one.by_offset[o] == -other.by_offset[o] for o in one.by_offset.keys() & other.by_offset.keys())
