"""How far steps move the weights of a loop, relative to their size, and whether they lead down its gradient."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.recording.samples import as_real
from pytest_trainloop.runs.hooks import hooked, on_arrival, stepped_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch

MEASURED = frozenset({0, 3, 11, 24, 49, 99, 149, 199, 249, 299})
"""Steps at which ratios are measured: a copy of the weights at each would double the time of a small loop."""


LEAST_UNDONE = 3
"""Steps that must find the weights where the first had found them before updates are said to be undone."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """By how much of their size one step moved the weight matrices of a group, all of them joined."""

    optimizer: int
    group: int
    step: int
    ratio: float


class Ratios:
    """To be used by ``contexts`` of a run; what it saw grows while it goes on.

    ``descents`` are the cosines between measured steps and the way down the gradient that arrived since the step
    before.
    """

    def __init__(self) -> None:
        self.seen: list[Ratio] = []
        self.descents: list[float] = []
        self._began: dict[int, torch.Tensor] = {}
        self._returns: list[bool] = []
        self._steps: dict[int, int] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._depth = 0

    @property
    def largest(self) -> float:
        """The largest ratio of any group at any measured step; NaN without weight matrices."""
        return max((r.ratio for r in self.seen), default=math.nan)

    @property
    def undone(self) -> bool:
        """Whether steps moved weights and each found them, bit for bit, where the first had."""
        return len(self._returns) >= LEAST_UNDONE and all(self._returns)

    @property
    def descent(self) -> float:
        """The mean cosine; NaN where no gradient or no movement was seen."""
        return sum(self.descents) / len(self.descents) if self.descents else math.nan

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1 and self._is_measured(optimizer):
                with torch.no_grad(), watch.suspended():
                    self._before = {id(p): p.detach().clone() for _, _, p in stepped_by(optimizer)}
                    self._look_whether_undone()

        def leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                with torch.no_grad(), watch.suspended():
                    self._measure(watch, optimizer)

        around = before_steps(enter), after_steps(leave)
        with hooked(*on_arrival(watch, self._arrived), *around):
            yield

    def _is_measured(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._steps.get(id(optimizer), 0) in MEASURED

    def _arrived(self, watch: Watch, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        soon = not self._steps or any(step in MEASURED for step in self._steps.values())
        if gradient is None or self._depth or not soon or gradient.layout is not torch.strided:
            return
        with torch.no_grad(), watch.suspended():
            known = self._gradients.get(id(tensor))
            self._gradients[id(tensor)] = gradient.detach().clone() if known is None else known + gradient

    def _look_whether_undone(self) -> None:
        """Compare with where the weights of this optimizer stood at its first step, once it has moved some."""
        known = [(now, self._began[key]) for key, now in self._before.items() if key in self._began]
        moved = any(r.ratio > 0 for r in self.seen)
        if known and moved:
            self._returns.append(all(torch.equal(now, first) for now, first in known))
        for key, now in self._before.items():
            self._began.setdefault(key, now)

    def _measure(self, watch: Watch, optimizer: torch.optim.Optimizer) -> None:
        step = self._steps.get(id(optimizer), 0)
        self._steps[id(optimizer)] = step + 1
        sizes: dict[int, float] = defaultdict(float)
        moves: dict[int, float] = defaultdict(float)
        down = along = size = 0.0
        for number, sign, p in stepped_by(optimizer) if self._before else ():
            before, gradient = self._before.get(id(p)), self._gradients.pop(id(p), None)
            if before is None or before.shape != p.shape:
                continue
            moved = as_real(p - before).double()
            if p.dim() > 1:
                sizes[number] += float(before.abs().double().square().sum())
                moves[number] += float(moved.square().sum())
            if gradient is not None and not p.is_complex() and gradient.shape == p.shape:
                g = sign * gradient.double()
                down -= float((g * moved).sum())
                along += float(moved.square().sum())
                size += float(g.square().sum())
        index = watch.optimizers.index(optimizer)
        self.seen += [Ratio(index, n, step, math.sqrt(moves[n] / s)) for n, s in sizes.items() if s > 0]
        if along > 0 and size > 0 and math.isfinite(down):
            self.descents.append(down / math.sqrt(along * size))
        self._before = {}
        if not self._is_measured(optimizer):
            self._gradients.clear()
