"""Runs whose optimizers step with other options: another learning rate, no weight decay, the usual eps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.recording.hooks import after_steps, before_steps
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_trainloop.recording.watch import Watch


USUAL_EPS = 1e-8
"""The default of torch's Adam (Kingma & Ba, section 2)."""

LARGE_EPS = 1e-3
"""The largest eps in common use except 1.0, with which Inception was trained."""


def lr_times(factor: float) -> Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]:
    """Every learning rate times this factor, inside the steps only: the loop reads and writes its own."""
    return lambda _watch: (_with_lrs(lambda _key, lr: lr * factor),)


def lr_held_at_peak() -> Callable[[Watch], Iterable[contextlib.AbstractContextManager[Any]]]:
    """Every learning rate as high as it has been so far, inside the steps only."""
    peaks: dict[Any, float] = {}

    def highest(key: Any, lr: Any) -> Any:
        peaks[key] = max(peaks.get(key, 0.0), float(lr))
        return peaks[key] if isinstance(lr, float | int) else torch.full_like(lr, peaks[key])

    return lambda _watch: (_with_lrs(highest),)


def without_weight_decay(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    """No weight decay in any group, from its first step on: weights that only decay stay as they are."""
    return (_with_option("weight_decay", lambda decay: 0.0 if decay else decay),)


def with_usual_eps(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    """The usual eps in place of a large one: Adam and its variants then divide by the gradient's own size."""
    return (_with_option("eps", lambda eps: USUAL_EPS if isinstance(eps, float) and eps > LARGE_EPS else eps),)


@contextlib.contextmanager
def _with_option(name: str, changed: Callable[[Any], Any]) -> Iterator[None]:
    def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if name in group:
                group[name] = changed(group[name])

    with hooked(before_steps(enter)):
        yield


@contextlib.contextmanager
def _with_lrs(changed: Callable[[Any, Any], Any]) -> Iterator[None]:
    inside: dict[int, list[Any]] = {}

    def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in inside:  # a step that calls the step of the class above
            inside[id(optimizer)].append(None)
            return
        inside[id(optimizer)] = [[group.get("lr") for group in optimizer.param_groups]]
        for number, group in enumerate(optimizer.param_groups):
            if isinstance(group.get("lr"), float | int | torch.Tensor):
                group["lr"] = changed((id(optimizer), number), group["lr"])

    def leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        kept = inside[id(optimizer)].pop()
        if kept is None:
            return
        del inside[id(optimizer)]
        for group, lr in zip(optimizer.param_groups, kept, strict=False):
            if lr is not None:
                group["lr"] = lr

    with hooked(before_steps(enter), after_steps(leave)):
        yield
