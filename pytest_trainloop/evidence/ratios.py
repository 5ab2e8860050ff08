"""How far a step moves each weight matrix, relative to its size (RULINGS R7)."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_trainloop.evidence.hooked import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.observe.watch import Watch

MEASURED = frozenset({0, 3, 11, 24, 49, 99, 149, 199, 249, 299})
"""Steps at which ratios are measured: a copy of the weights at each would double the time of a small loop."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """By how much of its root mean square one step moved a weight matrix: of which optimizer and group, at which of
    its steps."""

    name: str
    optimizer: int
    group: int
    step: int
    ratio: float


class Ratios:
    """To be used by ``contexts`` of a run; ``seen`` grows while it goes on."""

    def __init__(self) -> None:
        self.seen: list[Ratio] = []
        self._steps: dict[int, int] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._depth = 0

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1 and self._steps.get(id(optimizer), 0) in MEASURED:
                with torch.no_grad(), watch.quietly():
                    self._before = {id(p): p.detach().clone() for _, p in _matrices(optimizer)}

        def leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                with torch.no_grad(), watch.quietly():
                    self._measure(watch, optimizer)

        with hooked(register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)):
            yield

    def _measure(self, watch: Watch, optimizer: torch.optim.Optimizer) -> None:
        step = self._steps.get(id(optimizer), 0)
        self._steps[id(optimizer)] = step + 1
        for group, p in _matrices(optimizer) if self._before else ():
            before = self._before.get(id(p))
            index = watch.book.index(p)
            if before is None or before.shape != p.shape or index is None:
                continue
            size = float(torch.linalg.vector_norm(before.abs().double()))
            if size > 0:
                ratio = float(torch.linalg.vector_norm((p - before).abs().double())) / size
                number = watch.optimizers.index(optimizer)
                self.seen.append(Ratio(watch.book.entries[index].name, number, group, step, ratio))
        self._before = {}


def typical(ratios: Iterable[Ratio]) -> float:
    """The median over the weight matrices of each one's largest ratio; NaN without any."""
    largest: dict[str, float] = {}
    for r in ratios:
        largest[r.name] = max(largest.get(r.name, 0.0), r.ratio)
    return statistics.median(largest.values()) if largest else float("nan")


def _matrices(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if isinstance(p, torch.Tensor) and not torch.nn.parameter.is_lazy(p) and p.requires_grad and p.dim() > 1:
                yield number, p
