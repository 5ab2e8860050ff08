"""What a baseline is: the trajectory of one loop, as plain data. Standard library only.

A trajectory holds two courses: one in float64 by construction, whose numbers are compared to rounding wherever they are
made again, and one in the loop's own precision, which is compared on the same environment only. Facts without numbers
(dtypes, shapes, options of groups, the order of calls) are those of the course in the loop's own precision: the other
one changes dtypes and switches gradient scalers off.

What a file leaves out (``thinned.py``) is an empty mapping, an empty tuple or None here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMAT = 1
"""The version of the files; one that changes what an older one means gets the next number."""

STEPS = 24
"""Optimizer steps that are recorded."""

IN_FULL = 12
"""Steps that are recorded in full, all others by losses, rates and norms."""

LATER = (16, 20, 24)
"""The steps after those that are recorded."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Numbers that stand for a tensor: of floating entries computed in float64, of a complex tensor those of
    ``view_as_real``, of integers and booleans exact as far as float64 is."""

    squares: float
    """The sum of the squares of all entries."""
    total: float | None = None
    """The sum of all entries. Both sums add up where tensors are concatenated."""
    ordered: float | None = None
    """The sum of entry times weight, with fixed weights by position: differs where entries change places."""
    by_row: float | None = None
    """The same within each row of the first dimension, summed over the rows: adds up where rows are concatenated, and
    differs where entries change places in a row."""

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return float(self.squares**0.5) if self.squares >= 0 else float("nan")


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
    rates: tuple[float, ...]
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
