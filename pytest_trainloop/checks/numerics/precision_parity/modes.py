"""What makes runs in two precisions comparable, and what changes one thing in a run.

A generator gives other numbers in float64 than in float32, and scores that lie close together change places when they
are rounded. Two runs in two precisions are comparable where the second one draws, and picks, what the first one did.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.recording.autocast import open_blocks
from pytest_trainloop.recording.function_mode import FunctionMode, OperationMode, tensors_in
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.patches import patched
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.torch_internals import apply_of, is_transformed, no_dispatch_modes, tree_map
from pytest_trainloop.recording.torch_names import (
    ATEN_COMPARISONS,
    ATEN_FILLS,
    ATEN_OPAQUE,
    ATEN_PICKS,
    ATEN_PRODUCTS,
    ATTRIBUTES,
    EXTREME_PLACES,
)
from pytest_trainloop.runs.hooks import before_calls, hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.watch import Watch

    Drawn = Callable[[], list[torch.Tensor]]
    """Gives what was drawn."""

LOW = (torch.bfloat16, torch.float16)

LARGE = 1 << 15
"""Entries from which on the state of the generator is kept in place of what is drawn: most of it are first weights."""


def name_of(func: Any) -> str:
    """``mm_`` for ``aten.mm_.default``."""
    return str(func.overloadpacket.__name__)


@dataclass(slots=True)
class Choices:
    """What one run drew and picked, and what it computed in low precision."""

    draws: list[tuple[str, Drawn]] = field(default_factory=list)
    """Random results in their order, each with its operation."""
    picks: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Results of comparisons and places of extreme values in their order, each with its operation."""
    low: set[torch.dtype] = field(default_factory=set)
    """The low-precision dtypes of results."""
    products: list[tuple[str, bool]] = field(default_factory=list)
    """Each product, and whether it was made in low precision."""
    refused: str = ""
    """The line of the first product that was made in float32 inside an autocast, be it one that is switched off."""
    angles: bool = False
    """Whether sin or cos was computed."""
    complete: bool = False
    """Whether the rest of the run is left out."""


