"""Random numbers that do not depend on how a batch is composed.

Noise, time steps and masks that a loop draws for each example make two ways of splitting a batch differ by chance.
Here each number depends only on the kind of the draw and on its place in what is drawn: ``coordinates`` gives the
numbers of the places along each axis. By default they are the places, and 0 along the first: every row of
every micro-batch gets the same, whatever comes after it. The gradient is then one that the loop could have had, and the
same however the batch is split. ``row_draws`` gives each row its own.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Coordinates = Callable[[Sequence[int]], Sequence[torch.Tensor]]

_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""SplitMix64's constants, as signed numbers (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""


def same_for_every_row(shape: Sequence[int]) -> list[torch.Tensor]:
    """The places along each axis, and 0 along the first."""
    return [torch.zeros(size, dtype=torch.int64) if not axis else torch.arange(size) for axis, size in enumerate(shape)]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that draws random numbers, and its result, whose shape, dtype and device are kept."""

    out: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    coordinates: Coordinates
    seed: str
    """Tells draws of one kind from each other."""

    def given(self, position: int, name: str, default: Any) -> Any:
        value = self.args[position] if len(self.args) > position else self.kwargs.get(name)
        return default if value is None or isinstance(value, torch.Generator) else value

    def normal(self) -> torch.Tensor:
        return self._as_out(torch.special.ndtri(self._numbers("normal", self.out.shape)))

    def uniform(self) -> torch.Tensor:
        """Within (0, 1): never at its ends."""
        return self._as_out(self._numbers("uniform", self.out.shape))

    def races(self, samples: int, classes: int) -> torch.Tensor:
        """Arrival times by sample and class, for each place before the last axis of the result."""
        shape = (*self.out.shape[:-1], samples, classes)
        return -torch.log(self._numbers("race", shape).to(self.out.device))

    def _numbers(self, kind: str, shape: Sequence[int]) -> torch.Tensor:
        known = list(self.coordinates(self.out.shape))[: len(shape)]
        lead = len(self.out.shape) - (len(shape) > len(self.out.shape))  # races lie behind the axes of the result
        places = [c if axis < lead else torch.arange(shape[axis]) for axis, c in enumerate(known)]
        places += [torch.arange(size) for size in shape[len(places) :]]
        return numbers(zlib.crc32(f"{kind}{self.seed}{len(shape)}".encode()), places)

    def _as_out(self, values: torch.Tensor) -> torch.Tensor:
        dtype = self.out.dtype if self.out.is_floating_point() else torch.float64
        return values.to(self.out.device, dtype)


