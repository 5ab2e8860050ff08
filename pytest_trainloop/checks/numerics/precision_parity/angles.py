"""Angles of positions and timesteps that low precision moves by half a radian or more.

Products that autocast makes of positions and frequencies are rounded like any product, so that the error that rounding
explains covers them. But these numbers come from no weight and are not scaled by one: at half a radian two neighbouring
positions, one radian apart at the first frequency, may have the same angle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.tracing.mode import WatchingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.checks.numerics.precision_parity.runs import LowPrecisionRuns
    from pytest_trainloop.recording.events import Place

FUNCTIONS = frozenset({"sin", "cos", "sin_", "cos_"})

MOST = 64
"""Calls that are kept."""

ENTRIES = 4096

HALF_RADIAN = 0.5

PERIODS = 64.0
"""Size of an angle, in radians, from which bfloat16 (8 bits) can move it by an eighth of a radian or more."""


@dataclass(frozen=True, slots=True)
class Angles:
    """The argument of one call of sin or cos that has no history."""

    name: str
    place: Place
    module: str
    values: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LostAngles:
    """Angles that are moved by half a radian or more."""

    angles: Angles
    largest: float
    """Largest error, in radians."""
    share: float
    """Of the entries, those with such an error."""
    at: float
    """What the angle with the largest error is in float64."""


class _AngleLog(WatchingMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Angles] = []

    def active(self) -> bool:
        """Until the first step."""
        return super().active() and not self.watch.record.begun and len(self.found) < MOST

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in FUNCTIONS:
            with self.watch.suspended(), torch.no_grad():
                for given in tensors_in(args[:1]):
                    if given.is_floating_point() and not given.requires_grad and given.numel() and readable(given):
                        flat = given.detach().reshape(-1)
                        values = flat[:: max(1, flat.numel() // ENTRIES)].double().clone()
                        if float(values.abs().max()) >= PERIODS:
                            self.found.append(Angles(name, here()[0], self.watch.module_path(), values, given.dtype))
        return passed_on(func, args, kwargs)


def lost_angles(runs: LowPrecisionRuns) -> LostAngles | None:
    """Of the calls that both runs make with large angles, the one with the largest error."""
    low = _AngleLog()
    runs.again(low.contexts)
    if not low.found:
        return None
    reference = _AngleLog()
    runs.reference_inside(reference.contexts)
    known = _numbered(reference.found)
    found = []
    for key, angles in _numbered(low.found).items():
        right = known.get(key)
        if right is None or right.values.shape != angles.values.shape:
            continue
        error = (angles.values - right.values).abs()
        if float(error.max()) >= HALF_RADIAN:
            share = float((error >= HALF_RADIAN).double().mean())
            found.append(LostAngles(angles, float(error.max()), share, float(right.values[int(error.argmax())])))
    return max(found, key=lambda lost: lost.largest, default=None)


def _numbered(found: list[Angles]) -> dict[tuple[str, Place, int], Angles]:
    numbered: dict[tuple[str, Place, int], Angles] = {}
    for angles in found:
        number = sum(key[:2] == (angles.name, angles.place) for key in numbered)
        numbered[angles.name, angles.place, number] = angles
    return numbered
