"""Decay rates under which steps grow where gradients vanish: the second moment is forgotten before the first.

With no gradient m decays as b1^k and sqrt(v) as sqrt(b2)^k, so that the step goes as (b1 / sqrt(b2))^k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.optimizers.replay import REFUSED, Group, Snapshot, rebuilt, step

if TYPE_CHECKING:
    from collections.abc import Iterator

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam")

LONG = 300
"""Steps without a gradient."""


@dataclass(frozen=True, slots=True)
class Growing:
    """Betas of a group; ``by`` is the largest step without a gradient, against the one step with it that came before,
    and ``after`` at how many such steps it is made."""

    kind: str
    first: float
    second: float
    by: float
    after: int
    indices: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Factor on the step by each step without a gradient."""
        return self.first / math.sqrt(self.second) if self.second > 0.0 else math.inf

    @property
    def for_sure(self) -> bool:
        """Whether the weaker condition of Adam's own theorem is broken as well."""
        return self.first * self.ratio >= 1.0


def growing(snap: Snapshot) -> Iterator[Growing]:
    """The groups of an optimizer of Adam's kind under whose betas steps grow."""
    if snap.kind.__name__ not in ADAMS:
        return
    for group in snap.groups:
        given: Any = group.options.get("betas")
        if not group.members or not given or group.options.get("amsgrad"):
            continue
        first, second = float(given[0]), float(given[1])
        if first > math.sqrt(second):
            try:
                by, after = _grown(Snapshot(snap.kind, (group,)))
            except REFUSED:
                continue
            yield Growing(snap.kind.__name__, first, second, by, after, tuple(m.index for m in group.members))


def _grown(snap: Snapshot) -> tuple[float, int]:
    """One step on the gradients as they are, then many on gradients of zero, in float64 and without decay."""
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
