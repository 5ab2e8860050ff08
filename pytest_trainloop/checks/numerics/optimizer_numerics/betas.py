"""Betas under which steps grow where gradients vanish: the second moment decays faster than the first.

With no gradient m decays as b1^k and sqrt(v) as sqrt(b2)^k, so that the step scales as (b1 / sqrt(b2))^k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import REFUSED, Group, Snapshot, rebuilt, step
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Iterator

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")

LONG = 300
"""Steps without a gradient."""


@dataclass(frozen=True, slots=True)
class GrowingSteps:
    """Steps of one parameter group, made on copies without a gradient."""

    kind: str
    first: float
    second: float
    """The betas."""
    by: float
    """The largest step without a gradient, relative to the one step with a gradient before it."""
    after: int
    """Steps without a gradient until that one."""
    indices: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Factor on the size of the step at each step without a gradient."""
        return self.first / math.sqrt(self.second) if self.second > 0.0 else math.inf

    @property
    def breaks_theorem(self) -> bool:
        """Whether the weaker condition of Adam's own theorem is violated as well."""
        return self.first * self.ratio >= 1.0


def growing_steps(snap: Snapshot) -> Iterator[GrowingSteps]:
    """The groups of an Adam-like optimizer under whose betas steps may grow."""
    if snap.kind.__name__ not in ADAMS:
        return
    for group in snap.groups:
        given: Any = group.options.get("betas")
        if not group.members or not given or group.options.get("amsgrad"):
            continue
        first, second = float(given[0]), float(given[1])
        if first > math.sqrt(second):
            try:
                by, after = _largest_step(Snapshot(snap.kind, (group,)))
            except REFUSED as error:
                reraise_raised(error)
                continue
            yield GrowingSteps(snap.kind.__name__, first, second, by, after, tuple(m.index for m in group.members))


def _largest_step(snap: Snapshot) -> tuple[float, int]:
    """Of one step on the gradients as they are and many on gradients of zero, in float64 without weight decay: the
    largest of the latter relative to the former, and its number."""
    (group,) = snap.groups
    member = max(group.members, key=lambda m: float(m.grad.abs().max()))
    alone = Snapshot(snap.kind, (Group({**group.options, "weight_decay": 0.0}, (member,)),))
    fresh, held = rebuilt(alone, wide=True)
    p = held[member.index]
    sizes: list[float] = []
    for _ in range(LONG + 1):
        before = p.detach().clone()
        step(fresh)
        sizes.append(float((p.detach() - before).abs().max()))
        p.grad = torch.zeros_like(p)
    first, rest = sizes[0], sizes[1:]
    after = max(range(LONG), key=lambda k: rest[k])
    return (rest[after] / first if first > 0.0 and math.isfinite(first) else 0.0), after + 1
