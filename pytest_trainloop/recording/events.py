"""The events of a run. Plain data: no torch, nothing of the user's objects."""

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
class TensorSample:
    """A tensor at one moment."""

    peak: float = math.nan
    """The largest absolute entry: NaN if any is, and where only a sample was taken."""
    raw: bytes = b""
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

    def same(self, other: TensorSample | None) -> bool:
        """Bit-identical as far as the sampled entries tell."""
        if other is None or self.raw != other.raw:
            return False
        return self.peak == other.peak or math.isnan(self.peak) or math.isnan(other.peak)


@dataclass(slots=True, kw_only=True)
class Event:
    """Anything that happened at one moment of a run."""

    at: int
    """The position in the run: events, reads and arrivals are counted together."""
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
    """Whether a checkpoint recomputes the call in a backward pass."""
    in_eval: tuple[str, ...] = ()
    """Paths of the modules from it down that act by mode and are in evaluation mode."""
    in_training: tuple[str, ...] = ()
    """The same in training mode."""
    unlike_parent: tuple[str, ...] = ()
    """Those of both whose mode differs from that of the module that holds them."""
    below: frozenset[int] = frozenset()
    """The parameters of the module and of all modules in it."""
    answered: list[int] = field(default_factory=list)
    """The positions of the backward passes that went through its output."""


@dataclass(slots=True, kw_only=True)
class CheckpointCall(Event):
    """A function run under torch's activation checkpointing; its recomputation is no event."""

    reentrant: bool
    preserves: bool
    """Whether the state of torch's generator is restored for the recomputation."""
    needs_grad: bool
    """Whether one of its tensor arguments requires grad."""
    grad_enabled: bool


@dataclass(slots=True, kw_only=True)
class ModeCall(Event):
    """A call of ``train()`` or ``eval()`` on a module."""

    below: str
    """The path of the module; all modules in it are switched too."""
    on: bool
    """Whether to training mode."""


@dataclass(slots=True, kw_only=True)
class LossCall(Event):
    """A call of a loss function of ``torch.nn.functional``."""

    name: str
    input_shape: tuple[int, ...]
    input_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    reduction: str
    value: float | None = None
    """None where the call gives several values."""
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
    """A gradient that arrived at a parameter."""

    at: int
    incoming: TensorSample
    residual: TensorSample | None
    """What ``.grad`` held before; None where it was None, and for ``torch.autograd.grad``."""
    steps_since_forward: int
    """Optimizer steps that read the parameter's gradient since the parameter was last used."""


@dataclass(slots=True, kw_only=True)
class Backward(Event):
    """One backward pass."""

    kind: Literal["backward", "grad"]
    """"grad" for ``torch.autograd.grad``, which accumulates nowhere."""
    roots: list[Root] = field(default_factory=list)
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)
    """The gradients that arrived at each parameter."""
    until: int = 0
    """The position at which it ended."""
    item: int = 0
    """The number of batches that the loop had taken by then."""
    autocast: str = ""
    """The autocast block that it was called in."""

    @property
    def reached(self) -> bool:
        """Whether any parameter got a gradient that is not zero."""
        return any(not a.incoming.zero for arrived in self.arrivals.values() for a in arrived)


@dataclass(slots=True, kw_only=True)
class GradWrite(Event):
    """A write to gradients outside backward."""

    how: Literal["none", "zero", "assigned", "clipped", "altered"]
    """"none": set to None; "assigned": another tensor; "altered": in place."""
    parameters: list[int]
    by: str = ""
    """The function that wrote."""
    limit: float | None = None
    """The clip's bound, where it was seen."""
    before: dict[int, TensorSample] = field(default_factory=dict)
    """The gradients before a clip."""
    after: dict[int, TensorSample] = field(default_factory=dict)
    """The gradients after a clip."""

    @property
    def assigns(self) -> bool:
        """Whether user code assigned other values: another tensor, or a copy into the present one."""
        return self.how == "assigned" or (self.how == "altered" and "copy" in self.by)

    @property
    def changed(self) -> bool:
        return any(not sample.same(self.after.get(i)) for i, sample in self.before.items())


