"""A diagnostic run: the first operation that makes a value which is not finite of values that are, forward or backward.

Infinities that are written out (a mask of -inf) are meant; so is what they become in a softmax. A NaN made of them is
not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook

from pytest_trainloop import nested
from pytest_trainloop.optimizers.replay import around_steps
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_functions import LOSSES
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.tracing.arguments import floats, in_place
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

TRAIL = 3
"""Modules before the operation whose ranges are shown."""

_PASSES_ON = frozenset(
    """__get__ __set__ __deepcopy__ __getitem__ detach detach_ clone requires_grad_ to cpu cuda item stack cat view
    reshape""".split()
)
_STEEP = frozenset(
    """sqrt rsqrt norm vector_norm linalg_norm linalg_vector_norm cdist dist std pow __pow__ div __truediv__ true_divide
    reciprocal log log2 log10 log1p acos asin arccos arcsin atanh acosh atan2 exp cosine_similarity normalize""".split()
)
"""Operations whose slope has no bound: where several took the same tensor, one of them made the gradient infinite."""

_LOOKS = frozenset({"isnan", "isinf", "isfinite", "backward", "grad", "register_hook", "retain_grad"})

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Birth:
    """``value`` is "NaN" or "inf"; ``low`` and ``high`` bound what the operation was given, ``step`` counts the
    optimizer steps before it, ``trail`` lists the modules before it with their ranges; ``of_infinite`` says that some
    of what it was given was infinite already."""

    op: str
    place: Place
    module: str
    value: str
    direction: Direction
    low: float
    high: float
    step: int
    trail: tuple[str, ...]
    of_infinite: bool = False


@dataclass(frozen=True, slots=True)
class Masked:
    """A loss that was not finite and was made so: by which operation, and where the value came from."""

    op: str
    place: Place
    birth: Birth | None
    step: int


@dataclass(frozen=True, slots=True)
class Ruin:
    """A step that left weights not finite, though gradients and weights were finite before it: the class of the
    optimizer, the weights, which step of the run it was, the largest gradient that it was given, and the state of the
    first of them."""

    kind: str
    names: tuple[str, ...]
    step: int
    largest: float
    state: str = ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One call: the tensors it was given, those of them that are not finite, which of these hold more than -inf (an
    operation in place may take it out), what it gave, and the bounds of what it was given; ``written_out`` tells
    whether an infinity stands among its arguments as a number."""

    name: str
    given: list[torch.Tensor]
    bad: list[torch.Tensor]
    lost: set[int]
    results: list[torch.Tensor]
    bounds: tuple[float, float]
    written_out: bool


@dataclass(slots=True)
class _Call:
    """An operation with a history; ``finite`` tells of the gradients that came in at its results; ``suspect`` is 2
    where a result is not finite, 1 where the operation has a slope without bound, -1 where it was given such values."""

    birth: Birth
    finite: dict[int, bool]
    suspect: int


