"""What was seen during one run, in order. Plain data: no torch, nothing of the user's objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Site = tuple[tuple[str, int], ...]
"""A call site: the nearest frames outside torch and this package, innermost first, as (file, line)."""

Role = Literal["model", "unregistered", "foreign"]


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's: ``file`` as the interpreter knows it, the source line as ``code``."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}   {self.code}".rstrip()


@dataclass(slots=True)
class Fact:
    """A tensor at one moment: its largest absolute entry and the bytes of up to 128 entries, always at the same places
    but of a ``sparse`` one."""

    peak: float = math.nan
    sample: bytes = b""
    sparse: bool = False

    @property
    def zero(self) -> bool:
        return self.peak == 0.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.peak)

    def same(self, other: Fact | None) -> bool:
        """Bit-identical as far as the sampled entries tell."""
        if other is None or self.sample != other.sample:
            return False
        return self.peak == other.peak or math.isnan(self.peak) or math.isnan(other.peak)


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
class Optimizer:
    """One optimizer: ``parameters`` lists indices as its groups held them at its last step, repetitions kept."""

    index: int
    kind: str
    declared: bool
    parameters: tuple[int, ...] = ()
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class Event:
    at: int
    place: Place
    site: Site


@dataclass(slots=True, kw_only=True)
class Forward(Event):
    """A call of a module from outside any module."""

    module: str
    grad_enabled: bool
    inference: bool
    training: bool
    autocast: str = ""
    in_backward: bool = False
    in_eval: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class LossCall(Event):
    """A call of a loss function of ``torch.nn.functional``."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    reduction: str
    value: float = math.nan
    ignore_index: int | None = None


@dataclass(slots=True)
class Root:
    """A tensor that was given to backward."""

    requires_grad: bool
    shape: tuple[int, ...]
    value: float = math.nan
    history: bool = True


@dataclass(slots=True)
class Arrival:
    """A gradient that came in at a parameter: what stood in ``.grad`` before, and what came."""

    at: int
    incoming: Fact
    residual: Fact | None
    steps_since_forward: int


@dataclass(slots=True, kw_only=True)
class Backward(Event):
    """One backward pass; ``item`` counts the batches that the loop had taken by then (``kind`` "grad" for
    ``torch.autograd.grad``, which accumulates nowhere)."""

    kind: Literal["backward", "grad"]
    roots: list[Root] = field(default_factory=list)
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    until: int = 0
    item: int = 0

    @property
    def reached(self) -> bool:
        """Whether any parameter got a gradient that is not zero."""
        return any(not a.incoming.zero for arrived in self.arrivals.values() for a in arrived)


@dataclass(slots=True, kw_only=True)
class GradWrite(Event):
    """A write to gradients by other than backward.

    ``how``: "none" (set to None), "zero", "assigned" (another tensor put there), "clipped", "altered" (in place).
    ``limit`` is the clip's bound where
    it was seen; ``before`` and ``after`` are there for clips.
    """

    how: Literal["none", "zero", "assigned", "clipped", "altered"]
    parameters: list[int]
    by: str = ""
    limit: float | None = None
    before: dict[int, Fact] = field(default_factory=dict)
    after: dict[int, Fact] = field(default_factory=dict)

    @property
    def by_hand(self) -> bool:
        """Whether the user put other values there: another tensor, or a copy into the one that stands there."""
        return self.how == "assigned" or (self.how == "altered" and "copy" in self.by)

    @property
    def changed(self) -> bool:
        return any(not fact.same(self.after.get(i)) for i, fact in self.before.items())


@dataclass(slots=True)
class Read:
    """What a step saw in ``.grad``, per parameter that it holds (None: no gradient)."""

    at: int
    grads: dict[int, Fact | None]


@dataclass(slots=True, kw_only=True)
class Step(Event):
    """One optimizer step. ``nested`` steps contain another, which is the one that consumes; ``asked`` and ``computed``
    tell whether it looked for gradients, and whether it used any (a proximal step needs none)."""

    optimizer: int
    until: int = 0
    rates: tuple[float, ...] = ()
    reads: list[Read] = field(default_factory=list)
    left: dict[int, Fact | None] = field(default_factory=dict)
    updates: dict[int, float] = field(default_factory=dict)
    nested: bool = False
    in_backward: bool = False
    full: bool = True
    asked: bool = False
    computed: bool = False

    @property
    def consumes(self) -> bool:
        """Whether the step takes gradients: it computed with some, or it asked and found none."""
        present = any(grad is not None for read in self.reads for grad in read.grads.values())
        return self.computed or (self.asked and not present)