@dataclass(slots=True, kw_only=True)
class ClipCall(Event):
    """A call of one of torch's clips of gradients, whether it found any or not."""

    by: str
    """The function: "clip_grad_norm_" or "clip_grad_value_"."""
    limit: float
    parts: list[list[int]] = field(default_factory=list)
    """The watched tensors that were passed; several lists where a loop of one line clips them in parts."""
    totals: list[float] = field(default_factory=list)
    """The norm that the function computed for each of them; NaN where it clips by value."""
    stand_ins: list[int] = field(default_factory=list)
    """Parameters in whose place their gradient was passed, or a view of their data: these have no ``.grad``."""
    others: int = 0
    """Tensors passed that are nothing watched, and have a gradient."""
    idle: list[tuple[int, ...]] = field(default_factory=list)
    """The shapes of those that are nothing watched and have none."""
    iterator: int | None = None
    """The number of the iterator that was passed; None for a list or a tensor."""
    norms: dict[int, float] = field(default_factory=dict)
    """The Euclidean norm of each watched gradient before the call, those of tensors that were not passed as well."""
    left: dict[int, float] = field(default_factory=dict)
    """The norms of the gradients passed, after a clip by value."""

    @property
    def given(self) -> list[int]:
        return [i for part in self.parts for i in part]

    @property
    def found(self) -> set[int]:
        """The tensors passed whose gradient was not zero."""
        return {i for i in self.given if self.norms.get(i, 0.0) != 0.0}


@dataclass(slots=True)
class Read:
    """The gradients that a step read, per parameter that it holds (None: no gradient)."""

    at: int
    grads: dict[int, TensorSample | None]


@dataclass(slots=True, kw_only=True)
class Step(Event):
    """One optimizer step."""

    optimizer: int
    until: int = 0
    """The position at which it ended."""
    lrs: tuple[float, ...] = ()
    """The learning rate of each group."""
    named_lrs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers that are called a rate and that the step of torch's optimizers does not read: by the expression that
    holds them, ``group["learning_rate"]`` for each group."""
    reads: list[Read] = field(default_factory=list)
    left: dict[int, TensorSample | None] = field(default_factory=dict)
    """The gradients after the step."""
    updates: dict[int, float] = field(default_factory=dict)
    """The largest entry of each parameter's update, over that of the parameter."""
    along: dict[int, float] = field(default_factory=dict)
    """The cosine of each update with the parameter."""
    frozen: tuple[int, ...] = ()
    """Parameters that did not require grad."""
    nested: bool = False
    """Whether it contains another step, which is the one that reads the gradients."""
    in_backward: bool = False
    blocks: int = 0
    """The autocast blocks that it was called in, those that are not enabled as well."""
    full: bool = True
    """Whether it was watched in full."""
    asked: bool = False
    """Whether it looked for gradients."""
    computed: bool = False
    """Whether it used any: a proximal step needs none."""

    @property
    def consumes(self) -> bool:
        """Whether the step reads gradients: it computed with some, or it asked and found none."""
        present = any(grad is not None for read in self.reads for grad in read.grads.values())
        return self.computed or (self.asked and not present)


@dataclass(slots=True)
class Move:
    """Parameters whose values changed between two positions, by an optimizer's step or (``by`` None) by user code."""

    since: int
    at: int
    parameters: tuple[int, ...]
    by: int | None
    before: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The sampled entries before the change, of parameters that an optimizer steps and user code changes as well."""
    change: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """What was added to these entries."""


@dataclass(slots=True, kw_only=True)
class SchedulerStep(Event):
    """A call of a scheduler's ``step()`` from outside any scheduler."""

    scheduler: str
    """The name of its class."""
    optimizer: int | None
    metric: bool
    """Whether it was given a metric or an epoch."""
    number: int = 0
    """The scheduler, among those of the record."""
    value: float = math.nan
    """The metric that ReduceLROnPlateau was given, or the epoch that another one was."""
    before: tuple[float, ...] = ()
    """The learning rate of each group of its optimizer when the call began."""
    after: tuple[float, ...] = ()
    until: int = 0
    """The position at which it ended; 0 where it raised."""


@dataclass(slots=True, kw_only=True)
class CopiedLRs(Event):
    """A call of ``state_dict()`` whose groups had other rates at the next step, or the end of the run: not those that
    they were given out with, nor the optimizer's own."""

    optimizer: int
    before: tuple[float, ...]
    """The rate of each group as it was given out."""
    written: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class ScalerCall(Event):
    """A call of a gradient scaler.

    One made inside another (``step()`` unscales too) lies between that one's ``at`` and ``until``.
    """

    what: Literal["scale", "unscale", "step", "update"]
    enabled: bool
    scaler: int
    optimizer: int | None = None
    factor: float = math.nan
    """The scale that the loss was multiplied by."""
    stepped: bool | None = None
    """Whether ``step()`` reached the optimizer."""
    until: int = 0


@dataclass(slots=True)
class Raised:
    """An exception that ended ``fit``, as text with the user's frames only."""

    kind: str
    summary: str
    traceback: str
    place: Place
    message: str = ""