class NonFiniteOrigins(WatchingMode):
    """``root`` is what made the first root that was not finite, ``gradient`` what made the first such gradient behind
    a finite root, ``loss`` what made the first loss that was not finite, backpropagated or not. ``masked`` are losses
    that were made finite, and backpropagated so; ``handed`` is the first operation that was given such a value which
    none before it had made; ``ruin`` is the step that made weights so, where nothing was before it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, Birth | None]] = {}
        self._steps = 0
        self._makers: dict[int, _Call] = {}
        self._takers: dict[int, list[_Call]] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._trail: deque[str] = deque(maxlen=TRAIL)
        self.root: Birth | None = None
        self.loss: Birth | None = None
        self.handed: Birth | None = None
        self.gradient: Birth | None = None
        self.ruin: Ruin | None = None
        self.masked: list[Masked] = []

    @classmethod
    def of(cls, evidence: Evidence) -> NonFiniteOrigins:
        """The watched run made once more, with every operation looked at for values that are not finite."""
        found, enough = cls(), evidence.plan().enough
        evidence.rerun(contexts=found.contexts, enough=lambda record: found.settled or enough(record))
        return found

    @property
    def settled(self) -> bool:
        """Whether what comes later tells nothing more."""
        return self.root is not None or self.ruin is not None

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self.watching(watch), around_steps(watch, self._before_step, self._after_step), self)

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        def leave(module: nn.Module, _args: Any, output: Any) -> None:
            with watch.quietly(), torch.no_grad():
                low, high = _range(floats(nested.tensors(output)))
                self._trail.append(f"{watch.book.path_of(module)} [{low:.3g}, {high:.3g}]")

        with super().watching(watch), hooked(register_module_forward_hook(leave)):
            yield

    def _before_step(self, optimizer: Any) -> tuple[list[torch.Tensor], float] | None:
        if self.ruin or self.root or self.gradient or self.loss or self.handed:
            return None
        held = [p for p in _held(optimizer) if p.grad is not None]
        grads = floats([p.grad for p in held if p.grad is not None])
        if not all(_finite(t) for t in (*floats(held), *grads)):
            return None
        return held, max((float(g.detach().abs().max()) for g in grads), default=0.0)

    def _after_step(self, optimizer: Any, before: tuple[list[torch.Tensor], float]) -> None:
        held, largest = before
        bad = [p for p in floats(held) if not _finite(p)]
        watch = self._watch
        if bad and watch is not None:
            book = watch.book
            names = [book.entries[i].name for p in bad if (i := book.index(p)) is not None]
            state = _told(optimizer.state.get(bad[0], {}))
            self.ruin = Ruin(type(optimizer).__name__, tuple(names), watch.record.steps, largest, state)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self.watch
        if name == "backward":
            self._backward(watch, args, kwargs)
        if name in _LOOKS:
            return func(*args, **kwargs)
        with watch.quietly(), torch.no_grad():
            self._forget(watch)
            given = floats(tensors_in(args, kwargs))
            bad = [t for t in given if not _finite(t)]
            lost = {id(t) for t in bad if _lost(t)}
            bounds = _range(given)
        out = func(*args, **kwargs)
        with watch.quietly():
            results = floats(tensors_in(args[0] if in_place(name) else out))
            written = any(isinstance(v, float) and math.isinf(v) for v in (*args, *kwargs.values()))
            self._look(watch, _Seen(name, given, bad, lost, results, bounds, written))
        return out

    def _forget(self, watch: Watch) -> None:
        """Graphs are over when their optimizer has stepped."""
        if watch.record.steps != self._steps:
            self._steps = watch.record.steps
            for held in (self._known, self._makers, self._takers, self._hooked, self._losses):
                held.clear()

    def _look(self, watch: Watch, seen: _Seen) -> None:
        with torch.no_grad():
            made = [t for t in seen.results if not _finite(t)]
        if seen.name in LOSSES:
            self._losses.update({id(t): t for t in seen.results})
        if made:
            origin = self._origin(watch, seen, made)
            if origin is not None or seen.name not in _PASSES_ON:
                self._known.update({id(t): (t, origin) for t in made})
            if self.loss is None and any(self._may_be_loss(t) and t.requires_grad for t in made):
                self.loss = origin
        elif seen.bad and seen.results and seen.name not in _PASSES_ON:
            self._made_finite(watch, seen)
        if any(t.requires_grad for t in seen.results) and self.gradient is None:
            self._hook(seen, made, self._born(watch, seen, "NaN", "backward"))

    def _origin(self, watch: Watch, seen: _Seen, made: list[torch.Tensor]) -> Birth | None:
        """Where what is not finite comes from; None where it was written out or handed in."""
        earlier = next((b for t in seen.bad if (b := self._known.get(id(t), (t, None))[1]) is not None), None)
        if earlier is not None:
            return earlier
        nan = any(bool(t.isnan().any()) for t in made)
        new_nan = nan and not any(bool(t.isnan().any()) for t in seen.bad)
        if not new_nan and (seen.bad or seen.written_out or seen.name in _PASSES_ON):
            if self.handed is None and seen.name not in _PASSES_ON and any(id(t) not in self._known for t in seen.bad):
                self.handed = self._born(watch, seen, "NaN" if nan else "inf", "forward")
            return None
        return self._born(watch, seen, "NaN" if nan else "inf", "forward")

    def _born(self, watch: Watch, seen: _Seen, value: str, direction: Direction) -> Birth:
        trail = tuple(self._trail)
        place, module = here(4)[0], watch.module_path()
        return Birth(
            seen.name, place, module, value, direction, *seen.bounds, watch.record.steps, trail, bool(seen.bad)
        )

    def _may_be_loss(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == 1 or id(tensor) in self._losses

    def _made_finite(self, watch: Watch, seen: _Seen) -> None:
        """Note a loss, or a single number on the way to one, that an operation made finite, once a gradient comes in
        at what it made of it."""
        result = seen.results[0]
        bad = next((t for t in seen.bad if self._may_be_loss(t) and t.requires_grad and id(t) in seen.lost), None)
        if bad is None or not result.requires_grad:
            return
        masked = Masked(seen.name, here(4)[0], self._known.get(id(bad), (bad, None))[1], watch.record.steps)
        result.register_hook(lambda _gradient: self.masked.append(masked))  # type: ignore[no-untyped-call]

    def _hook(self, seen: _Seen, made: list[torch.Tensor], birth: Birth) -> None:
        """See the gradients that come in at what the operation gave and was given."""
        results = [t for t in seen.results if t.requires_grad]
        suspect = -1 if seen.bad else 2 if any(t.requires_grad for t in made) else int(seen.name in _STEEP)
        call = _Call(birth, {id(t): True for t in results}, suspect)
        for tensor in (*seen.given, *results):
            if tensor.requires_grad and id(tensor) not in self._hooked:
                self._hooked[id(tensor)] = tensor
                tensor.register_hook(functools.partial(self._arrived, id(tensor)))  # type: ignore[no-untyped-call]
        for tensor in seen.given:
            self._takers.setdefault(id(tensor), []).append(call)
        for tensor in results:
            self._makers[id(tensor)] = call

    def _arrived(self, which: int, gradient: torch.Tensor | None) -> None:
        watch = self._watch
        if watch is None or gradient is None or self.gradient is not None or self.root is not None:
            return
        with watch.quietly(), torch.no_grad():
            finite = not gradient.is_floating_point() or _finite(gradient)
        if which in self._makers:
            self._makers[which].finite[which] = finite
        takers = [c for c in self._takers.get(which, ()) if c.suspect >= 0 and all(c.finite.values())]
        if not finite and takers:
            self.gradient = max(enumerate(takers), key=lambda pair: (pair[1].suspect, pair[0]))[1].birth

    def _backward(self, watch: Watch, args: Any, kwargs: Any) -> None:
        for root in floats(tensors_in(args, kwargs)):
            if id(root) in self._known and self.root is None:
                self.root = self._known[id(root)][1]
            elif root.requires_grad and (root.grad_fn is None or (root.numel() == 1 and float(root.detach()) == 0.0)):
                dropped = [b for t, b in self._known.values() if self._may_be_loss(t) and t.requires_grad]
                if dropped:
                    self.masked.append(Masked("a new tensor", here(3)[0], dropped[-1], watch.record.steps))


def _told(state: Any) -> str:
    """Dtype of what an optimizer keeps for a parameter, and how much of it is zero or not finite."""
    parts = []
    for name, value in state.items() if isinstance(state, dict) else ():
        for t in floats([value]) if isinstance(value, torch.Tensor) and value.numel() > 1 else ():
            zero, bad = float((t == 0).float().mean()), float((~t.isfinite()).float().mean())
            shares = [f"{share:.0%} {word}" for share, word in ((zero, "zero"), (bad, "not finite")) if share]
            parts.append(", ".join([f"{name} in {str(t.dtype).removeprefix('torch.')}", *shares]))
    return "; ".join(parts)


def _held(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _lost(tensor: torch.Tensor) -> bool:
    """Whether it holds NaN or +inf: -inf is the logarithm of what has no chance, and sums of such are right."""
    return bool(tensor.detach().isnan().any() or (tensor.detach() == math.inf).any())


def _range(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Of the finite entries."""
    kept = [t.detach().double() for t in tensors]
    ends = [(float(v.min()), float(v.max())) for t in kept if (v := t[torch.isfinite(t)]).numel()]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (math.nan, math.nan)