@dataclass(slots=True)
class Move:
    """Parameters whose values changed between two looks: by an optimizer's step (``by``) or by other hands (None)."""

    since: int
    at: int
    parameters: tuple[int, ...]
    by: int | None


@dataclass(slots=True, kw_only=True)
class SchedulerStep(Event):
    scheduler: str
    optimizer: int | None
    metric: bool


@dataclass(slots=True, kw_only=True)
class ScalerCall(Event):
    """A call of a gradient scaler: ``what`` is scale, unscale, step or update; ``stepped`` whether step() reached the
    optimizer."""

    what: Literal["scale", "unscale", "step", "update"]
    enabled: bool
    scaler: int
    optimizer: int | None = None
    factor: float = math.nan
    stepped: bool | None = None


@dataclass(slots=True)
class Raised:
    """An exception that ended ``fit``, as text with the user's frames only."""

    kind: str
    summary: str
    traceback: str
    place: Place
    message: str = ""


E_ = TypeVar("E_", bound=Event)


@dataclass(slots=True)
class Record:
    """One watched run.

    ``rounds`` is the largest number of steps that one optimizer made, ``full_until`` the position after which only
    roots, rates and counts were
    watched; ``ended`` says whether the batches ran out under the loop's feet, so that what it raised after is none of
    its faults.
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
    double: bool = False
    lower: tuple[str, ...] = ()
    knobs: dict[str, object] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    end: dict[int, Fact] = field(default_factory=dict)
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

    def of_backward(self) -> list[Backward]:
        """Every pass of autograd, those that accumulate nowhere included."""
        return self.of(Backward)

    def backwards(self) -> list[Backward]:
        """The backward passes that accumulate gradients."""
        return [b for b in self.of(Backward) if b.kind == "backward"]

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

    def scaler_calls(self) -> list[ScalerCall]:
        return self.of(ScalerCall)

    def changed(self) -> set[int]:
        """Parameters that differ at the end from their start."""
        return {p.index for p in self.parameters if p.index in self.end and not p.start.same(self.end[p.index])}

    def wipe_after(self, backward: Backward, parameters: set[int]) -> GradWrite | None:
        """The first wipe of these gradients after a backward pass."""
        for write in self.of(GradWrite):
            if write.at > backward.at and write.how in ("none", "zero") and parameters & set(write.parameters):
                return write
        return None

    def moved_between(self, backward: Backward, parameters: set[int]) -> bool:
        """Whether the parameters changed between this backward and the next that reaches them (SAM's first step)."""
        after = min(
            (b.at for b in self.backwards() if b.at > backward.at and parameters & set(b.arrivals)), default=None
        )
        return any(
            m.at > backward.at
            and m.since < (after or m.at)
            and parameters & set(m.parameters)
            and m.at <= (after or m.at) + 1
            for m in self.moves
        )

    def root_forwards(self) -> list[Forward]:
        """Forward passes called from outside any module, recomputation in backward left out."""
        return [f for f in self.of(Forward) if not f.in_backward]

    def consuming_steps(self) -> list[Step]:
        """The innermost steps."""
        return [s for s in self.of(Step) if not s.nested]

    def zeroing_elsewhere(self, parameters: set[int], optimizer: int, *, before: int) -> GradWrite | None:
        """A zero_grad that comes round with the steps but zeroes none of these: other parameters of the same
        optimizer, parameters that
        nothing steps, or one more place of zeroing than there are other optimizers to zero."""
        first_step = min((s.at for s in self.of(Step)), default=0)
        zeroings = [w for w in self.of(GradWrite) if w.by == "zero_grad" and first_step < w.at < before]
        if any(parameters & set(w.parameters) for w in zeroings):
            return None
        held = self.held
        by_site: dict[Site, GradWrite] = {}
        for write in zeroings:
            by_site[write.site] = write
        partly = [w for w in zeroings if set(w.parameters) & set(self.optimizers[optimizer].parameters)]
        if partly:
            return partly[-1]
        others = {o for w in zeroings for i in w.parameters for o in held.get(i, ()) if self.optimizers[o].steps}
        idle = [
            w
            for w in by_site.values()
            if not any(self.optimizers[o].steps for i in w.parameters for o in held.get(i, ()))
        ]
        if idle:
            return idle[-1]
        return list(by_site.values())[-1] if len(by_site) > len(others) else None

    def moved_by_hand(self) -> set[int]:
        """Parameters that changed outside optimizer steps."""
        return {i for move in self.moves if move.by is None for i in move.parameters}
