"""A diagnostic run that finds the first operation whose result, or gradient, is NaN or infinite from finite input.

Infinities written as literals (a mask of -inf) are intended, and so is what softmax makes of them; a NaN made of them
is not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.tracing.arguments import floats, in_place
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.optimizer_state import described, in_float16
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import after_modules, on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    ATTRIBUTES,
    AUTOGRAD_CALLS,
    CASTS,
    DTYPE_CASTS,
    FINITENESS_TESTS,
    JOINS,
    LOSSES,
    MULTIPLICATIONS,
    RESHAPES,
    SUBTRACTIONS,
    UNBOUNDED_SLOPES,
)
from pytest_trainloop.runs.hooks import around_steps, hooked, unless_suspended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

TRAIL = 3
"""Modules before the operation whose ranges are shown."""

_PASSES_ON = (
    ATTRIBUTES
    | JOINS
    | (CASTS - DTYPE_CASTS - {"data", "alias", "pin_memory"})
    | {"__getitem__", "detach_", "item", "view", "reshape"}
)
"""Their result is what they are given. A cast to another dtype may overflow."""

_REARRANGES = RESHAPES | {"__getitem__", "gather", "index_select", "select", "squeeze", "unsqueeze", "to", "float"}
_WITH_A_NUMBER = ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | {"neg", "clamp", "clamp_min"}

_STEEP_AT_ZERO = frozenset({"log", "log2", "log10", "sqrt", "rsqrt"})

_LOOKS = FINITENESS_TESTS | AUTOGRAD_CALLS

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """The operation at which a value stopped being finite."""

    op: str
    place: Place
    module: str
    """Path of the module that was running, or ""."""
    value: str
    """"NaN" or "inf"."""
    direction: Direction
    low: float
    """The smallest finite entry of its inputs."""
    high: float
    """The largest finite entry of its inputs."""
    step: int
    """Optimizer steps made before it."""
    trail: tuple[str, ...]
    """The modules that ran before it, each with the range of its output."""
    nonfinite_input: bool = False
    """Whether some of its inputs were infinite already."""
    source: str = ""
    """The operation that made its input, reshapes and sums with numbers passed over."""

    def __str__(self) -> str:
        return f"{self.op}() in {self.module}" if self.module else f"{self.op}()"


@dataclass(frozen=True, slots=True)
class MaskedLoss:
    """A non-finite loss that an operation made finite, and where the value came from."""

    op: str
    place: Place
    origin: NonFiniteOrigin | None
    step: int


@dataclass(frozen=True, slots=True)
class BadStep:
    """An optimizer step that left weights non-finite, though weights and gradients were finite before it."""

    kind: str
    """Class of the optimizer."""
    names: tuple[str, ...]
    """The weights."""
    step: int
    largest: float
    """The largest gradient entry before it."""
    state: str = ""
    """Dtypes of the optimizer's state of the first weight, and the share of it that is zero or not finite."""
    narrow: str = ""
    """The state of the first weight that is kept in float16, where the weight is not."""
    weights: str = ""
    """The dtype of the first weight."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """One call of a torch function in the forward pass."""

    name: str
    inputs: list[torch.Tensor]
    bad: list[torch.Tensor]
    """Inputs that are not finite."""
    lost: set[int]
    """Ids of those that hold NaN or +inf; an operation in place may remove it."""
    results: list[torch.Tensor]
    bounds: tuple[float, float]
    """Of the finite entries of its inputs."""
    literal: bool
    """Whether an infinity is among its arguments as a number."""


@dataclass(slots=True)
class _Differentiable:
    """An operation that takes part in backward."""

    origin: NonFiniteOrigin
    finite: dict[int, bool]
    """By result, whether the gradient that arrived there is finite."""
    suspect: int
    """2: a result is not finite; 1: the slope of the operation has no bound; -1: its inputs were not finite."""


class NonFiniteOrigins(WatchingMode):
    """Where the values of one run stop being finite."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, NonFiniteOrigin | None]] = {}
        self._steps = 0
        self._producers: dict[int, _Differentiable] = {}
        self._consumers: dict[int, list[_Differentiable]] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._trail: deque[str] = deque(maxlen=TRAIL)
        self._sources: dict[int, tuple[torch.Tensor, str]] = {}
        self._steep: dict[tuple[str, Place], NonFiniteOrigin] = {}
        self.root: NonFiniteOrigin | None = None
        """Of the first non-finite value that backward was called on."""
        self.gradient: NonFiniteOrigin | None = None
        """Of the first non-finite gradient behind a finite root."""
        self.loss: NonFiniteOrigin | None = None
        """Of the first non-finite loss, backpropagated or not."""
        self.from_input: NonFiniteOrigin | None = None
        """The first operation with a non-finite input that no operation before it made."""
        self.bad_step: BadStep | None = None
        """The step that made weights non-finite, where nothing was non-finite before it."""
        self.masked: list[MaskedLoss] = []
        """Losses that were made finite and then backpropagated."""

    @classmethod
    def of(cls, evidence: Evidence) -> NonFiniteOrigins:
        """The watched run made once more, with the inputs and results of every operation examined."""
        found, enough = cls(), evidence.plan().enough
        evidence.rerun(contexts=found.contexts, enough=lambda record: found.settled or enough(record))
        return found

    @property
    def first(self) -> NonFiniteOrigin | None:
        """The origin that counts: of a root before a gradient's, and that before a loss's."""
        return self.root or self.gradient or self.loss

    @property
    def settled(self) -> bool:
        """Whether the rest of the run can add nothing."""
        return self.root is not None or self.bad_step is not None

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), around_steps(watch, self._before_step, self._after_step), self)

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            with watch.suspended(), torch.no_grad():
                low, high = _range(floats(nested.tensors(output)))
                self._trail.append(f"{watch.table.path_of(module)} [{low:.3g}, {high:.3g}]")

        with super().watching(watch), hooked(after_modules(unless_suspended(watch, leave))):
            yield

    def _before_step(self, optimizer: Any) -> tuple[list[torch.Tensor], float] | None:
        if self.bad_step or self.first or self.from_input:
            return None
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = floats([p.grad for p in held if p.grad is not None])
        if not all(_finite(t) for t in (*floats(held), *grads)):
            return None
        return held, max((float(g.detach().abs().max()) for g in grads), default=0.0)

    def _after_step(self, optimizer: Any, before: tuple[list[torch.Tensor], float]) -> None:
        held, largest = before
        bad = [p for p in floats(held) if not _finite(p)]
        watch = self._watch
        if bad and watch is not None:
            table = watch.table
            names = [table.entries[i].name for p in bad if (i := table.index(p)) is not None]
            state, dtype = optimizer.state.get(bad[0], {}), str(bad[0].dtype).removeprefix("torch.")
            self.bad_step = BadStep(
                type(optimizer).__name__,
                tuple(names),
                watch.record.steps,
                largest,
                described(state),
                "" if dtype == "float16" else in_float16(state),
                dtype,
            )

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.watch
        if name == "backward":
            self._backward(watch, args, kwargs)
        if name in _LOOKS:
            return passed_on(func, args, kwargs)
        with watch.suspended(), torch.no_grad():
            self._forget(watch)
            inputs = floats(tensors_in(args, kwargs))
            bad = [t for t in inputs if not _finite(t)]
            lost = {id(t) for t in bad if _lost(t)}
            bounds = _range(inputs)
        out = passed_on(func, args, kwargs)
        with watch.suspended():
            results = floats(tensors_in(args[0] if args and in_place(name) else out))
            literal = any(isinstance(v, float) and math.isinf(v) for v in (*args, *kwargs.values()))
            self._look(watch, _Operation(name, inputs, bad, lost, results, bounds, literal))
        return out

    def _forget(self, watch: Watch) -> None:
        """Graphs are dropped once an optimizer has stepped."""
        if watch.record.steps != self._steps:
            self._steps = watch.record.steps
            for held in (self._known, self._producers, self._consumers, self._hooked, self._losses, self._sources):
                held.clear()

    def _look(self, watch: Watch, operation: _Operation) -> None:
        with torch.no_grad():
            made = [t for t in operation.results if not _finite(t)]
        self._note_source(operation)
        if operation.name in UNBOUNDED_SLOPES and operation.results and self.first is None:
            self._note_steep(watch, operation, made)
        if operation.name in LOSSES:
            self._losses.update({id(t): t for t in operation.results})
        if made:
            origin = self._origin(watch, operation, made)
            if origin is not None or operation.name not in _PASSES_ON:
                self._known.update({id(t): (t, origin) for t in made})
            if self.loss is None and any(self._may_be_loss(t) and t.requires_grad for t in made):
                self.loss = origin
        elif operation.bad and operation.results and operation.name not in _PASSES_ON:
            self._made_finite(watch, operation)
        if any(t.requires_grad for t in operation.results) and self.gradient is None:
            self._hook(operation, made, self._at(watch, operation, "NaN", "backward"))

    def _note_steep(self, watch: Watch, operation: _Operation, made: list[torch.Tensor]) -> None:
        """Remember each line of an operation whose slope has no bound, as long as nothing is judged."""
        if (made and not operation.bad) or (operation.name in _STEEP_AT_ZERO and operation.bounds[0] == 0.0):
            origin = self._at(watch, operation, "NaN", "forward")
            self._steep.setdefault((origin.op, origin.place), origin)

    def _origin(self, watch: Watch, operation: _Operation, made: list[torch.Tensor]) -> NonFiniteOrigin | None:
        """Where these results come from; None for a literal, and for inputs that were not finite from the start."""
        bad, passes_on = operation.bad, operation.name in _PASSES_ON
        earlier = next((o for t in bad if (o := self._known.get(id(t), (t, None))[1]) is not None), None)
        if earlier is not None:
            return earlier
        nan = any(bool(t.isnan().any()) for t in made)
        origin = self._at(watch, operation, "NaN" if nan else "inf", "forward")
        new_nan = nan and not any(bool(t.isnan().any()) for t in bad)
        if new_nan or not (bad or operation.literal or passes_on):
            return origin
        if self.from_input is None and not passes_on and any(id(t) not in self._known for t in bad):
            self.from_input = origin
        return None

    def _at(self, watch: Watch, operation: _Operation, value: str, direction: Direction) -> NonFiniteOrigin:
        return NonFiniteOrigin(
            op=operation.name,
            place=here()[0],
            module=watch.module_path(),
            value=value,
            direction=direction,
            low=operation.bounds[0],
            high=operation.bounds[1],
            step=watch.record.steps,
            trail=tuple(self._trail),
            nonfinite_input=bool(operation.bad),
            source=next((self._source_of(t) for t in operation.inputs if self._source_of(t)), ""),
        )

    def _source_of(self, tensor: torch.Tensor) -> str:
        known, name = self._sources.get(id(tensor), (None, ""))
        return name if known is tensor else ""

    def _note_source(self, operation: _Operation) -> None:
        """Remember what made a result; what only rearranges one tensor, or joins it with a number, is passed over."""
        name, inputs = operation.name, operation.inputs
        before = self._source_of(inputs[0]) if inputs else ""
        rearranged = name in _REARRANGES or (name in _WITH_A_NUMBER and len(inputs) == 1 and before)
        made = before if rearranged else "sub" if name in SUBTRACTIONS else name
        for tensor in operation.results:
            self._sources[id(tensor)] = (tensor, made)

    def others_like(self, origin: NonFiniteOrigin) -> list[NonFiniteOrigin]:
        """The same operation at other lines, where it meets 0 as well or its result is not finite either."""
        return [o for o in self._steep.values() if o.op == origin.op and o.place != origin.place]

    def _may_be_loss(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 1 or id(tensor) in self._losses

    def _made_finite(self, watch: Watch, operation: _Operation) -> None:
        """Note a loss, or a scalar on the way to one, that an operation made finite, once a gradient arrives at the
        result."""
        result, lost = operation.results[0], operation.lost
        bad = next((t for t in operation.bad if self._may_be_loss(t) and t.requires_grad and id(t) in lost), None)
        if bad is None or not result.requires_grad:
            return
        origin = self._known.get(id(bad), (bad, None))[1]
        masked = MaskedLoss(operation.name, here()[0], origin, watch.record.steps)
        on_gradient(result, lambda _gradient: self.masked.append(masked))

    def _hook(self, operation: _Operation, made: list[torch.Tensor], origin: NonFiniteOrigin) -> None:
        """Hook the gradients at the operation's inputs and results."""
        results = [t for t in operation.results if t.requires_grad]
        steep = operation.name in UNBOUNDED_SLOPES
        suspect = -1 if operation.bad else 2 if any(t.requires_grad for t in made) else int(steep)
        differentiable = _Differentiable(origin, {id(t): True for t in results}, suspect)
        for tensor in (*operation.inputs, *results):
            if tensor.requires_grad and id(tensor) not in self._hooked:
                self._hooked[id(tensor)] = tensor
                on_gradient(tensor, functools.partial(self._arrived, id(tensor)))
        for tensor in operation.inputs:
            self._consumers.setdefault(id(tensor), []).append(differentiable)
        for tensor in results:
            self._producers[id(tensor)] = differentiable

    def _arrived(self, which: int, gradient: torch.Tensor | None) -> None:
        watch = self._watch
        if watch is None or gradient is None or self.gradient is not None or self.root is not None:
            return
        with watch.suspended(), torch.no_grad():
            entries = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
            finite = all(map(_finite, floats([entries])))
        if which in self._producers:
            self._producers[which].finite[which] = finite
        consumers = [c for c in self._consumers.get(which, ()) if c.suspect >= 0 and all(c.finite.values())]
        if not finite and consumers:
            self.gradient = max(enumerate(consumers), key=lambda pair: (pair[1].suspect, pair[0]))[1].origin

    def _backward(self, watch: Watch, args: Any, kwargs: Any) -> None:
        for root in floats(tensors_in(args, kwargs)):
            if id(root) in self._known and self.root is None:
                self.root = self._known[id(root)][1]
            elif root.requires_grad and (root.grad_fn is None or (root.numel() == 1 and float(root.detach()) == 0.0)):
                dropped = [origin for t, origin in self._known.values() if self._may_be_loss(t) and t.requires_grad]
                if dropped:
                    self.masked.append(MaskedLoss("a new tensor", here()[0], dropped[-1], watch.record.steps))


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _lost(tensor: torch.Tensor) -> bool:
    """Whether it holds NaN or +inf. -inf is the logarithm of probability 0, and sums of such are right."""
    return bool(tensor.detach().isnan().any() or (tensor.detach() == math.inf).any())


def _range(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """The smallest and the largest finite entry; NaN where there is none."""
    kept = [t.detach().double() for t in tensors]
    ends = [(float(v.min()), float(v.max())) for t in kept if (v := t[torch.isfinite(t)]).numel()]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (math.nan, math.nan)