def numbers(seed: int, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Uniform random numbers within (0, 1), float64, each a function of the seed and of its coordinates, which are
    given for each axis as int64."""
    mixed = _mixed(torch.tensor(seed))
    for axis, along in enumerate(places):
        mixed = _mixed(mixed[..., None] + (along + axis + 1) * _STEP)
    return (_shifted(mixed, 11).double() / 2**53).clamp_(1e-12, 1 - 1e-12)


def _mixed(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros on the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def shared(
    name: str,
    out: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    coordinates: Coordinates = same_for_every_row,
    seed: str = "",
) -> Any:
    """The result of the call ``name(*args, **kwargs)`` in place of ``out``; ``out`` itself where it draws nothing."""
    if not drawn(name, out):
        return out
    call = _Call(out, args, kwargs, coordinates, seed)
    if name == "gumbel_softmax":
        return _gumbel_softmax(call)
    with torch.no_grad(), aside():
        out.copy_(_DRAWS[name](call))
    return out


def drawn(name: str, out: Any) -> bool:
    """Whether ``out`` is what a call of this name has drawn."""
    return draws(name) and isinstance(out, torch.Tensor) and out.layout is torch.strided and out.numel() > 0


def _normal_from(call: _Call) -> Any:
    """``torch.normal(mean, std)``, with tensors or numbers."""
    return call.given(0, "mean", 0.0) + call.given(1, "std", 1.0) * call.normal()


def _uniform_in_place(call: _Call) -> Any:
    low = call.given(1, "from", call.kwargs.get("a", 0.0))  # nn.init calls its bounds a and b
    high = call.given(2, "to", call.kwargs.get("b", 1.0))
    return low + (high - low) * call.uniform()


def _integers(call: _Call) -> Any:
    """Bounds as ``randint`` and ``randint_like`` take them: ``high``, or ``low`` and ``high``."""
    bounds = [a for a in call.args if isinstance(a, int)]
    low, high = call.kwargs.get("low", 0), call.kwargs.get("high", 0)
    if len(bounds) > 1:
        low, high = bounds[:2]
    elif bounds and "high" in call.kwargs:
        low = bounds[0]
    elif bounds:
        high = bounds[0]
    return low + torch.floor((high - low) * call.uniform())


def _multinomial(call: _Call) -> Any:
    """The first arrivals of exponential races, one for each sample where these are replaced."""
    weights = call.given(0, "input", None).detach().to(torch.float64)
    samples, replaced = call.out.shape[-1], bool(call.given(2, "replacement", False))
    arrivals = call.races(samples if replaced else 1, weights.shape[-1]) / weights.clamp_min(1e-300).unsqueeze(-2)
    if replaced:
        return arrivals.argmin(-1)
    return arrivals.squeeze(-2).topk(samples, dim=-1, largest=False).indices


def _gumbel_softmax(call: _Call) -> Any:
    """``softmax((logits + g) / tau)`` as torch computes it, with a straight-through gradient where it is ``hard``."""
    logits, tau, dim = call.given(0, "logits", None), call.given(1, "tau", 1.0), call.given(4, "dim", -1)
    with aside():
        gumbel = -torch.log(-torch.log(call.uniform())).to(logits.dtype)
    soft = ((logits + gumbel) / tau).softmax(dim)
    if not call.given(2, "hard", False):
        return soft
    return torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


_DRAWS: dict[str, Callable[[_Call], Any]] = {
    "randn": _Call.normal,
    "randn_like": _Call.normal,
    "normal": _normal_from,
    "normal_": lambda call: call.given(1, "mean", 0.0) + call.given(2, "std", 1.0) * call.normal(),
    "rand": _Call.uniform,
    "rand_like": _Call.uniform,
    "uniform_": _uniform_in_place,
    "randint": _integers,
    "randint_like": _integers,
    "bernoulli": lambda call: call.uniform() < call.given(1, "p", call.given(0, "input", 0.5)),
    "bernoulli_": lambda call: call.uniform() < call.given(1, "p", 0.5),
    "exponential_": lambda call: -torch.log(call.uniform()) / call.given(1, "lambd", 1.0),
    "multinomial": _multinomial,
    "gumbel_softmax": _gumbel_softmax,
    "randperm": lambda call: torch.arange(call.out.numel(), device=call.out.device),
}


_BY_PLACE = frozenset(_DRAWS) - {"randint", "randint_like", "randperm", "multinomial", "gumbel_softmax"}
"""Draws of which each number depends on its place and on bounds that are given: a longer one begins as the shorter."""


def draws(name: str) -> bool:
    """Whether a call of this name draws random numbers."""
    return name in _DRAWS


Draw = tuple[str, tuple[int, ...], tuple[float, ...]]
"""A function that draws, the shape of what it gave without rows, and the numbers among its arguments."""


def first_unlike(longer: Sequence[Draw], shorter: Sequence[Draw], lengths: Sequence[int]) -> str:
    """The name of the first draw of one run that differs from that of another at positions that both have; empty where
    all are equal. ``lengths`` are the positions of a row in each run, where those that only the first has come last.
    """
    for one, other in itertools.zip_longest(longer, shorter):
        if one is None or other is None or (one != other and not (lengths and _begins_as(one, other, *lengths))):
            return str((one or other)[0])
    return ""


def _begins_as(longer: Draw, shorter: Draw, length: int, less: int) -> bool:
    (name, shape, bounds), (again, shape_again, bounds_again) = longer, shorter
    if name != again or name not in _BY_PLACE or len(shape) != len(shape_again):
        return False
    if bounds != bounds_again and name not in ("rand", "randn"):  # whose numbers are the shape
        return False
    return all(
        a == b or (a - b == length - less and abs(a - length) <= 1) for a, b in zip(shape, shape_again, strict=True)
    )
