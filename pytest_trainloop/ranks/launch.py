"""Run a function in several processes of torch.distributed."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.errors import CannotDecide, TimeRanOut
from pytest_trainloop.ranks.children import Children
from pytest_trainloop.ranks.facts import Collective, Hang, Launch, Rank
from pytest_trainloop.ranks.stacks import users_part
from pytest_trainloop.ranks.waiting import Waiting
from pytest_trainloop.recording.torch_internals import load_for_wrappers

if TYPE_CHECKING:
    from collections.abc import Callable


LOST = "gloo/transport"
"""What gloo's exceptions name where another process has gone."""


class RanksRanOut(TimeRanOut):
    """The ranks took longer than they may. ``stacks`` has for each what it was at, as text."""

    def __init__(self, steps: int, seconds: float, stacks: tuple[str, ...]) -> None:
        super().__init__(steps, seconds, where=f" of {len(stacks)} ranks")
        self.stacks = stacks


def launch(work: Callable[[int], Any], ranks: int, *, timeout: float) -> Launch:
    """What ``work(rank)`` gave and did in each of ``ranks`` processes, which are one process group of gloo.

    ``work`` may be any function: the processes are forks of this one, with one thread each. Where an accelerator is at
    hand they are spawned, and ``work`` is pickled: torch lets no fork compute gradients once its engine knows of one.
    What it returns is pickled in any case.

    A rank that waits for another which never comes is ended at once: ``Launch.hang``. What ``work`` raises is in
    ``Rank.raised``. Raises ``CannotDecide`` where no such processes can be started or the value cannot be sent, and
    ``RanksRanOut`` after ``timeout`` seconds. No process and no file is left behind.
    """
    fork = _can_fork()
    if fork:
        load_for_wrappers()
    with Children(work, ranks, timeout, fork=fork) as children:
        told = _Told(ranks)
        try:
            hang = _listen(children, told, time.monotonic() + timeout)
        except TimeoutError:
            stacks = tuple(map(users_part, children.stacks()))
            for rank, stack in enumerate(stacks):
                sys.stderr.write(f"rank {rank} after {timeout:g} s:\n{stack}\n{children.output(rank)}\n")
            raise RanksRanOut(min(told.steps.values()), timeout, stacks) from None
        return Launch(tuple(_rank(children, told, rank) for rank in range(ranks)), hang, tuple(sorted(told.waited)))


def _can_fork() -> bool:
    """Whether the processes are forked, else spawned. Raises ``CannotDecide`` where neither can be."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise CannotDecide("this torch is built without torch.distributed's gloo, which several ranks need")
    if not hasattr(os, "fork"):
        raise CannotDecide(f"several ranks are processes forked from this one, which {sys.platform} does not have")
    if dist.is_initialized():
        raise CannotDecide(
            "a process group of torch.distributed is initialised in the process that runs pytest, and the ranks need "
            "one of their own: run pytest without torchrun, or call destroy_process_group() before"
        )
    return not torch.accelerator.is_available()


class _Told:
    """What the ranks told so far."""

    def __init__(self, ranks: int) -> None:
        self.collectives: dict[int, list[Collective]] = {rank: [] for rank in range(ranks)}
        self.steps: dict[int, int] = dict.fromkeys(range(ranks), 0)
        self.groups: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
        self.gone: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.waited: set[int] = set()


def _listen(children: Children, told: _Told, deadline: float) -> Hang | None:
    """Until all ranks have ended, or some of them wait for ever."""
    waiting = Waiting(len(told.steps))
    doomed: Hang | None = None
    for rank, what, value in children.messages(deadline):
        if what == "collective":
            channel, members, call = value
            told.collectives[rank].append(call)
            if channel == call.group:
                told.groups[rank][call.group] = members
            waiting.entered(rank, channel, members, call)
            hang = waiting.different(rank, channel, call)
        else:
            hang = None
            waiting.went_on(rank)
        if what == "step":
            told.steps[rank] = value
            continue
        if what == "end" or what == "gone":
            if what == "gone":
                told.ended[rank] = value
            how = "ended" if what == "gone" else value
            if how == "raised" and (lost := waiting.lost(rank)) is not None:
                doomed = doomed or lost
                told.waited.add(rank)
            told.gone[rank] = how
            waiting.gone(rank, how)
        hang = hang or waiting.stuck()
        if hang is not None:
            told.waited |= set(told.steps) - told.gone.keys()
            return doomed or hang
        if told.gone and (found := waiting.doomed()) is not None:
            doomed = doomed or found
            for gone in told.gone:
                children.let_go(gone)
    for rank, how in told.gone.items():  # a process that died may be heard of after those who lost it
        raised = (children.result(rank) or {}).get("raised")
        if how == "raised" and raised is not None and LOST in raised.message and (lost := waiting.lost(rank)):
            doomed = doomed or lost
            told.waited.add(rank)
    return doomed if told.waited else None


def _rank(children: Children, told: _Told, rank: int) -> Rank:
    result = children.result(rank) or {}
    if "unsent" in result:
        raise CannotDecide(f"what a rank gives back cannot be sent to this process: {result['unsent']}")
    return Rank(
        rank,
        value=result.get("value"),
        raised=result.get("raised"),
        ended=told.ended.get(rank, "" if result else "ended while it waited for others"),
        collectives=tuple(told.collectives[rank]),
        steps=told.steps[rank],
        groups=told.groups[rank],
        warnings=tuple(result.get("warnings", ())),
        output=children.output(rank),
    )
