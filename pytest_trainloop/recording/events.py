"""What happened during a run, one event after the other. Plain data: no torch, nothing of the user's objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Site = tuple[tuple[str, int], ...]
"""A call site: the nearest frames outside torch and this package, innermost first, as (file, line)."""


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
    """A tensor at one moment."""

    peak: float = math.nan
    """The largest absolute entry: NaN if any is, and where only a sample was taken."""
    sample: bytes = b""
    """The bytes of up to 128 entries, always at the same places unless the tensor is sparse."""
    sparse: bool = False
    nonfinite: Literal["", "inf", "nan"] = ""
    """What the sample holds that is not finite: "nan" if any entry is NaN."""

    @property
    def zero(self) -> bool:
        return self.peak == 0.0

    @property
    def finite(self) -> bool:
        """Whether every entry is finite; False where only a sample was taken."""
        return math.isfinite(self.peak)

    def same(self, other: Fact | None) -> bool:
        """Bit-identical as far as the sampled entries tell."""
        if other is None or self.sample != other.sample:
            return False
        return self.peak == other.peak or math.isnan(self.peak) or math.isnan(other.peak)


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
    """Whether a checkpoint makes the call again, in a backward pass."""
    in_eval: tuple[str, ...] = ()
    """Modules below it, itself included, that act by mode and are in evaluation mode."""
    in_training: tuple[str, ...] = ()
    """The same in training mode."""
    apart: tuple[str, ...] = ()
    """Those of both whose mode is not that of the module that holds them."""
    below: frozenset[int] = frozenset()
    """The parameters that it has."""
    answered: list[int] = field(default_factory=list)
    """The positions of the backward passes that went through its output."""


@dataclass(slots=True, kw_only=True)
class CheckpointCall(Event):
    """A function run under torch's activation checkpointing; when it is run again is left out.

    ``preserves`` tells that the state of torch's generator is put back for that, ``needs_grad`` that one of the tensors
    handed to it requires grad.
    """

    reentrant: bool
    preserves: bool
    needs_grad: bool
    grad_enabled: bool


@dataclass(slots=True, kw_only=True)
class ModeCall(Event):
    """A call of ``train()`` or ``eval()`` on a module: ``below`` is the path whose modules it switches, ``on`` to
    which mode."""

    below: str
    on: bool


@dataclass(slots=True, kw_only=True)
class LossCall(Event):
    """A call of a loss function of ``torch.nn.functional``; ``value`` is None where it gives several."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    reduction: str
    value: float | None = None
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
    """A gradient that arrived at a parameter: ``residual`` is what stood in ``.grad`` before."""

    at: int
    incoming: Fact
    residual: Fact | None
    steps_since_forward: int


@dataclass(slots=True, kw_only=True)
class Backward(Event):
    """One backward pass; ``item`` counts the batches that the loop had taken by then (``kind`` "grad" for
    ``torch.autograd.grad``, which accumulates nowhere); ``autocast`` names the autocast block that it was called in."""

    kind: Literal["backward", "grad"]
    roots: list[Root] = field(default_factory=list)
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    until: int = 0
    item: int = 0
    autocast: str = ""

    @property
    def reached(self) -> bool:
        """Whether any parameter got a gradient that is not zero."""
        return any(not a.incoming.zero for arrived in self.arrivals.values() for a in arrived)


@dataclass(slots=True, kw_only=True)
class GradWrite(Event):
    """A write to gradients outside backward.

    ``how``: "none" (set to None), "zero", "assigned" (another tensor), "clipped", "altered" (in place). ``limit`` is
    the clip's bound where it was seen; ``before`` and ``after`` are the gradients around a clip.
    """

    how: Literal["none", "zero", "assigned", "clipped", "altered"]
    parameters: list[int]
    by: str = ""
    limit: float | None = None
    before: dict[int, Fact] = field(default_factory=dict)
    after: dict[int, Fact] = field(default_factory=dict)

    @property
    def assigns(self) -> bool:
        """Whether user code put other values there: another tensor, or a copy into the present one."""
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
    """One optimizer step."""

    optimizer: int
    until: int = 0
    """The position at which it ended."""
    lrs: tuple[float, ...] = ()
    """The learning rate of each group."""
    reads: list[Read] = field(default_factory=list)
    left: dict[int, Fact | None] = field(default_factory=dict)
    """The gradients after the step."""
    updates: dict[int, float] = field(default_factory=dict)
    """The largest entry of each parameter's update, over that of the parameter."""
    along: dict[int, float] = field(default_factory=dict)
    """The cosine of each update with the parameter."""
    frozen: tuple[int, ...] = ()
    """Parameters that did not require grad."""
    nested: bool = False
    """Whether it contains another step, which is the one that consumes."""
    in_backward: bool = False
    full: bool = True
    """Whether it was watched in full."""
    asked: bool = False
    """Whether it looked for gradients."""
    computed: bool = False
    """Whether it used any: a proximal step needs none."""

    @property
    def consumes(self) -> bool:
        """Whether the step takes gradients: it computed with some, or it asked and found none."""
        present = any(grad is not None for read in self.reads for grad in read.grads.values())
        return self.computed or (self.asked and not present)


@dataclass(slots=True)
class Move:
    """Parameters whose values changed between two positions, by an optimizer's step or (``by`` None) by user code."""

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
    optimizer. One made inside another (step() unscales by itself) lies between that one's ``at`` and ``until``."""

    what: Literal["scale", "unscale", "step", "update"]
    enabled: bool
    scaler: int
    optimizer: int | None = None
    factor: float = math.nan
    stepped: bool | None = None
    until: int = 0


@dataclass(slots=True)
class Raised:
    """An exception that ended ``fit``, as text with the user's frames only."""

    kind: str
    summary: str
    traceback: str
    place: Place
    message: str = ""
