"""The record of one run. Plain data: no torch, nothing of the user's objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from pytest_trainloop.core.whose import is_ours, mistake
from pytest_trainloop.recording.events import (
    Arrival,
    Backward,
    CheckpointCall,
    CopiedLRs,
    Event,
    Forward,
    Move,
    Place,
    Raised,
    ScalerCall,
    Step,
    TensorSample,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.errors import OwnMistake

Role = Literal["model", "unregistered", "foreign"]


@dataclass(slots=True)
class Parameter:
    """One tensor that trains or could."""

    index: int
    name: str
    role: Role
    """"model": registered in a module; "unregistered": in a plain list or dict; "foreign": in an optimizer only."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    """As the run began."""
    owner: str = ""
    """The path of the module that holds it."""
    declared: bool = True
    """Whether it lies in what ``TrainLoop.model`` declares."""
    layer: bool = False
    """Whether its module is a layer of torch's own."""
    module: str = ""
    """The class of the module that holds it."""
    pad_row: int | None = None
    """The row of ``padding_idx``: torch makes its gradient zero, whatever the loss is."""
    came_in: Place | None = None
    """The line of the call that met it first, where it took another one's place in the middle of a forward pass."""
    start: TensorSample = field(default_factory=TensorSample)
    """The tensor as the run began."""
    uniform: bool = True
    """Whether the sampled entries were equal to each other at every moment: such values do not show a copy."""
    equals: frozenset[int] = frozenset()
    """Parameters of its shape that had its values at some moment, bit for bit: one is a copy of the other. Values that
    are uniform are left out."""
    contiguous: bool = True
    """Whether its entries lay in memory in the order of their indices as the run began."""
    gone: bool = False
    """Whether no module held it any more when the run ended."""
    asked: bool = False
    """Whether it required grad in some call of its module."""
    calls_with_grad: int = 0
    """Calls of its module with gradients on."""
    calls_without_grad: int = 0
    calls_in_checkpoint: int = 0
    """Calls without gradients inside a checkpointed segment."""
    calls_empty: int = 0
    """Calls with empty inputs."""
    calls_in_eval: int = 0
    """Calls with gradients on in evaluation mode."""
    checkpoint: Place | None = None
    """The line of the checkpointed segment."""

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
    start: TensorSample = field(default_factory=TensorSample)
    end: TensorSample = field(default_factory=TensorSample)

    @property
    def drifted(self) -> bool:
        return not self.start.same(self.end)


@dataclass(slots=True)
class Optimizer:
    """One optimizer, with its groups as they were at its last step."""

    index: int
    kind: str
    """The name of its class."""
    declared: bool
    parameters: tuple[int, ...] = ()
    """The parameters of all groups by index, repetitions kept."""
    groups: tuple[int, ...] = ()
    """The group of each of ``parameters``."""
    first_lrs: tuple[float, ...] = ()
    """The rate of each group when the optimizer was first seen: before the run where it is declared."""
    peak_lrs: tuple[float, ...] = ()
    """``initial_lr`` or ``max_lr`` of each group; NaN without a scheduler."""
    weight_decays: tuple[float, ...] = ()
    momenta: tuple[float, ...] = ()
    decoupled: tuple[bool | None, ...] = ()
    """Whether each group's decay stays out of the gradient; None where its class has no such option."""
    eps: tuple[float, ...] = ()
    maximizes: bool = False
    """Whether some group has ``maximize`` set."""
    from_torch: bool = False
    """Whether its class is torch's own."""
    options: tuple[str, ...] = ()
    """The options that its class has: the keys of ``defaults``."""
    settings: tuple[dict[str, str], ...] = ()
    """The numbers, pairs of numbers, switches and texts in each group, as text, but for ``lr``."""
    dicts: tuple[int, ...] = ()
    """The identity of the dict of each group: wrappers share those of the optimizer that they wrap."""
    steps: int = 0


@dataclass(slots=True)
class Scheduler:
    """One learning rate scheduler of torch, or of a class that inherits from one."""

    number: int
    """In the order in which they were built, or were first seen."""
    kind: str
    """The name of its class."""
    optimizer: int | None = None
    """The index of its optimizer; None for one that neither steps nor is declared."""
    from_torch: bool = False
    """Whether its class is torch's own."""
    settings: dict[str, str] = field(default_factory=dict)
    """What it was built with, as text: equal texts are equal settings. Functions are given by code and closure."""
    place: Place | None = None
    """The user's line that built it; None where that was not watched."""
    declared: bool = False
    """Whether ``TrainLoop.scheduler`` names it."""
    at: int = 0
    """The position at which it was built; 0 before the run."""
    inner: bool = False
    """Whether another scheduler holds or steps it."""
    gone: int | None = None
    """The position from which nothing held it any more: 0 where that was before the run."""
    shares: tuple[str, ...] = ()
    """The variables that its functions, one for each group, share as one and the same: a loop's last value."""
    function: str = ""
    """The line on which its functions are made, where they share a variable."""
    groups: int = 0
    """The groups that its optimizer had when it was built."""
    calls: int = 0
    """Calls of ``step()`` from outside any scheduler."""

    @property
    def plateau(self) -> bool:
        return "patience" in self.settings


@dataclass(frozen=True, slots=True)
class KeptGraphs:
    """The graphs that were alive long after their backward pass."""

    rounds: int
    """Steps of one optimizer that had been made."""
    kept: tuple[int, ...]
    """The steps, from 1 on and three or more back, of which a graph was alive."""

    @property
    def all_kept(self) -> bool:
        return len(self.kept) == self.rounds - 3


@dataclass(frozen=True, slots=True)
class RefusedBackward:
    """A backward pass that raised because it went through the graph of an earlier step or batch."""

    at: int
    place: Place
    message: str


