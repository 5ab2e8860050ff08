"""The error that a dtype's rounding explains: a float64 run in which inputs and outputs of products are rounded to the
dtype's significand.

The range stays that of float64: an overflow or underflow is never predicted. Rounding to nearest is what the hardware
does; a second run adds random errors of the same size, in case the numbers happen to be representable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.numerics.precision_parity.replay import name_of
from pytest_trainloop.recording.function_mode import OperationMode
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.torch_internals import no_dispatch_modes, tree_map
from pytest_trainloop.recording.torch_names import ATEN_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Sequence


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest, half the distance from 1 to the next number: 2^-8 in
    bfloat16, 2^-11 in float16 (Higham, Accuracy and Stability of Numerical Algorithms, 2.2)."""
    return torch.finfo(dtype).eps / 2


class Rounded(OperationMode):  # type: ignore[no-untyped-call]
    """Rounds products in float64, or disturbs them by as much under the seed ``noise``.

    ``low`` lists the products of the low-precision run and whether each was made in low precision: those that were not
    are left alone, as far as the order of products agrees.
    """

    changes = True

    def __init__(self, dtype: torch.dtype, low: Sequence[tuple[str, bool]], *, noise: int | None = None) -> None:
        super().__init__()
        self._unit = unit_roundoff(dtype)
        self._low = low
        self._number = 0
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if name not in ATEN_PRODUCTS or not self._lowered(name):
            return passed_on(func, args, kwargs)
        with no_dispatch_modes():  # its random numbers are not the loop's
            lowered = tree_map(self._rounded, args)
        out = passed_on(func, lowered, kwargs)
        with no_dispatch_modes():
            return tree_map(self._rounded, out)

    def _lowered(self, name: str) -> bool:
        number = self._number
        self._number += 1
        known = number < len(self._low) and self._low[number][0] == name
        return self._low[number][1] if known else True

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        if self._noise is not None:
            draw = torch.rand(value.shape, generator=self._noise, dtype=torch.float64).to(value.device)
            return value * (1.0 + self._unit * (2.0 * draw - 1.0))
        significand, exponent = torch.frexp(value)
        return torch.round(significand / self._unit) * self._unit * torch.exp2(exponent.to(torch.float64))
