"""The scale of a gradient scaler: the one at which the gradient of the first step fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import ScalerCall

if TYPE_CHECKING:
    from pytest_trainloop.recording.record import Record

HALVINGS = 26
"""Steps that a scaler may keep back before it has found its scale: 2^16 has come to 2^-10 by then."""

LEAST_SCALE = 2.0**-10
"""The last scale that is tried. One at which a later step fitted may be too large for the first: it drew otherwise."""


def fitting_scale(record: Record) -> float:
    """The scale at which the optimizer that was to step first did so; the last one tried where it never did."""
    scale, first = 1.0, None
    for call in record.of(ScalerCall):
        if call.what == "scale" and 0.0 < call.factor < math.inf:
            scale = call.factor
        if call.what == "step":
            first = call.optimizer if first is None else first
            if call.stepped and call.optimizer == first:
                return scale
    return LEAST_SCALE
