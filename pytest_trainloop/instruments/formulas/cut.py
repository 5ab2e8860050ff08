"""A value of a slice as a function of some of the values that it was computed from."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.instruments.formulas.origins import origin
from pytest_trainloop.instruments.losses.calls import HALF_THE_DIGITS
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, Ref
from pytest_trainloop.recording.torch_names import DIVISIONS, RECIPROCALS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.instruments.tracing.loss_slice import Slice

POINTS = 14
"""Settings of the arguments at which a small value is computed: more than any form has coefficients. The first is that
of the run."""

FEW_POINTS = 3
"""The same for a value of ``MANY`` entries and more, each of which is an equation."""

MANY = 64


@dataclass(eq=False)
class Arguments:
    """Values of a slice as the arguments of forms, at several settings. The first setting is that of the run."""

    slice: Slice
    numbers: tuple[int, ...]
    in_unit: bool = False
    """Whether learned arguments are drawn from [0, 1] at every setting, and not in the range of the run."""
    parts: dict[tuple[Any, ...], Mapping[str, torch.Tensor] | None] = field(default_factory=dict)
    """What forms made of them, by variant, free numbers and setting."""
    _settings: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def at(self, index: int) -> tuple[torch.Tensor, ...]:
        if index not in self._settings:
            self._settings[index] = tuple(
                _in_unit(self.slice, n, 1000 * index + place)
                if self.in_unit and self.slice.values[n].requires_grad
                else _leaf(self.slice, n, index and 1000 * index + place)
                for place, n in enumerate(self.numbers)
            )
        return self._settings[index]


@dataclass(eq=False)
class Cut:
    """The value ``number`` of a slice as a function of its values ``arguments``: nothing else that is learned or data
    reaches it."""

    slice: Slice
    number: int
    given: Arguments
    undetermined: bool = False
    """Whether some fit had no one solution at these settings: others may have."""
    _values: dict[int, torch.Tensor | None] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[int, ...]:
        return self.given.numbers

    @property
    def recorded(self) -> tuple[torch.Tensor, ...]:
        """The arguments as they were in the run."""
        return tuple(self.slice.values[n].tensor for n in self.arguments)

    @property
    def value(self) -> torch.Tensor:
        return self.slice.values[self.number].tensor

    @functools.cached_property
    def between(self) -> list[int]:
        """The calls from the arguments to the value."""
        found: set[int] = set()
        todo = [self.number]
        while todo:
            at = todo.pop()
            made = self.slice.values[at].made_by
            if at not in self.arguments and made is not None and made not in found:
                found.add(made)
                todo.extend(self.slice.calls[made].inputs)
        return sorted(found)

    @functools.cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(self.slice.calls[c].name for c in self.between)

    def divides_by(self, argument: int) -> bool:
        """Whether something that depends on this argument is a divisor."""
        number = self.arguments[argument]
        for call in (self.slice.calls[c] for c in self.between):
            if call.name in DIVISIONS or call.name in RECIPROCALS:
                above = call.name in DIVISIONS and call.args and isinstance(call.args[0], Ref)
                below = call.inputs[1:] if above else call.inputs
                if any(self.slice.depends(n, number) for n in below):
                    return True
        return False

    @functools.cached_property
    def divisions(self) -> int:
        """How many divisions lie between."""
        return sum(self.slice.calls[c].name in DIVISIONS | RECIPROCALS for c in self.between)

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """The plain numbers in the calls between, and constants of one entry."""
        found: dict[float, None] = {}
        for number in self.between:
            call = self.slice.calls[number]
            found |= dict.fromkeys(call.numbers)
            for value in (self.slice.values[n] for n in call.inputs):
                if value.kind == "constant" and value.tensor.numel() == 1:
                    found[float(value.tensor)] = None
        return tuple(found)[:8]

    @property
    def count(self) -> int:
        """The number of settings that are computed."""
        return FEW_POINTS if self.value.numel() >= MANY else POINTS

    def at(self, index: int) -> torch.Tensor | None:
        """The value at a setting of its arguments; None where the calls refuse them."""
        if index not in self._values:
            made = dict(zip(self.arguments, self.given.at(index), strict=True))
            try:
                self._values[index] = self.slice.replay(made, [self.number])[0]
            except CannotReplay:
                self._values[index] = None
        return self._values[index]

    def slope(self, index: int = 0) -> torch.Tensor | None:
        """The gradient of a weighted sum of the value with respect to all learned arguments, one after the other."""
        value = self.at(index)
        return None if value is None else slope(value, self.given.at(index))


UNBOUNDED = 3.0
"""The outputs of a layer are drawn from at least -3 to 3: nothing bounds them."""


def _leaf(found: Slice, number: int, seed: int) -> torch.Tensor:
    """A value as it was (seed 0), or another of its kind, with a gradient where it has one."""
    value = found.values[number]
    tensor = value.tensor
    if seed:
        of_layer = origin(found, number)[0].kind == "layer" and tensor.is_floating_point()
        tensor = other(tensor, seed, UNBOUNDED if of_layer else 0.0)
    return tensor.detach().clone().requires_grad_(value.requires_grad and tensor.is_floating_point())


def _in_unit(found: Slice, number: int, seed: int) -> torch.Tensor:
    tensor = found.values[number].tensor
    drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(tensor).requires_grad_()


def other(tensor: torch.Tensor, seed: int, bound: float = 0.0) -> torch.Tensor:
    """Other values of the same kind: 0 and 1 stay 0 and 1, whole numbers whole, others in the same range, and at
    least from ``-bound`` to ``bound``."""
    generator = torch.Generator().manual_seed(seed)
    if not tensor.numel() or tensor.is_complex():
        return tensor
    if tensor.dtype is torch.bool:
        share = float(torch.rand((), generator=generator, dtype=torch.float64)) * 0.6 + 0.2
        return (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) < share).to(tensor.device)
    low, high = tensor.min(), tensor.max()
    if low == high:
        return tensor
    if not tensor.is_floating_point():
        whole = torch.randint(int(low), int(high) + 1, tensor.shape, generator=generator, dtype=tensor.dtype)
        return whole.to(tensor.device)
    draw = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
    if bool(((tensor == low) | (tensor == high)).all()) and tensor.numel() > 2:
        share = float(torch.rand((), generator=generator, dtype=torch.float64)) * 0.6 + 0.2
        return torch.where(draw < share, high, low).to(tensor.dtype)
    low, high = low.clamp(max=-bound) if bound else low, high.clamp(min=bound) if bound else high
    return (low + (high - low) * draw).to(tensor.dtype)


def slope(value: torch.Tensor, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The gradient of a sum of the entries with different weights; None where there is none."""
    leaves = [a for a in arguments if a.requires_grad]
    if not value.requires_grad or not leaves:
        return None
    places = torch.arange(value.numel(), dtype=torch.float64, device=value.device)
    weights = 1.0 + 0.5 * torch.cos(places * 2.3).reshape(value.shape)
    found = torch.autograd.grad((value * weights).sum(), leaves, retain_graph=True, allow_unused=True)
    flat = [(torch.zeros_like(a) if g is None else g).flatten() for a, g in zip(leaves, found, strict=True)]
    return torch.cat(flat).double()


def close(a: torch.Tensor, b: torch.Tensor, size: float) -> bool:
    """Whether two float64 results of numbers of this size are equal up to rounding."""
    finite = a.isfinite() & b.isfinite()
    if not bool((a.isfinite() == b.isfinite()).all()) or not bool(finite.any()):
        return False
    return float((a - b)[finite].abs().max()) <= HALF_THE_DIGITS * size
