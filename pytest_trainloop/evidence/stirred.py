"""A run in which whatever can move does: some parameters start elsewhere, and every rate is far higher.

A weight that rests at the bound of a projection moves from another start; one whose steps are rounded away, or kept
elsewhere until they are large enough, moves at a higher rate.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_trainloop.evidence.dependence import mover
from pytest_trainloop.evidence.hooked import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pytest_trainloop.observe.watch import Watch

RAISED = 1e4
"""Factor on the rates: more than the 256 steps of half a spacing that bfloat16 can swallow."""


def displaced(names: Sequence[str]) -> Callable[[Watch], None]:
    """Moves the named parameters by half their root mean square, and lets them count as begun from there."""
    move = mover(names, jitter=False)

    def prepare(watch: Watch) -> None:
        move(watch)
        watch.book.begin_anew()

    return prepare


def raised_rates(_watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
    return (_raised(),)


@contextlib.contextmanager
def _raised() -> Iterator[None]:
    inside: dict[int, list[Any]] = {}

    def enter(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in inside:  # a step that calls the step of the class above
            inside[id(optimizer)].append(None)
            return
        kept = [group.get("lr") for group in optimizer.param_groups]
        inside[id(optimizer)] = [kept]
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float | int | torch.Tensor):
                group["lr"] = group["lr"] * RAISED

    def leave(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        kept = inside[id(optimizer)].pop()
        if kept is None:
            return
        del inside[id(optimizer)]
        for group, rate in zip(optimizer.param_groups, kept, strict=False):
            if rate is not None:
                group["lr"] = rate

    with hooked(register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)):
        yield
