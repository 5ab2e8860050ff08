"""What the optimizer steps of two runs read and leave: kept of the eager run, compared in the other.

The other run takes the eager run's weights and buffers over after each step, so that each of its steps begins where the
eager one did: an optimizer that divides by the size of a gradient magnifies its rounding from step to step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import members
from pytest_trainloop.gradients.compare import Agreement, agreement
from pytest_trainloop.gradients.tolerances import CANCELLATION
from pytest_trainloop.memory_layout import write
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.recording.samples import as_real, readable
from pytest_trainloop.recording.source import here

if TYPE_CHECKING:
    from pytest_trainloop.loop import TrainLoop

Tensors = dict[str, torch.Tensor]

STEPS = 5
"""Optimizer steps that are compared: shapes that vary are compiled again in the second and for good, and what is
compiled once more after that is compiled again and again."""

BYTES = 2**30
"""Of gradients and weights that are kept, at most: larger models are compared for fewer steps."""

_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "alpha", "eps", "maximize")
"""What an optimizer's groups hold that changes an update; ``foreach`` and ``capturable`` only how it is computed."""


def tensors_of(loop: TrainLoop, optimizers: list[Any]) -> Tensors:
    """Every parameter and buffer of the loop's modules by its plain name, and what its optimizers hold besides."""
    found: Tensors = {}
    for prefix, module in loop.modules.items():
        for name, tensor in (*members.named_parameters(module, prefix), *members.named_buffers(module, prefix)):
            if readable(tensor) and tensor.layout is torch.strided:
                found.setdefault(plain(name), tensor)
    known = {id(tensor) for tensor in found.values()}
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, tensor in enumerate(group["params"]):
                if id(tensor) not in known and readable(tensor) and tensor.layout is torch.strided:
                    found[f"{type(optimizer).__name__}[{o}].param_groups[{g}][{i}]"] = tensor
    return found


@dataclass(slots=True)
class Moment:
    """One optimizer step."""

    place: str
    held: frozenset[str]
    """The parameters of its optimizer."""
    gradients: Tensors
    after: Tensors = field(default_factory=dict)
    """Weights and buffers once it was made."""
    closures: int = 0
    """How often it called its closure. The gradients of the first time are compared, and what it leaves where that was
    the only one: a line search magnifies rounding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step at which two runs part."""

    step: int
    """Counted from 0."""
    what: str
    """"gradients", "weights" or "buffers"."""
    names: tuple[str, ...]
    found: Agreement
    """Of all gradients, or of the tensors that differ: eager first."""
    without: tuple[str, ...] = ()
    """Parameters that have a gradient in the eager run only."""
    place: str = ""


