"""Random numbers that are the same for every row.

Noise, time steps and masks that a loop draws for each example make two ways of splitting a batch differ by chance.
Here each draw takes values that depend only on its kind and on its shape without the first axis, and repeats them along
that axis: every row of every micro-batch gets the same. The gradient is then one that the loop could have had, and the
same however the batch is split.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that draws random numbers, and its result, whose shape, dtype and device are kept."""

    out: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self, position: int, name: str, default: Any) -> Any:
        value = self.args[position] if len(self.args) > position else self.kwargs.get(name)
        return default if value is None or isinstance(value, torch.Generator) else value

    def normal(self) -> torch.Tensor:
        shape = self.out.shape[1:]
        return self._repeated(torch.randn(shape, generator=_generator("normal", shape), dtype=torch.float64))

    def uniform(self) -> torch.Tensor:
        """Within (0, 1): never at its ends."""
        return self._repeated(_open_uniform("uniform", self.out.shape[1:]))

    def _repeated(self, row: torch.Tensor) -> torch.Tensor:
        dtype = self.out.dtype if self.out.is_floating_point() else torch.float64
        return row.to(self.out.device, dtype).expand(self.out.shape)


def shared(name: str, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the call ``name(*args, **kwargs)`` in place of ``out``; ``out`` itself where it draws nothing."""
    if name not in _DRAWS or not isinstance(out, torch.Tensor) or out.layout is not torch.strided or not out.numel():
        return out
    call = _Call(out, args, kwargs)
    if name == "gumbel_softmax":
        return _gumbel_softmax(call)
    with torch.no_grad():
        out.copy_(_DRAWS[name](call))
    return out


def _generator(kind: str, shape: torch.Size) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{kind}{tuple(shape)}".encode()))


def _open_uniform(kind: str, shape: torch.Size) -> torch.Tensor:
    return torch.rand(shape, generator=_generator(kind, shape), dtype=torch.float64).clamp_(1e-12, 1 - 1e-12)


def _normal_from(call: _Call) -> Any:
    """``torch.normal(mean, std)``, with tensors or numbers."""
    return call.given(0, "mean", 0.0) + call.given(1, "std", 1.0) * call.normal()


def _normal_in_place(call: _Call) -> Any:
    return call.given(1, "mean", 0.0) + call.given(2, "std", 1.0) * call.normal()


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


def _bernoulli(call: _Call) -> Any:
    return call.uniform() < call.given(1, "p", call.given(0, "input", 0.5))


def _bernoulli_in_place(call: _Call) -> Any:
    return call.uniform() < call.given(1, "p", 0.5)


def _exponential(call: _Call) -> Any:
    return -torch.log(call.uniform()) / call.given(1, "lambd", 1.0)


def _multinomial(call: _Call) -> Any:
    """The first arrivals of exponential races, one for each sample where these are replaced."""
    weights = call.given(0, "input", None).detach().to(torch.float64)
    samples, replaced = call.out.shape[-1], bool(call.given(2, "replacement", False))
    races = _open_uniform("race", torch.Size((samples if replaced else 1, weights.shape[-1]))).to(call.out.device)
    arrivals = -torch.log(races) / weights.clamp_min(1e-300).unsqueeze(-2)
    if replaced:
        return arrivals.argmin(-1)
    return arrivals.squeeze(-2).topk(samples, dim=-1, largest=False).indices


def _gumbel_softmax(call: _Call) -> Any:
    """``softmax((logits + g) / tau)`` as torch computes it, with a straight-through gradient where it is ``hard``."""
    logits, tau, dim = call.given(0, "logits", None), call.given(1, "tau", 1.0), call.given(4, "dim", -1)
    gumbel = -torch.log(-torch.log(call.uniform())).to(logits.dtype)
    soft = ((logits + gumbel) / tau).softmax(dim)
    if not call.given(2, "hard", False):
        return soft
    return torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0) - soft.detach() + soft


def _identity(call: _Call) -> Any:
    return torch.arange(call.out.numel(), device=call.out.device)


_DRAWS: dict[str, Callable[[_Call], Any]] = {
    "randn": _Call.normal,
    "randn_like": _Call.normal,
    "normal": _normal_from,
    "normal_": _normal_in_place,
    "rand": _Call.uniform,
    "rand_like": _Call.uniform,
    "uniform_": _uniform_in_place,
    "randint": _integers,
    "randint_like": _integers,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "exponential_": _exponential,
    "multinomial": _multinomial,
    "gumbel_softmax": _gumbel_softmax,
    "randperm": _identity,
}


def draws(name: str) -> bool:
    """Whether a call of this name draws random numbers."""
    return name in _DRAWS
