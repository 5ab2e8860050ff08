"""What was seen during one run, in order. Plain data: no torch, nothing of the user's objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from pytest_trainloop.recording.events import (
    Arrival,
    Backward,
    CheckpointCall,
    Event,
    Fact,
    Forward,
    Move,
    Place,
    Raised,
    ScalerCall,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Role = Literal["model", "unregistered", "foreign"]


@dataclass(slots=True)
class Parameter:
    """One tensor that trains or could: ``owner`` is the path of the module that holds it; ``layer`` says that this is a
    layer of torch's own, ``gone`` that another
    tensor had taken its place when the run ended, ``asked`` that it required grad in some call of its module."""

    index: int
    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    owner: str = ""
    declared: bool = True
    layer: bool = False
    start: Fact = field(default_factory=Fact)
    gone: bool = False
    asked: bool = False
    calls_with_grad: int = 0
    calls_without_grad: int = 0
    calls_in_checkpoint: int = 0
    calls_empty: int = 0
    calls_in_eval: int = 0
    checkpoint: Place | None = None

    @property
    def trainable(self) -> bool:
        """Whether it required grad when it was used; where no module call used it, when the run began."""
        called = self.calls_with_grad + self.calls_without_grad + self.calls_in_checkpoint + self.calls_empty
        return self.asked if called else self.requires_grad


@dataclass(slots=True)
class Statistics:
    """One running statistic of a norm: a buffer that its module changes when it is called in training mode."""

    name: str
    owner: str
    start: Fact = field(default_factory=Fact)
    end: Fact = field(default_factory=Fact)

    @property
    def drifted(self) -> bool:
        return not self.start.same(self.end)


@dataclass(slots=True)
class Optimizer:
    """One optimizer: ``parameters`` lists indices as its groups held them at its last step, repetitions kept,
    ``groups`` the group of each; ``peaks`` are the groups' ``initial_lr`` or ``max_lr`` (NaN without a scheduler),
    ``decays`` and ``eps`` theirs; ``maximizes`` says that one of them has ``maximize`` set, ``from_torch`` that its
    class is torch's own."""

    index: int
    kind: str
    declared: bool
    parameters: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    peaks: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    eps: tuple[float, ...] = ()
    maximizes: bool = False
    from_torch: bool = False
    steps: int = 0


E_ = TypeVar("E_", bound=Event)


def within(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of these or lies below one: ``layer1`` and ``layer1.`` hold ``layer1.weight``, and
    not ``layer10.weight``."""
    return any(name == p.rstrip(".") or name.startswith(f"{p.rstrip('.')}.") for p in prefixes)


@dataclass(slots=True)
class Record:
    """One watched run.

    ``rounds`` is the largest number of steps that one optimizer made, ``full_until`` the position after which only
    roots, rates and counts were
    watched; ``ended`` says whether the batches ran out under the loop's feet, so that what it raised after is none of
    its faults. ``wary`` tells that the loop looked for values that are not finite, or read one.
    """

    parameters: list[Parameter] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    raised: Raised | None = None
    rounds: int = 0
    steps: int = 0
    items: int = 0
    seconds: float = 0.0
    full_until: int = 0
    ended: bool = False
    cut_short: bool = False
    wary: bool = False
    double: bool = False
    lower: tuple[str, ...] = ()
    knobs: dict[str, object] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    checkpoints: list[CheckpointCall] = field(default_factory=list)
    end: dict[int, Fact] = field(default_factory=dict)
    statistics: list[Statistics] = field(default_factory=list)
    frozen: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)

    def of(self, kind: type[E_]) -> list[E_]:
        """The events of one kind, in order."""
        return [e for e in self.events if isinstance(e, kind)]

    def name(self, index: int) -> str:
        return self.parameters[index].name

    def names(self, indices: object) -> tuple[str, ...]:
        return tuple(self.parameters[i].name for i in sorted(indices))  # type: ignore[call-overload]

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Parameter index to the optimizers that hold it."""
        held: dict[int, list[int]] = {}
        for optimizer in self.optimizers:
            for i in dict.fromkeys(optimizer.parameters):
                held.setdefault(i, []).append(optimizer.index)
        return {i: tuple(v) for i, v in held.items()}

    def autograd_passes(self) -> list[Backward]:
        """Every pass of autograd, those that accumulate nowhere included."""
        return self.of(Backward)

    def step_line(self) -> str:
        """The line of the first step that consumes gradients; empty without one."""
        return next((str(step.place) for step in self.innermost_steps()), "")

    def backwards(self) -> list[Backward]:
        """The backward passes that accumulate gradients."""
        return [b for b in self.of(Backward) if b.kind == "backward"]

    def below(self, root: str, owner: str) -> bool:
        """Whether the module at ``owner`` is the one called ``root`` or lies below it. A root under whose name no
        parameter stands is a whole model, which goes by the name of its class."""
        if owner == root or owner.startswith(f"{root}."):
            return True
        return not any(p.owner == root or p.owner.startswith(f"{root}.") for p in self.parameters)

    def trains_elsewhere(self, parameter: Parameter) -> bool:
        """Whether other watched parameters are called in training mode."""
        return any(p.calls_with_grad > p.calls_in_eval for p in self.parameters if p is not parameter)

    def arrivals(self, index: int) -> Iterator[Arrival]:
        for backward in self.of(Backward):
            yield from backward.arrivals.get(index, ())

    def last_arrivals(self, index: int) -> list[Arrival]:
        """What arrived at a parameter: in the whole run, or in the last backward pass where an exception ended it."""
        passes = self.of(Backward)
        return [a for b in (passes[-1:] if self.raised else passes) for a in b.arrivals.get(index, ())]

    def reached(self, index: int) -> bool:
        """Whether a gradient that is not zero arrived at the parameter, or was put there by hand and consumed."""
        if any(not a.incoming.zero for a in self.arrivals(index)):
            return True
        return any((g := r.grads.get(index)) is not None and not g.zero for s in self.of(Step) for r in s.reads)

    def declared_frozen(self, name: str) -> bool:
        """Whether ``TrainLoop.frozen`` names the parameter, buffer or module, or what holds it."""
        return within(name, self.frozen or ())

    def scaler_calls(self) -> list[ScalerCall]:
        return self.of(ScalerCall)

    @property
    def skipped(self) -> int:
        """How many steps a gradient scaler kept back."""
        return sum(c.what == "step" and c.stepped is False for c in self.of(ScalerCall))

    def changed(self) -> set[int]:
        """Parameters that differ at the end from their start."""
        return {p.index for p in self.parameters if p.index in self.end and not p.start.same(self.end[p.index])}

    def root_forwards(self) -> list[Forward]:
        """Forward passes called from outside any module, recomputation in backward left out."""
        return [f for f in self.of(Forward) if not f.in_backward]

    def innermost_steps(self) -> list[Step]:
        """The innermost steps."""
        return [s for s in self.of(Step) if not s.nested]

    def moved_outside_steps(self) -> set[int]:
        """Parameters that changed outside optimizer steps."""
        return {i for move in self.moves if move.by is None for i in move.parameters}
