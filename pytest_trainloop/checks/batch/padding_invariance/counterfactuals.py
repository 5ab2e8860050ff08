"""Runs in which one path from padding to the gradient is blocked: the counterfactuals that separate causes."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.padding_invariance import attention, pooling, positions
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.hooks import on_gradient
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_names import CONVOLUTIONS, LOSSES, NORMALISATIONS, RECURRENT
from pytest_trainloop.runs.no_randomness import NoRandomness
from pytest_trainloop.runs.shared_draws import Draw, draws
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.checks.batch.padding_invariance.slices import Span
    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

PATHS = ("attention", "pooling", "positions")
"""Paths that can be blocked; "outputs" besides, by which padded positions get no gradient from the loss."""

DIVISORS = "divisors"
"""Means of losses by position that are zero at padded ones, divided by the number of real positions instead."""

BATCH_STATISTICS = "batch statistics"
"""Not a path: batch norms take the statistics of the batch, as in training, and not their running ones."""

_NORMS = NORMALISATIONS - {"rms_norm"}


@dataclass(frozen=True, slots=True)
class PathCall:
    """A call by which padding reaches real positions."""

    path: str
    op: str
    place: Place
    zeros: bool = False
    """Whether the padded positions of its input are all zero."""
    entries: int = 0
    """The number of entries of the table of positions that it reads."""
    trained: bool = False
    """Whether its input has a gradient."""


@dataclass(slots=True)
class PaddingFlow:
    """How padding takes part in one run."""

    blocked: list[PathCall] = field(default_factory=list)
    """The calls that give something else with their path blocked."""
    mixing: list[PathCall] = field(default_factory=list)
    """Calls that mix positions and cannot be blocked: convolutions, norms, recurrent nets."""
    drawn: list[Draw] = field(default_factory=list)
    """The random numbers that were drawn: function, shape without rows, numbers among the arguments."""
    normed: PathCall | None = None
    """The first batch norm."""
    behind: bool = False
    """Whether states of a recurrent net in or behind the padding were used."""
    inverted: PathCall | None = None
    """Where attention looks at padding and at nothing real."""
    spread: bool = False
    """Whether what was pooled goes back to every position, as in a norm or a gate."""
    reduced: PathCall | None = None
    """The last call before backward that takes results by position and gives one without positions: the reduction of a
    loss by position."""
    length_is_target: bool = False
    """Whether the number of real positions is the target of a loss."""


class BlockedPaths(WatchingMode, NoRandomness):
    """Blocks these paths, call by call; no module of the user's is changed."""

    def __init__(self, span: Span, paths: frozenset[str]) -> None:
        super().__init__()
        self._span = span
        self._paths = paths
        self._pooled: dict[int, torch.Tensor] = {}
        self.flow = PaddingFlow()

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        try:
            with super().watching(watch):
                yield
        finally:
            self._pooled.clear()

    def active(self) -> bool:
        """Inside backward passes too: a checkpoint has to run again what it ran."""
        return not (self.watch.is_suspended or self.watch.stepping)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        still = functools.partial(NoRandomness.call, self, name, func)
        if name == "backward":
            return still(args, kwargs)
        if name == "batch_norm" and BATCH_STATISTICS in self._paths:
            return passed_on(func, args, kwargs)
        watch, name = self.watch, name_of(func)
        out = self._without(watch, name, still, args, kwargs)
        if out is None:
            out = still(args, kwargs)
            with watch.suspended():
                self._look(watch, name, args, kwargs, out)
                self._follow(args, kwargs, out)
                self._reduces(watch, name, args, kwargs, out)
        return out

    def _without(
        self, watch: Watch, name: str, call: pooling.Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the call returns with the paths blocked; None where it is on none of them."""
        with watch.suspended():
            other = attention.masked(name, args, kwargs, self._span)
        if other is not None:
            return self._attended(watch, name, call, (args, kwargs), other)
        blocks = {"pooling": pooling.pooled, "positions": positions.counted_from_first, DIVISORS: pooling.averaged}
        for path, block in blocks.items():
            if path in self._paths:
                with watch.suspended():
                    out = block(name, call, args, kwargs, self._span)
                if out is not None:
                    self._note(watch, path, name, call, (args, kwargs), out)
                    return out
        return None

    def _attended(
        self, watch: Watch, name: str, call: pooling.Call, given: attention.Given, other: attention.Given
    ) -> Any:
        with watch.suspended():
            if self.flow.inverted is None and attention.inverted(name, *given, self._span):
                self.flow.inverted = PathCall("attention", name, here()[0])
        if "attention" not in self._paths:
            return call(*given)
        with watch.suspended():
            out = call(*other)
        self._note(watch, "attention", name, call, given, out)
        return out

    def _note(self, watch: Watch, path: str, name: str, call: pooling.Call, given: attention.Given, out: Any) -> None:
        with watch.suspended(), torch.no_grad():
            before = list(tensors_in(call(*given)))
            after = list(tensors_in(out))
            same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True))
            if not same:
                entries = positions.entries(name, *given) if path == "positions" else 0
                trained = any(t.requires_grad for t in tensors_in(*given))
                self.flow.blocked.append(PathCall(path, name, here()[0], self._is_zero(given), entries, trained))
            if path == "pooling" and name not in RECURRENT and name not in pooling.READS:
                self._pooled |= {id(t): t for t in tensors_in(out)}

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow what was pooled until it is joined with positions again."""
        if self._pooled and any(id(t) in self._pooled for t in tensors_in(args, kwargs)):
            made = [t for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
            self.flow.spread |= any(self._span.of(size) is not None for t in made for size in t.shape[1:])
            self._pooled |= {id(t): t for t in made}

    def _reduces(self, watch: Watch, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if watch.backward is not None or not isinstance(out, torch.Tensor) or not out.requires_grad:
            return
        given = [t for t in tensors_in(args, kwargs) if t.requires_grad]
        if not self._by_position(out) and any(self._by_position(t) for t in given):
            self.flow.reduced = PathCall("reduction", name, here()[0])

    def _by_position(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has entries for each position, on an axis of their own or one with the rows."""
        return any(self._span.of(size) or (size and size % self._span.total == 0) for size in tensor.shape)

    def _is_zero(self, given: attention.Given) -> bool:
        """Whether the padded positions of a call's input are all zero."""
        tensor = next(iter(tensors_in(given)), None)
        if tensor is None or not tensor.is_floating_point():
            return False
        axis = next((a for a in range(1, tensor.dim()) if self._span.of(tensor.shape[a])), None)
        if axis is None:
            return False
        first, last = self._span.of(tensor.shape[axis]) or (0, 0)
        place = torch.arange(tensor.shape[axis], device=tensor.device)
        return not bool(tensor.detach().index_select(axis, place[(place < first) | (place >= last)]).any())

    def _look(self, watch: Watch, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if draws(name):
            shape = tuple(out.shape[1:]) if isinstance(out, torch.Tensor) else ()
            numbers = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, (int, float)))
            self.flow.drawn.append((name, shape, numbers))
        elif name in LOSSES:
            self._target(args[1] if len(args) > 1 else kwargs.get("target"))
        elif name in RECURRENT:
            self._recurrent(watch, name, args, out)
        elif name in CONVOLUTIONS or name in _NORMS:
            if name == "batch_norm" and self.flow.normed is None:
                self.flow.normed = PathCall("statistics", name, here()[0])
            self._mixing(watch, name, args)
        elif "outputs" in self._paths and name == "linear" and out.requires_grad and out.dim() > 2:
            self._cut(out)

    def _target(self, target: Any) -> None:
        real = self._span.stop - self._span.start
        if isinstance(target, torch.Tensor) and target.numel() and not target.requires_grad:
            self.flow.length_is_target |= bool((target == real).all())

    def _mixing(self, watch: Watch, name: str, args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        if not isinstance(given, torch.Tensor) or not any(self._span.of(s) for s in given.shape[1:]):
            return
        kernel = args[1].shape[2:] if name in CONVOLUTIONS and len(args) > 1 else ()
        if name not in ("batch_norm", "layer_norm") and (name in _NORMS or any(k > 1 for k in kernel)):
            self.flow.mixing.append(PathCall("mixing", name, here()[0]))

    def _recurrent(self, watch: Watch, name: str, args: tuple[Any, ...], out: Any) -> None:
        axis = 1 if args[-1] else 0
        real = self._span.of(args[0].shape[axis]) if args[0].dim() == 3 else None
        if real is None:
            return
        self.flow.mixing.append(PathCall("mixing", name, here()[0]))
        states, *last = tensors_in(out)

        def beyond(gradient: torch.Tensor) -> None:
            with watch.suspended():
                self.flow.behind |= bool(gradient.narrow(axis, real[1], gradient.shape[axis] - real[1]).any())

        def at_the_end(gradient: torch.Tensor) -> None:
            with watch.suspended():
                self.flow.behind |= real[1] < args[0].shape[axis] and bool(gradient.any())

        for tensor, hook in ((states, beyond), *((t, at_the_end) for t in last)):
            if tensor.requires_grad:
                on_gradient(tensor, hook)

    def _cut(self, out: torch.Tensor) -> None:
        axis = next((a for a in (1, 0) if self._span.of(out.shape[a])), None)
        if axis is None:
            return
        first, last = self._span.of(out.shape[axis]) or (0, 0)
        place = torch.arange(out.shape[axis], device=out.device)
        real = ((place >= first) & (place < last)).to(out.dtype)
        shape = [1] * out.dim()
        shape[axis] = -1
        on_gradient(out, lambda gradient: gradient * real.view(shape))
