"""What a baseline is: the trajectory of one loop, as plain data. Standard library only.

A trajectory holds two courses: one in float64 by construction, whose numbers are compared to rounding wherever they are
made again, and one in the loop's own precision, which is compared on the same environment only. Facts without numbers
(dtypes, shapes, options of groups, the order of calls) are those of the course in the loop's own precision: the other
one changes dtypes and switches gradient scalers off.

What a file leaves out (``thinned``) is an empty mapping, an empty tuple or None here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FORMAT = 1
"""The version of the files; one that changes what an older one means gets the next number."""

RECORDED_STEPS = 24
"""Optimizer steps that are recorded."""

IN_FULL = 12
"""Steps that are recorded in full, all others by losses, rates and norms."""

LATER = (16, 20, 24)
"""The steps after those that are recorded."""

NUMBERS, CALL_NUMBERS = 4_000, 800
"""Numbers of gradients, updates and weights that a file keeps at most, where fewer steps are enough for that; the same
of calls of modules."""

LADDER: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 2, 3, IN_FULL), (*range(1, IN_FULL + 1), *LATER)),
    ((1, 2, IN_FULL), (3, 4, 6, 8, 10, LATER[-1])),
    ((1, IN_FULL), (2, 4, LATER[-1])),
    ((1,), (2, IN_FULL)),
    ((), (1, IN_FULL)),
)
"""Steps at which a file keeps all numbers of tensors, and their norms alone: from small models to large ones."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Numbers that identify a tensor: of floating entries computed in float64, of a complex tensor those of
    ``view_as_real``, of integers and booleans exact as far as float64 is."""

    squares: float
    """The sum of the squares of all entries."""
    total: float | None = None
    """The sum of all entries. Both sums add up where tensors are concatenated."""
    ordered: float | None = None
    """The sum of entry times weight, with fixed weights by position: differs where entries change places."""
    by_row: float | None = None
    """As ``ordered``, within each row of the first dimension, summed over the rows: adds up where rows are
    concatenated, and differs where entries change places in a row."""

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan

    @property
    def unordered(self) -> Digest:
        """The digest without what depends on the layout of the tensor."""
        return Digest(self.squares, self.total)


def sum_of(digests: Iterable[Digest]) -> Digest:
    """The digest of the tensors joined, without what depends on their order."""
    parts = list(digests)
    total = None if any(part.total is None for part in parts) else math.fsum(part.total or 0.0 for part in parts)
    by_row = None if any(part.by_row is None for part in parts) else math.fsum(part.by_row or 0.0 for part in parts)
    return Digest(math.fsum(part.squares for part in parts), total, None, by_row)


def distance(a: Digest, b: Digest) -> float:
    """An estimate of |a - b| / max(|a|, |b|) of the tensors behind two digests; infinite where only one is finite.

    The sums change by about |a - b| where the entries of a - b have signs of their own, and by more where they share
    one.
    """
    if not (math.isfinite(a.squares) and math.isfinite(b.squares)):
        return 0.0 if a.squares == b.squares or (math.isnan(a.squares) and math.isnan(b.squares)) else math.inf
    size = math.sqrt(max(a.squares, b.squares, 0.0))
    if size == 0.0:
        return 0.0
    sums = ((a.total, b.total), (a.ordered, b.ordered), (a.by_row, b.by_row))
    differences = (abs(one - other) / size for one, other in sums if one is not None and other is not None)
    return max(abs(a.squares - b.squares) / (2 * size * size), *differences, 0.0)


def number_distance(a: float, b: float, scale: float = 0.0) -> float:
    """|a - b| over the largest of both and ``scale``."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    size = max(abs(a), abs(b), scale)
    return abs(a - b) / size if math.isfinite(size) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter or a buffer as the run began."""

    shape: tuple[int, ...]
    dtype: str
    start: Digest
    trains: bool = False
    """Whether it required grad as the run began."""
    role: str = "model"
    """"model", "buffer", "unregistered" (a parameter in a plain list), "foreign" (in an optimizer only)."""
    module: str = ""
    """The class of the module that holds it."""
    owner: str = ""
    """The path of this module."""
    also: tuple[str, ...] = ()
    """Its other names, where weights are tied."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of an optimizer."""

    parameters: tuple[str, ...]
    """Names, in the order of the group."""
    options: Mapping[str, str]
    """Its numbers, pairs of numbers, switches and texts as text, but for the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer, with its groups as they were at its last step."""

    kind: str
    """The name of its class."""
    groups: tuple[Group, ...]

    def options_of(self) -> dict[str, Mapping[str, str]]:
        """The options of each parameter's group, by name."""
        return {name: group.options for group in self.groups for name in group.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """One learning rate scheduler."""

    kind: str
    optimizer: int | None
    settings: Mapping[str, str]
    """What it was built with, as text; functions by what they do, not by their line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of a batch."""

    path: str
    """``batch["x"]``, ``batch[0]``."""
    shape: tuple[int, ...]
    dtype: str
    values: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module."""

    path: str
    """The module's path; its class where it is the root of the model or no part of it."""
    kind: str
    """The name of its class."""
    training: bool
    grad: bool
    """Whether gradients were on."""
    dtype: str
    """The dtype of the first floating tensor of its output; empty without one."""
    given: Digest
    """Of all tensors that it was given, joined."""
    gave: Digest
    """Of all tensors of its output, joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that the loop did, in words that keep when lines move: ``backward``, ``clip_grad_norm_(1.0)``."""

    what: str
    where: str = ""
    """``file:line   source``; in a fresh trajectory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happened from the end of one optimizer step to the end of the next; steps inside a step are no steps."""

    number: int
    """From 1 on, over all optimizers."""
    optimizer: int
    batches: int
    """Batches that the loop had taken by then."""
    losses: tuple[float, ...]
    """The values given to backward, in order; NaN for one that is no scalar."""
    lrs: tuple[float, ...]
    """The learning rate of each group of its optimizer."""
    clips: tuple[float, ...] = ()
    """The norm that each clip of gradients computed."""
    gradients: Mapping[str, Digest] = field(default_factory=dict)
    """As the step read them, after a clip; those parameters without one are absent."""
    updates: Mapping[str, float] = field(default_factory=dict)
    """The norm of what the step added to each parameter that its optimizer holds."""
    weights: Mapping[str, Digest] = field(default_factory=dict)
    """Every parameter and every buffer after the step."""
    calls: tuple[Call, ...] | None = None
    """Calls of modules in the order in which they came back, a module's own submodules before it. None where they are
    not kept."""
    events: tuple[Event, ...] | None = None
    """None where they were not watched: after the first steps."""
    where: str = ""
    """The line of the step, ``file:line   source``; in a fresh trajectory only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One run of the loop."""

    precision: Literal["float64", "own"]
    tensors: Mapping[str, Tensor]
    """Parameters in the order of registration, then buffers, by name."""
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Scheduler, ...]
    batches: tuple[tuple[Leaf, ...], ...]
    """The batches in the order in which the loop took them."""
    steps: tuple[Step, ...]
    lower: tuple[str, ...] = ()
    """Of a course in float64 the operations that gave a lower precision all the same, "aten.mm gave bfloat16": its
    numbers are then as exact as these."""
    asked: tuple[str, ...] = ()
    """Of a course in float64 the dtypes of 16 bits and fewer that the loop casts to, "bfloat16": here it was given
    float64 in their place."""
    repeatable: bool = True
    """Whether a second run under the same seed came to the same bits when it was recorded."""
    idle: tuple[str, ...] = ()
    """Classes of schedulers that are built and never stepped; in a fresh trajectory only."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """By path of a module of torch's own what its ``extra_repr`` says: "p=0.1, inplace=False"."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.role != "buffer"}

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.role == "buffer"}

    def since(self, step: Step) -> tuple[tuple[Leaf, ...], ...]:
        """The batches that were taken between the step before and this one."""
        place = self.steps.index(step)
        first = self.steps[place - 1].batches if place else 0
        return self.batches[first : step.batches]

    def paired(self, other: Course) -> Iterator[tuple[Step, Step]]:
        """The steps that both courses have, by number."""
        known = {step.number: step for step in other.steps}
        return ((step, known[step.number]) for step in self.steps if step.number in known)

    def with_facts_of(self, own: Course) -> Course:
        """The course in float64 with the facts of the other: the dtypes of the loop, and the order of its calls."""
        events = {step.number: step.events for step in own.steps}
        tensors = {n: replace(own.tensors[n], start=t.start) for n, t in self.tensors.items() if n in own.tensors}
        steps = tuple(replace(step, events=events.get(step.number)) for step in self.steps)
        facts = {name: getattr(own, name) for name in ("optimizers", "schedulers", "idle", "layers")}
        return replace(self, tensors=tensors, steps=steps, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a trajectory was recorded on. Two that are equal must agree in the loop's own precision too."""

    torch: str
    python: str
    platform: str
    """``Linux-x86_64``, without versions of the kernel."""
    device: str
    """``cpu``, or the name of the CUDA device."""
    threads: int
    cpu: str
    """The instructions that torch uses: ``AVX2``, ``AVX512``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How the runs were made: made so again, they are comparable."""

    seed: int
    count: int
    """The batches of one pass, as ``len(batches)`` says in ``fit``."""
    read_ahead: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The trajectory of one loop."""

    environment: Environment
    made: Made
    double: Course | None
    """None where the loop cannot be run wholly in float64."""
    why: str
    """Why not, in words."""
    own: Course


def thinned(trajectory: Trajectory) -> Trajectory:
    """The trajectory as its file has it, small enough to read in review.

    Losses and learning rates are kept at every step. Of tensors four numbers are kept at some steps and the norm at
    others, at the fewer the more tensors there are; of calls of modules all numbers at the first steps. In the loop's
    own precision, which is compared on one kind of machine only, the gradients of the first step are kept.
    """
    own, double = trajectory.own, trajectory.double
    if double is None:
        return replace(trajectory, own=_thinned(own, *_kept(own)))
    first = _thinned(own, (1,), (), calls=1)
    first = replace(first, steps=tuple(replace(step, updates={}, weights={}) for step in first.steps))
    return replace(trajectory, double=_thinned(double, *_kept(double)), own=first)


def _kept(course: Course) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rung of the ladder: a tensor takes two digests and an update, or three norms, a step."""
    count = len(course.tensors) * max(1, len({step.optimizer for step in course.steps}))
    rungs = ((w, n) for w, n in LADDER if (9 * len(w) + 3 * len(set(n) - set(w))) * count <= NUMBERS)
    return next(rungs, LADDER[-1])


def _thinned(course: Course, whole: tuple[int, ...], norms: tuple[int, ...], calls: int = 3) -> Course:
    numbers = [step.number for step in course.steps]
    wanted = [*numbers[:calls], *(n for n in (IN_FULL,) if calls > 1 and n in numbers)]
    counts = {step.number: 8 * len(step.calls or ()) for step in course.steps}
    kept = {n for i, n in enumerate(wanted) if sum(counts[m] for m in wanted[: i + 1]) <= CALL_NUMBERS}
    kept = kept or set(numbers[:1])
    made: dict[int, int] = {}
    steps = []
    for step in course.steps:
        nth = made[step.optimizer] = made.get(step.optimizer, 0) + 1
        known: list[Mapping[str, Digest]] = [step.gradients, step.weights]
        if nth not in whole:
            known = [{n: Digest(d.squares) for n, d in own.items() if nth in norms} for own in known]
        updates = step.updates if nth in whole or nth in norms else {}
        calls_kept = step.calls if step.number in kept else None
        steps.append(replace(step, calls=calls_kept, updates=updates, gradients=known[0], weights=known[1]))
    return replace(course, steps=tuple(steps))
