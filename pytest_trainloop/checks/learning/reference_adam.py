"""Runs in which every optimizer step does something else: nothing, or a step of plain Adam.

The loop runs as it is, its optimizer included; after each outermost step the weights that it holds are put back and
moved by us instead, along the gradient that arrived in its backward passes. What the loop does to gradients, rates and
weights has no say any more: what is left is its model, its data and its loss.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pytest_trainloop.checks.learning.loss_curve import PHASES
from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.runs.hooks import hooked, on_arrival, stepped_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""Adam's own (Kingma and Ba 2015)."""


class Move(Protocol):
    def __call__(self, weight: torch.Tensor, gradient: torch.Tensor, /) -> None: ...


def stay(_weight: torch.Tensor, _gradient: torch.Tensor) -> None:
    """No weight moves."""


class Adam:
    """Plain Adam at one rate, in float32 or better whatever the weights are kept in."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[int, int] = {}

    def __call__(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        g = gradient.to(wide)
        if id(weight) not in self._kept:
            exact = weight.detach().to(wide, copy=True)
            self._kept[id(weight)] = exact, torch.zeros_like(g), torch.zeros_like(g.abs())
        exact, first, second = self._kept[id(weight)]
        t = self._steps[id(weight)] = self._steps.get(id(weight), 0) + 1
        first.lerp_(g, 1 - BETA1)
        second.lerp_(g.abs().square(), 1 - BETA2)
        exact.sub_(self._lr * (first / (1 - BETA1**t)) / ((second / (1 - BETA2**t)).sqrt() + EPS))
        weight.copy_(exact)


class ReferenceSteps:
    """To be used by ``contexts`` of a run. ``kind`` is the door of autograd whose gradients count.

    ``work`` becomes, for each fourth step, what the loss should have changed by since the first if it is a function of
    the weights with these gradients: the integral of gradient times displacement, by the trapezoid rule. ``reached``
    tells that some gradient arrived at what is stepped.
    """

    def __init__(self, move: Move, kind: str) -> None:
        self._move = move
        self._kind = kind
        self._gradients: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._earlier: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._done: dict[int, int] = {}
        self._depth = 0
        self._answered: object = None
        self._sum = 0.0
        self.work: dict[int, float] = {}
        self.reached = False

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
        def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                self._answered = None
                with torch.no_grad(), watch.suspended():
                    self._before = {id(p): p.detach().clone() for _, _, p in stepped_by(optimizer)}

        def leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                with torch.no_grad(), watch.suspended():
                    self._in_its_place(optimizer)

        around = before_steps(enter), after_steps(leave)
        with hooked(*on_arrival(watch, self._arrived), *around):
            yield

    def _arrived(self, watch: Watch, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        event = watch.backward
        if gradient is None or (event is not None and event.kind != self._kind):
            return
        if self._depth:  # a closure may be called several times: its first answer counts
            if self._answered is None:
                self._answered = event
            if event is not self._answered:
                return
        with torch.no_grad(), watch.suspended():
            known = self._gradients.get(id(tensor))
            dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach().clone()
            self._gradients[id(tensor)] = dense if known is None else known + dense

    def _in_its_place(self, optimizer: torch.optim.Optimizer) -> None:
        done = self._done[id(optimizer)] = self._done.get(id(optimizer), 0) + 1
        for _, sign, p in stepped_by(optimizer):
            before = self._before.get(id(p))
            if before is None or before.shape != p.shape:
                continue
            p.copy_(before)
            gradient = self._gradients.pop(id(p), None)
            if gradient is None or gradient.shape != p.shape:
                continue
            gradient = sign * gradient
            self.reached = True
            if done % PHASES == 1:
                self._add_work(p, before, gradient)
            self._move(p, gradient)
        if done % PHASES == 1:
            self.work[done - 1] = self._sum

    def _add_work(self, p: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        earlier = self._earlier.get(id(p))
        if earlier is not None:
            moved, mean = (weight - earlier[0]).double().flatten(), ((gradient + earlier[1]) / 2).double().flatten()
            self._sum += float(moved @ mean)
        self._earlier[id(p)] = (weight, gradient)
