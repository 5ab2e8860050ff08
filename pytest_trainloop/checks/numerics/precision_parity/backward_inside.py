"""What it changes that a backward pass is called inside an autocast block: the same run with the block ended first.

Where a part of the forward pass is in float32 (a block with ``enabled=False``, a function of the project's own), its
products in backward are cast by the block around it. Everything else runs in the dtypes that forward chose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.checks.numerics.precision_parity.conditions import NoAutocastInBackward
from pytest_trainloop.checks.numerics.precision_parity.first_gradient import distance, finite, first_gradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.gradients.vectors import Gradient
    from pytest_trainloop.recording.record import Record

    Again = Callable[..., Record]
    """The run made once more inside given contexts, to a number of steps: one."""


def change_of_gradient(again: Again, block: str) -> float:
    """How far the first gradient lies from that with the backward passes outside of the block, in units of its size.

    ``again`` makes the run once more inside given contexts, ``block`` is "cpu:bfloat16". 0 where two equal runs already
    differ.
    """
    device = block.partition(":")[0]
    inside, repeated, outside = (
        first_gradient(again(contexts))
        for contexts in (lambda watch: (), lambda watch: (), lambda watch: (NoAutocastInBackward(device),))
    )
    if not outside or not finite(outside) or not _same_entries(inside, outside) or not _same_entries(inside, repeated):
        return 0.0
    if not finite(inside):
        return math.inf
    return 0.0 if not finite(repeated) or distance(inside, repeated) else distance(outside, inside)


def _same_entries(a: Gradient, b: Gradient) -> bool:
    return a.keys() == b.keys() and all(len(a[name]) == len(b[name]) for name in a)