class Course:
    """Keeps the steps of one run, and compares them with those of an earlier one, ``other``, where it is given."""

    def __init__(self, bound: float = 0.0, other: Course | None = None) -> None:
        self.start: Tensors = {}
        self.options: dict[str, dict[str, Any]] = {}
        """Of each parameter at its first step: its group's options, and whether it requires grad."""
        self.held_from_start = False
        """Whether all that optimizers hold was known before the first step."""
        self.names: list[str] = []
        """The names of all parameters, as the loop's modules have them."""
        self.moments: list[Moment] = []
        self.made_by: list[int] = []
        """For each batch that was asked for, the steps made by then."""
        self.drew: list[bool] = []
        """For each step, whether torch's generator has moved on since the one before."""
        self._generator = b""
        self.at_batches = 0
        """Steps that were compared when the next batch was asked for, since no hook was called for them."""
        self.difference: Difference | None = None
        self.not_alike = ""
        """What keeps the two from being compared, in words."""
        self._other = other
        self._bound = bound
        self._optimizers: list[Any] = []
        self._loop: TrainLoop | None = None
        self._open: list[Moment] = []
        self._most = STEPS

    @property
    def through(self) -> bool:
        """Whether enough was seen."""
        enough = len(self.moments) >= self._most and not self._open
        return enough or self.at_batches >= self._most or self.difference is not None or bool(self.not_alike)

    @property
    def compared(self) -> int:
        """The number of steps that were compared."""
        seen = min(len(self.moments), len(self._other.moments)) if self._other is not None else len(self.moments)
        return seen or self.at_batches

    def begin(self, loop: TrainLoop) -> None:
        """Keep the weights that the run begins with, or begin with those of the other run."""
        self._loop = loop
        self._optimizers = [o for o in loop.optimizers if hasattr(o, "param_groups")]
        self.names = [n for prefix, module in loop.modules.items() for n, _ in members.named_parameters(module, prefix)]
        tensors = self._tensors()
        self.held_from_start = bool(self._optimizers)
        for optimizer in self._optimizers:
            self._note_options(optimizer)
        if self._other is None:
            self.start = _copies(tensors)
            size = sum(t.numel() * t.element_size() for t in self.start.values())
            self._most = max(1, min(STEPS, BYTES // max(2 * size, 1)))
            return
        self._most = max(len(self._other.moments), 1)
        self.not_alike = _not_alike(self._other.start, tensors)
        self._take(self._other.start)

    def end(self) -> None:
        """Let go of the loop."""
        self._loop, self._optimizers = None, []
        self._open.clear()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """For a step hook: read the gradients, or give the step a closure that reads them once it was called."""
        if self.through or not hasattr(optimizer, "param_groups"):
            return None
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        nth, named = len(self.moments), self._note_options(optimizer)
        moment = Moment(str(here()[0]), frozenset(named), {})
        if self._other is not None and nth < len(self._other.moments):
            named_alike = moment.held == self._other.moments[nth].held
            if not named_alike and not any("param_groups" in name for name in moment.held):
                self.not_alike = f"step {nth + 1} is that of another optimizer, or of other parameters"
                return None
        self.moments.append(moment)
        state = _state_of_generator()
        self.drew.append(state != self._generator)
        self._generator = state
        self._open.append(moment)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._read(nth, moment, named)
            return None

        @functools.wraps(closure)
        def called(*given: Any, **keywords: Any) -> Any:
            out = closure(*given, **keywords)
            moment.closures += 1
            if moment.closures == 1:
                self._read(nth, moment, named)
            return out

        return ((args[0], called, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": called})

    def _read(self, nth: int, moment: Moment, named: Tensors) -> None:
        gradients = {n: t.grad for n, t in named.items() if t.grad is not None and t.grad.layout is torch.strided}
        if self._other is None:
            moment.gradients = _copies(gradients)
        elif nth < len(self._other.moments):
            self._compare(nth, "gradients", self._other.moments[nth].gradients, gradients)

    def at_batch(self, number: int, _batch: Any) -> None:
        """Compare what steps have left that no hook was called for: those that are compiled."""
        if self._other is None:
            if number == len(self.made_by):
                self.made_by.append(len(self.moments))
            return
        made = self._other.made_by[number] if number < len(self._other.made_by) else 0
        if self.moments or self.through or made == 0:
            return
        if made == self._other.made_by[number - 1] + 1:
            self._compare_after(made - 1, self._other.moments[made - 1])
            self.at_batches += 1
        if self.difference is None:
            self._take(self._other.moments[made - 1].after)

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._open or not hasattr(optimizer, "param_groups"):
            return
        moment = self._open.pop()
        if self._other is None:
            moment.after = _copies(self._tensors())
            return
        nth = next(i for i, known in enumerate(self.moments) if known is moment)
        if nth < len(self._other.moments) and self.difference is None:
            expected = self._other.moments[nth]
            if moment.closures <= 1:
                self._compare_after(nth, expected)
            self._take(expected.after)

    def _note_options(self, optimizer: Any) -> Tensors:
        """The tensors that an optimizer holds, by name."""
        held = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        named = {name: t for name, t in self._tensors().items() if id(t) in held}
        for name, tensor in named.items():
            self.options.setdefault(name, _options(held[id(tensor)], tensor))
        return named

    def _tensors(self) -> Tensors:
        return {} if self._loop is None else tensors_of(self._loop, self._optimizers)

    def _take(self, values: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                value = values.get(name)
                if value is not None and value.shape == tensor.shape and not torch.equal(value, tensor):
                    write(tensor.detach(), value)

    def _compare(self, nth: int, what: str, expected: Tensors, got: Tensors) -> None:
        apart = tuple(n for n in dict.fromkeys((*expected, *got)) if not self._alike(expected.get(n), got.get(n)))
        if not apart:
            return
        names = [n for n in expected if n in got or what == "gradients"] + [n for n in got if n not in expected]
        whole = agreement(
            *(_flat([s.get(n) for n in names], [(expected.get(n, got.get(n))) for n in names]) for s in (expected, got))
        )
        if what == "gradients" and whole.difference <= self._bound:
            return  # what cancels to rounding in one tensor
        without = tuple(n for n in apart if n not in got) if what == "gradients" else ()
        self.difference = Difference(nth, what, apart, whole, without, self._other_place(nth))

    def _compare_after(self, nth: int, expected: Moment) -> None:
        """The weights where the gradient is more than rounding, which an optimizer may magnify; and the buffers."""
        now = self._tensors()
        weights = {n for n, t in now.items() if t.requires_grad or n in expected.gradients}
        significant: tuple[Tensors, Tensors] = {}, {}
        largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
        for name, gradient in expected.gradients.items():
            if name in now and name in expected.after:
                mask = gradient.abs() > CANCELLATION * largest
                significant[0][name], significant[1][name] = expected.after[name][mask], now[name].detach()[mask]
        self._compare_states(nth, "weights", *significant, self._bound / CANCELLATION)
        others = [n for n in now if n not in weights and n in expected.after]
        self._compare_states(
            nth, "buffers", {n: expected.after[n] for n in others}, {n: now[n].detach() for n in others}, self._bound
        )

    def _compare_states(self, nth: int, what: str, expected: Tensors, got: Tensors, bound: float) -> None:
        if self.difference is not None:
            return
        apart = {n: agreement(*_pair(expected[n], got[n])) for n in expected}
        names = tuple(n for n, found in apart.items() if not found.difference <= bound)
        if names:
            worst = max((apart[n] for n in names), key=lambda found: found.difference)
            self.difference = Difference(nth, what, names, worst, (), self._other_place(nth))

    def _other_place(self, nth: int) -> str:
        return self._other.moments[nth].place if self._other is not None else ""

    def _alike(self, expected: torch.Tensor | None, got: torch.Tensor | None) -> bool:
        if expected is None or got is None:
            given = got if expected is None else expected
            return given is None or not bool(given.any())
        return agreement(*_pair(expected, got)).difference <= self._bound


def _state_of_generator() -> bytes:
    return bytes(torch.default_generator.get_state().numpy())


def _options(group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    def constant(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value) if value.numel() == 1 else None
        return tuple(map(constant, value)) if isinstance(value, (tuple, list)) else value

    found = {name: constant(group[name]) for name in _OPTIONS if name in group}
    return {**found, "requires_grad": tensor.requires_grad}


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.shape != b.shape:
        return torch.zeros(1, dtype=torch.float64), torch.full((1,), float("nan"), dtype=torch.float64)
    return _wide(a), _wide(b)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return as_real(tensor).detach().to(torch.float64).reshape(-1)


def _flat(tensors: list[torch.Tensor | None], like: list[torch.Tensor | None]) -> torch.Tensor:
    parts = [
        _wide(torch.zeros_like(o) if t is None else t) for t, o in zip(tensors, like, strict=True) if o is not None
    ]
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)


def _not_alike(first: Tensors, second: Tensors) -> str:
    other = sorted(first.keys() ^ second.keys())
    if other:
        return f"{other[0]} is only in one of them"
    shape = next((n for n, t in first.items() if t.shape != second[n].shape), None)
    if shape is not None:
        return f"{shape} has shape {tuple(first[shape].shape)} in one and {tuple(second[shape].shape)} in the other"
    return ""