class RecordChoices(OperationMode):  # type: ignore[no-untyped-call]
    """Notes what the run draws and picks."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        choices, name = self._choices, name_of(func)
        if choices.complete:
            return passed_on(func, args, kwargs)
        redraw = _redraw(func, args, kwargs)
        out = passed_on(func, args, kwargs)
        given = list(tensors_in(out))
        choices.low.update(t.dtype for t in given if t.dtype in LOW)
        choices.angles |= name in ("sin", "cos")
        if name in ATEN_PRODUCTS:
            low = any(t.dtype in LOW for t in given)
            choices.products.append((name, low))
            if not low and not choices.refused and open_blocks():
                choices.refused = str(here()[0])
        elif redraw is not None:
            choices.draws.append((name, redraw))
        elif _draws(func, name):
            kept = [t.detach().clone() for t in given]
            choices.draws.append((name, lambda: kept))
        elif _picks(name, args, given):
            choices.picks.append((name, given[-1].detach().clone()))
        return out


def _redraw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawn | None:
    """Of a call that is about to fill a tensor with random numbers: what draws the same numbers again, as a new tensor,
    and leaves the generator as it is. None for a call that draws little, from a generator of the project's, or by what
    other tensors hold."""
    if not args or name_of(func) not in ATEN_FILLS or next(tensors_in((args[1:], kwargs)), None) is not None:
        return None
    filled = args[0]
    plain = filled.device.type == "cpu" and filled.is_contiguous() and filled.numel() >= LARGE
    if not plain or kwargs.get("generator") is not None:
        return None
    state, rest, options = torch.default_generator.get_state(), args[1:], dict(kwargs)  # not what is filled
    shape, dtype, device = filled.shape, filled.dtype, filled.device

    def again() -> list[torch.Tensor]:
        with no_dispatch_modes(), torch.no_grad():
            now = torch.default_generator.get_state()
            try:
                torch.default_generator.set_state(state)
                out = torch.empty(shape, dtype=dtype, device=device)
                func(out, *rest, **options)
                return [out]
            finally:
                torch.default_generator.set_state(now)

    return again


class ReplayChoices(OperationMode):  # type: ignore[no-untyped-call]
    """Replaces what the run draws, and what it picks if ``picks``, by the choices of another run."""

    changes = True

    def __init__(self, choices: Choices, *, picks: bool) -> None:
        super().__init__()
        self._drawn, self._picked, self._picks = iter(choices.draws), iter(choices.picks), picks
        self.mismatch = ""
        """The first operation that draws where the other run did not draw the same."""
        self.picked_otherwise = 0
        """Picks that differ from the other run's."""

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, name = passed_on(func, args, kwargs), name_of(func)
        if name in ATEN_PRODUCTS:
            return out
        given = list(tensors_in(out))
        if _draws(func, name):
            if (draw := next(self._drawn, None)) is not None:
                self._draw_again(name, args, given, *draw)
        elif _picks(name, args, given) and (pick := next(self._picked, None)) is not None:
            (was, theirs), mine = pick, given[-1]
            if was == name and theirs.shape == mine.shape and theirs.dtype == mine.dtype:
                self.picked_otherwise += not torch.equal(mine, theirs)
                if self._picks:
                    mine.copy_(theirs)
                    if name in ATEN_PICKS:
                        given[0].copy_(_gathered(name, args, kwargs, mine))
        return out

    def _draw_again(self, name: str, args: tuple[Any, ...], given: list[torch.Tensor], was: str, drawn: Drawn) -> None:
        kept = drawn()
        if was != name or [k.shape for k in kept] != [g.shape for g in given]:
            self.mismatch = self.mismatch or f"{name} is drawn where {was} was"
            return
        for mine, theirs in zip(given, kept, strict=True):
            if mine.is_floating_point() == theirs.is_floating_point():
                mine.copy_(theirs)
        if name == "native_dropout" and args[2] is not False:
            given[0].copy_(args[0] * given[1] / (1.0 - args[1]) if args[1] < 1.0 else torch.zeros_like(args[0]))


def _gathered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], places: torch.Tensor) -> torch.Tensor:
    """The values at the places picked."""
    values: torch.Tensor = args[0]
    at = {"topk": 2, "kthvalue": 2}.get(name, 1)
    dim = kwargs.get("dim", args[at] if len(args) > at and not isinstance(args[at], bool) else -1)
    if values.dim() == 0:
        return values
    full = places if places.dim() == values.dim() else places.unsqueeze(dim)
    return values.gather(dim, full).reshape(places.shape)


def _draws(func: Any, name: str) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and not any(word in name for word in ATEN_OPAQUE)


def _picks(name: str, args: tuple[Any, ...], given: list[torch.Tensor]) -> bool:
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return False
    if name in ATEN_COMPARISONS or name in EXTREME_PLACES:
        return len(given) == 1
    return name in ATEN_PICKS and len(given) == 2


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest, half the distance from 1 to the next number: 2^-8 in
    bfloat16, 2^-11 in float16 (Higham, Accuracy and Stability of Numerical Algorithms, 2.2)."""
    return torch.finfo(dtype).eps / 2


class Rounded(OperationMode):  # type: ignore[no-untyped-call]
    """Rounds inputs and outputs of products in float64 to the digits of a dtype, as its hardware does, or disturbs them
    by as much under the seed ``noise``, in case the numbers happen to be representable.

    The range stays that of float64: an overflow or underflow is never predicted. ``low`` lists the products of the
    low-precision run and whether each was made in low precision: those that were not are left alone, as far as the
    order of products agrees.
    """

    changes = True

    def __init__(self, dtype: torch.dtype, low: Sequence[tuple[str, bool]], *, noise: int | None = None) -> None:
        super().__init__()
        self._unit, self._low, self._number = unit_roundoff(dtype), low, 0
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name not in ATEN_PRODUCTS:
            return passed_on(func, args, kwargs)
        number, self._number = self._number, self._number + 1
        if number < len(self._low) and self._low[number] == (name, False):
            return passed_on(func, args, kwargs)
        with no_dispatch_modes():  # its random numbers are not the loop's
            lowered = tree_map(self._rounded, args)
        out = passed_on(func, lowered, kwargs)
        with no_dispatch_modes():
            return tree_map(self._rounded, out)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        if self._noise is not None:
            draw = torch.rand(value.shape, generator=self._noise, dtype=torch.float64).to(value.device)
            return value * (1.0 + self._unit * (2.0 * draw - 1.0))
        significand, exponent = torch.frexp(value)
        return torch.round(significand / self._unit) * self._unit * torch.exp2(exponent.to(torch.float64))


class NoAutocastInBackward(FunctionMode):
    """Backward passes are made as outside of the autocast block that they are called in."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        differentiates = func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
        if differentiates and not is_transformed():  # functorch differentiates its own backward passes once more
            with torch.autocast(self._device, enabled=False):
                return passed_on(func, args, kwargs)
        return passed_on(func, args, kwargs)


