"""Whether two courses of one loop, made in the same way, are the same. Nothing is said of why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.baselines.trajectory import Course, Digest, Step

ROUNDED = {"float64": 1e-6, "own": 1e-3}
"""Relative differences, by precision, that kernels which sum in another order each time may make over all steps:
another random draw makes larger ones."""


def first_difference(a: Course, b: Course, *, rounded: float = 0.0) -> str:
    """What differs first between two courses by more than this relative difference, in words; empty where nothing
    does."""
    same = _Same(rounded)
    return next((what for kind in (_starts, _batches, _steps) for what in kind(a, b, same)), "")


@dataclass(frozen=True, slots=True)
class _Same:
    rounded: float

    def number(self, x: float, y: float, size: float = 0.0) -> bool:
        """Whether two numbers agree; ``size`` is what their rounding errors come from, where that is larger."""
        if x == y or (math.isnan(x) and math.isnan(y)):
            return True
        return abs(x - y) <= self.rounded * max(abs(x), abs(y), size)

    def digest(self, x: Digest, y: Digest) -> bool:
        return self.number(x.norm, y.norm) and self.number(x.ordered or 0.0, y.ordered or 0.0, x.norm)


def _starts(a: Course, b: Course, same: _Same) -> Iterator[str]:
    for name, tensor in a.tensors.items():
        if name not in b.tensors or not same.digest(tensor.start, b.tensors[name].start):
            yield f"the initial {name}"


def _batches(a: Course, b: Course, same: _Same) -> Iterator[str]:
    for number, (ours, theirs) in enumerate(zip(a.batches, b.batches, strict=False), 1):
        if [(leaf.path, leaf.shape) for leaf in ours] != [(leaf.path, leaf.shape) for leaf in theirs]:
            yield f"the shapes of batch {number}"
            return
        for x, y in zip(ours, theirs, strict=True):
            if not same.digest(x.values, y.values):
                yield f"{x.path} of batch {number}"


def _steps(a: Course, b: Course, same: _Same) -> Iterator[str]:
    for ours, theirs in zip(a.steps, b.steps, strict=False):
        yield from _of_step(ours, theirs, same)
    if len(a.steps) != len(b.steps):
        yield f"{len(a.steps)} optimizer steps, then {len(b.steps)}"


def _of_step(a: Step, b: Step, same: _Same) -> Iterator[str]:
    for what, ours, theirs in (("loss", a.losses, b.losses), ("learning rate", a.rates, b.rates)):
        for x, y in zip(ours, theirs, strict=False):
            if not same.number(x, y):
                yield f"the {what} of step {a.number} ({x:.9g}, then {y:.9g})"
    largest = max((digest.norm for digest in a.gradients.values()), default=0.0)
    for name in a.gradients.keys() & b.gradients.keys():
        if not same.number(a.gradients[name].norm, b.gradients[name].norm, largest):
            yield f"the gradient of {name} at step {a.number}"
