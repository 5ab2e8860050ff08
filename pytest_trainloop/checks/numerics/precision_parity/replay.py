"""Random draws and rounding-dependent choices of one run, repeated in another.

A generator gives other numbers in float64 than in float32, and scores that lie close together change places when they
are rounded. Two runs in two precisions are comparable where the second one draws, and picks, what the first one did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_trainloop.recording.function_mode import OperationMode, tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import no_dispatch_modes
from pytest_trainloop.recording.torch_names import (
    ATEN_COMPARISONS,
    ATEN_FILLS,
    ATEN_OPAQUE,
    ATEN_PICKS,
    ATEN_PRODUCTS,
    EXTREME_PLACES,
)

LOW = (torch.bfloat16, torch.float16)


def name_of(func: Any) -> str:
    """``mm_`` for ``aten.mm_.default``."""
    return str(func.overloadpacket.__name__)


LARGE = 1 << 15
"""Entries from which on the state of the generator is kept in place of what is drawn: most of it are first weights."""


@dataclass(frozen=True, slots=True)
class Redraw:
    """A tensor that an operation fills with random numbers, as the call that fills it: the same numbers again."""

    func: Any
    arguments: tuple[Any, ...]
    """Those after the tensor."""
    options: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    state: torch.Tensor
    """Of the default generator, before the call."""

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Redraw | None:
        """The call that is about to be made; None for one that draws little, from a generator of the project's, or by
        what other tensors hold."""
        if not args or name_of(func) not in ATEN_FILLS or next(tensors_in((args[1:], kwargs)), None) is not None:
            return None
        filled = args[0]
        plain = filled.device.type == "cpu" and filled.is_contiguous() and filled.numel() >= LARGE
        if not plain or kwargs.get("generator") is not None:
            return None
        state = torch.default_generator.get_state()
        return cls(func, args[1:], dict(kwargs), filled.shape, filled.dtype, filled.device, state)

    def again(self) -> list[torch.Tensor]:
        """What was drawn, as a new tensor; the generator is left as it is."""
        with no_dispatch_modes(), torch.no_grad():
            here = torch.default_generator.get_state()
            try:
                torch.default_generator.set_state(self.state)
                out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                self.func(out, *self.arguments, **self.options)
                return [out]
            finally:
                torch.default_generator.set_state(here)


@dataclass(slots=True)
class Choices:
    """What one run drew and picked, and what it computed in low precision."""

    draws: list[tuple[str, list[torch.Tensor] | Redraw]] = field(default_factory=list)
    """Random results in their order, each with its operation."""
    picks: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Results of comparisons and places of extreme values in their order, each with its operation."""
    low: dict[torch.dtype, int] = field(default_factory=dict)
    """Number of results by low-precision dtype."""
    products: list[tuple[str, bool]] = field(default_factory=list)
    """Each product, and whether it was made in low precision."""
    angles: bool = False
    """Whether sin or cos was computed."""
    complete: bool = False
    """Whether the rest of the run is left out."""


class RecordChoices(OperationMode):  # type: ignore[no-untyped-call]
    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = None if self._choices.complete else Redraw.of(func, args, kwargs)
        out = passed_on(func, args, kwargs)
        if not self._choices.complete:
            self._note(func, args, out, before)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], out: Any, before: Redraw | None) -> None:
        choices, name = self._choices, name_of(func)
        given = list(tensors_in(out))
        for tensor in given:
            if tensor.dtype in LOW:
                choices.low[tensor.dtype] = choices.low.get(tensor.dtype, 0) + 1
        choices.angles |= name in ("sin", "cos")
        if name in ATEN_PRODUCTS:
            choices.products.append((name, any(t.dtype in LOW for t in given)))
        elif before is not None:
            choices.draws.append((name, before))
        elif _draws(func, name):
            choices.draws.append((name, [t.detach().clone() for t in given]))
        elif _picks(name, args, given):
            choices.picks.append((name, given[-1].detach().clone()))


class ReplayChoices(OperationMode):  # type: ignore[no-untyped-call]
    """Replaces what the run draws, and what it picks if ``picks``, by the choices of another run."""

    changes = True

    def __init__(self, choices: Choices, *, picks: bool) -> None:
        super().__init__()
        self._choices = choices
        self._picks = picks
        self._drawn = self._picked = 0
        self.mismatch = ""
        """The first operation that draws where the other run did not draw the same."""
        self.picked_otherwise = 0
        """Picks that differ from the other run's."""

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = passed_on(func, args, kwargs)
        name = name_of(func)
        if name in ATEN_PRODUCTS:
            return out
        given = list(tensors_in(out))
        if _draws(func, name):
            return self._as_drawn(name, args, out, given)
        if _picks(name, args, given):
            return self._as_picked(name, args, kwargs, out, given[-1])
        return out

    def _as_drawn(self, name: str, args: tuple[Any, ...], out: Any, given: list[torch.Tensor]) -> Any:
        if self._drawn >= len(self._choices.draws):
            return out
        was, drawn = self._choices.draws[self._drawn]
        self._drawn += 1
        kept = drawn.again() if isinstance(drawn, Redraw) else drawn
        if was != name or [k.shape for k in kept] != [g.shape for g in given]:
            self.mismatch = self.mismatch or f"{name} is drawn where {was} was"
            return out
        for mine, theirs in zip(given, kept, strict=True):
            if mine.is_floating_point() == theirs.is_floating_point():
                mine.copy_(theirs)
        if name == "native_dropout" and args[2] is not False:
            given[0].copy_(args[0] * given[1] / (1.0 - args[1]) if args[1] < 1.0 else torch.zeros_like(args[0]))
        return out

    def _as_picked(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, mine: torch.Tensor) -> Any:
        if self._picked >= len(self._choices.picks):
            return out
        was, theirs = self._choices.picks[self._picked]
        self._picked += 1
        if was != name or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            return out
        self.picked_otherwise += not torch.equal(mine, theirs)
        if not self._picks:
            return out
        mine.copy_(theirs)
        if name in ATEN_PICKS:
            next(tensors_in(out)).copy_(_gathered(name, args, kwargs, mine))
        return out


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