E_ = TypeVar("E_", bound=Event)


def within(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of these or lies below one: ``layer1`` and ``layer1.`` hold ``layer1.weight``, but
    not ``layer10.weight``."""
    return any(name == p.rstrip(".") or name.startswith(f"{p.rstrip('.')}.") for p in prefixes)


@dataclass(slots=True)
class Record:
    """One watched run."""

    parameters: list[Parameter] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    raised: Raised | None = None
    """The exception that ended ``fit``; None where its batches had been cut short before."""
    rounds: int = 0
    """The largest number of steps that one optimizer made."""
    steps: int = 0
    """Steps of all optimizers."""
    begun: bool = False
    """Whether an optimizer has stepped that the project gave or that holds a parameter of its model; not those of
    copies that the loop trains."""
    items: int = 0
    """Batches that the loop took."""
    passes: tuple[int, ...] = ()
    """Batches that it took in each pass over them, of the first passes in which it took any."""
    full_until: int = 0
    """The position after which only losses, learning rates and counts were watched."""
    evaluates_late: bool = False
    """Whether a module was switched to evaluation mode after that position."""
    ended: bool = False
    """Whether ``fit`` came to its end without an exception and without being stopped."""
    cut_short: bool = False
    """Whether the batches ended early, because enough was seen or no step was made."""
    wary: bool = False
    """Whether the loop tested values for being finite, or read one that is not finite."""
    drops: bool = False
    """Whether dropout acted in some call."""
    double: bool = False
    """Whether every operation was in float64."""
    lower: tuple[str, ...] = ()
    """Operations of lower precision in a run that was to be in float64."""
    asked: tuple[str, ...] = ()
    """Dtypes of 16 bits and fewer that ``fit`` asked for in such a run, and float64 was given instead: "bfloat16"."""
    knobs: dict[str, object] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    """Changes of weights, in order."""
    schedulers: list[Scheduler] = field(default_factory=list)
    """Those that were built or stepped, and those that are declared."""
    copied_lrs: list[CopiedLRs] = field(default_factory=list)
    """Rates that were written to what ``state_dict()`` gave, and that no optimizer was given."""
    checkpoints: list[CheckpointCall] = field(default_factory=list)
    end: dict[int, TensorSample] = field(default_factory=dict)
    """Each parameter as the run ended."""
    statistics: list[Statistics] = field(default_factory=list)
    graphs: KeptGraphs | None = None
    """None where fewer than six steps were watched in full."""
    refused: RefusedBackward | None = None
    frozen: tuple[str, ...] | None = None
    """``TrainLoop.frozen``."""
    notes: list[str] = field(default_factory=list)
    """Remarks for whoever reads the record."""
    mistakes: list[OwnMistake] = field(default_factory=list)
    """Mistakes of this package that were passed over while the run went on (``recording.mistakes``): no check judges by
    such a record."""

    def note_mistake(self, error: BaseException) -> bool:
        """Note an exception that was caught inside the project's calls, if it is a mistake of this package; whether it
        is one."""
        if is_ours(error):
            self.mistakes.append(mistake(error))
            return True
        return False

    def require_no_mistake(self) -> None:
        """Raise ``OwnMistake`` where this package made a mistake during the run."""
        if self.mistakes:
            raise self.mistakes[0].with_traceback(None)

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
        """Every pass of autograd: backward passes, and ``torch.autograd.grad``, which accumulates nowhere."""
        return self.of(Backward)

    def step_line(self) -> str:
        """The line of the first step that reads gradients; empty without one."""
        return next((str(step.place) for step in self.innermost_steps()), "")

    def backwards(self) -> list[Backward]:
        """The backward passes that accumulate gradients."""
        return [b for b in self.of(Backward) if b.kind == "backward"]

    def arrivals(self, index: int) -> Iterator[Arrival]:
        for backward in self.of(Backward):
            yield from backward.arrivals.get(index, ())

    def last_arrivals(self, index: int) -> list[Arrival]:
        """The gradients of a parameter: in the whole run, or in the last backward pass where an exception ended it."""
        passes = self.of(Backward)
        return [a for b in (passes[-1:] if self.raised else passes) for a in b.arrivals.get(index, ())]

    def reached(self, index: int) -> bool:
        """Whether a gradient that is not zero arrived at the parameter, or was assigned and read by a step."""
        if any(not a.incoming.zero for a in self.arrivals(index)):
            return True
        return any((g := r.grads.get(index)) is not None and not g.zero for s in self.of(Step) for r in s.reads)

    def declared_frozen(self, name: str) -> bool:
        """Whether ``TrainLoop.frozen`` names the parameter, buffer or module, or a module that holds it."""
        return within(name, self.frozen or ())

    def scaler_calls(self) -> list[ScalerCall]:
        return self.of(ScalerCall)

    @property
    def skipped(self) -> int:
        """The number of steps that a gradient scaler skipped."""
        return sum(c.what == "step" and c.stepped is False for c in self.of(ScalerCall))

    def changed(self) -> set[int]:
        """Parameters whose values at the end differ from the initial ones."""
        return {p.index for p in self.parameters if p.index in self.end and not p.start.same(self.end[p.index])}

    def root_forwards(self) -> list[Forward]:
        """Forward passes called from outside any module, recomputation in backward left out."""
        return [f for f in self.of(Forward) if not f.in_backward]

    def innermost_steps(self) -> list[Step]:
        """Steps that contain no other: those that read gradients."""
        return [s for s in self.of(Step) if not s.nested]

    def moved_outside_steps(self) -> set[int]:
        """Parameters that changed outside optimizer steps."""
        return {i for move in self.moves if move.by is None for i in move.parameters}