class InFloat32(WatchingMode):
    """Computes in float32, without autocast, what a module computes, outside of modules what a line computes, or what
    an ``autograd.Function`` of the project computes, whatever dtype is asked for. ``met`` is true once it computed
    something."""

    def __init__(self, module: str, place: Place, function: str = "") -> None:
        super().__init__()
        self._module, self._place, self._function = module, place, function
        self.met = False

    @contextlib.contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        with super().watching(watch), patched(torch.autograd.Function, "apply", self._patched):
            yield

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ATTRIBUTES | {"backward"} or self._function:
            return passed_on(func, args, kwargs)
        if self.watch.module_path() != self._module if self._module else here()[0] != self._place:
            return passed_on(func, args, kwargs)
        self.met = True
        with _no_autocast():
            return _in_float32(func, args, kwargs)

    def _patched(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls.__name__ != self._function:
                return passed_on(apply_of(cls, original), args, kwargs)
            self.met = True
            with _no_autocast(), _Widened():
                return passed_on(apply_of(cls, original), tree_map(_wide, args), kwargs)

        return classmethod(apply)


class _Widened(FunctionMode):
    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _in_float32(func, args, kwargs)


def _in_float32(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with low-precision operands and dtypes as float32."""
    if func in (torch.Tensor.half, torch.Tensor.bfloat16):
        return args[0].float()
    return passed_on(func, tree_map(_wide, args), tree_map(_wide, kwargs))


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in LOW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


class ScaledLoss(FunctionMode):
    """Multiplies every root by ``scale`` before it is backpropagated."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.backward and args[0].numel() == 1 and len(args) == 1:
            return func(args[0] * self._scale, **kwargs)
        return passed_on(func, args, kwargs)


class FreshCasts:
    """Drops the casts that autocast keeps, once the weights have changed. ``entered`` is the line that enters the
    outermost block; empty where that is before the run."""

    def __init__(self) -> None:
        self.entered = ""

    def contexts(self, watch: Watch) -> tuple[contextlib.AbstractContextManager[Any], ...]:
        return (self._dropping(watch), patched(torch.autocast, "__enter__", self._noting))

    @contextlib.contextmanager
    def _dropping(self, watch: Watch) -> Iterator[None]:
        kept: list[torch.Tensor] = []

        def drop_if_moved(*_call: Any) -> None:
            with watch.suspended(), torch.no_grad():
                weights = [t for t in watch.table.tensors if t.dtype is torch.float32 and readable(t)]
                if len(weights) != len(kept) or not all(map(torch.equal, weights, kept)):
                    torch.clear_autocast_cache()
                    kept[:] = [t.detach().clone() for t in weights]

        # weights may be read outside of modules: after a step they have moved in any case
        with hooked(after_steps(lambda *_call: torch.clear_autocast_cache())), before_calls(watch, drop_if_moved):
            yield

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(block: Any) -> Any:
            if not self.entered and not open_blocks():
                self.entered = str(here()[0])
            return original(block)

        return enter
