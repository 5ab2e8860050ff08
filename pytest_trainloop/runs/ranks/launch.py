"""Run a function in several processes of torch.distributed."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_trainloop.core.errors import BrokenRun, CannotDecide, OwnMistake, TimeRanOut, Unreliable
from pytest_trainloop.recording.source import layer, place_of
from pytest_trainloop.recording.torch_internals import load_for_wrappers
from pytest_trainloop.runs.ranks.children import Children
from pytest_trainloop.runs.ranks.facts import LOST, Collective, Hang, Launch, Rank
from pytest_trainloop.runs.ranks.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.recording.events import Place


UNDECIDED = (CannotDecide, TimeRanOut, BrokenRun, OwnMistake, Unreliable)
"""What a check raises that cannot decide, in a rank as in one process."""

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in ')


def launch(work: Callable[[int], Any], ranks: int, *, timeout: float) -> Launch:
    """What ``work(rank)`` gave and did in each of ``ranks`` processes, which are one process group of gloo.

    ``work`` may be any function: the processes are forks of this one, with one thread each. Where an accelerator is at
    hand they are spawned, and ``work`` is pickled: torch lets no fork compute gradients once its engine knows of one.
    What it returns is pickled in any case.

    A rank that waits for another which never comes is ended at once: ``Launch.hang``. What ``work`` raises is in
    ``Rank.raised``, but ``CannotDecide`` and its like, which are raised here too. Raises ``CannotDecide`` where no such
    processes can be started or the value cannot be sent, and ``TimeRanOut`` after ``timeout`` seconds. No process and
    no file is left behind.
    """
    fork = _can_fork()
    if fork:
        load_for_wrappers()
    with Children(work, ranks, timeout, fork=fork) as children:
        reports = _Reports(children, ranks)
        try:
            hang = reports.listen(time.monotonic() + timeout)
        except TimeoutError:
            stacks = list(map(_users_part, children.stacks()))
            for rank, stack in enumerate(stacks):
                sys.stderr.write(f"rank {rank} after {timeout:g} s:\n{stack}\n{children.output(rank)}\n")
            at = ", ".join(
                f"rank {rank} has ended"
                if rank in reports.gone
                else f"rank {rank} at {_users_line(stack) or 'no line of yours'}"
                for rank, stack in enumerate(stacks)
            )
            raise TimeRanOut(min(reports.steps), timeout, f" of {ranks} ranks ({at})") from None
        launched = Launch(tuple(map(reports.rank, range(ranks))), hang, tuple(sorted(reports.waited)))
    for one in launched:
        if isinstance(one.error, UNDECIDED) and one.number not in launched.waiting:
            raise one.error
    return launched


def _can_fork() -> bool:
    """Whether the processes are forked, else spawned. Raises ``CannotDecide`` where neither can be."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise CannotDecide("this torch is built without torch.distributed's gloo, which several ranks need")
    if not hasattr(os, "fork"):
        raise CannotDecide(f"several ranks are processes forked from this one, which {sys.platform} does not have")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise CannotDecide(
            f"the process that runs pytest is one of {dist.get_world_size()} of a process group of torch.distributed, "
            "and the ranks need one of their own: run pytest without torchrun"
        )
    return not torch.accelerator.is_available()


class _Reports:
    """What the ranks have reported so far."""

    def __init__(self, children: Children, ranks: int) -> None:
        self._children = children
        self._waiting = Waiting(ranks)
        self._collectives: list[list[Collective]] = [[] for _ in range(ranks)]
        self._written: list[dict[str, Place]] = [{} for _ in range(ranks)]
        self.gone: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._lost: Hang | None = None
        """The first call that somebody has begun, and another that is gone has not."""
        self.steps = [0] * ranks
        self.waited: set[int] = set()

    def listen(self, deadline: float) -> Hang | None:
        """Until all ranks have ended, or some of them wait for ever. Raises ``TimeoutError``."""
        for rank, what, value in self._children.messages(deadline):
            hang = None
            if what == "collective":
                channel, members, call = value
                self._collectives[rank].append(call)
                self._waiting.entered(rank, channel, members, call)
                hang = self._waiting.different(rank, channel, call)
            else:
                self._waiting.went_on(rank)
            if what == "step":
                self.steps[rank] = value
            elif what == "wrote":
                self._written[rank].update([value])
            elif what in ("end", "gone"):
                self._over(rank, what, value)
            hang = hang or self._waiting.stuck()
            if hang is not None:
                self.waited |= set(range(len(self.steps))) - self.gone.keys()
                return self._lost or hang
            if self.gone and (doomed := self._waiting.doomed()) is not None:
                # those who are through leave: another has begun a call that they have not, and if it waits for them,
                # gloo raises in it
                self._lost = self._lost or doomed
                for one in self.gone:
                    self._children.let_go(one)
        for rank, how in self.gone.items():  # a process that died may be heard of after those who lost it
            if how == "raised" and rank not in self.waited and self._has_lost(rank):
                self._waits(rank)
        return self._lost if self.waited else None

    def _over(self, rank: int, what: str, value: str) -> None:
        """A rank has come to its end: "left" or "raised" as it says, or its process has."""
        if what == "gone":
            self._ended[rank] = value
        self.gone[rank] = how = "ended" if what == "gone" else value
        if how == "left" or (how == "raised" and self._has_lost(rank)):
            self._waits(rank)
        self._waiting.gone(rank, how)

    def _waits(self, rank: int) -> None:
        lost = self._waiting.lost(rank)
        if lost is not None:
            self._lost = self._lost or lost
            self.waited.add(rank)

    def _has_lost(self, rank: int) -> bool:
        """Whether what a rank raised comes from a process that is gone."""
        raised = (self._children.result(rank) or {}).get("raised")
        return raised is not None and LOST in raised.traceback + raised.message

    def rank(self, rank: int) -> Rank:
        """What a rank has done. Raises ``CannotDecide`` where its value cannot be sent."""
        result = self._children.result(rank) or {}
        if "unsent" in result:
            raise CannotDecide(f"what rank {rank} gives back cannot be sent to this process: {result['unsent']}")
        return Rank(
            rank,
            value=result.get("value"),
            raised=result.get("raised"),
            error=_made_again(*result["error"]) if result.get("error") else None,
            ended=self._ended.get(rank, "" if result else "ended while it waited for others"),
            collectives=tuple(self._collectives[rank]),
            steps=self.steps[rank],
            written=self._written[rank],
            output=self._children.output(rank),
        )


def _made_again(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An exception of this package from its parts: what it is made with is not what it keeps."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _users_part(text: str) -> str:
    """Stacks of faulthandler with the innermost frame outside this package and torch, and below it those of the
    project; nothing of what lies above the launched function."""
    kept: list[str] = []
    above = inner = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            above = inner = False
            kept.append(line)
            continue
        above = above or frame["file"].replace("\\", "/").endswith("ranks/child.py")
        shown = layer(frame["file"]) == 2 or (layer(frame["file"]) == 1 and not inner)
        if shown and not above:
            inner = True
            kept.append(line)
    return "\n".join(kept).strip()


def _users_line(text: str) -> str:
    """The project's innermost line in such stacks, as "train.py:57", that of the main thread where it is known; empty
    where there is none."""
    current = text.rpartition("Current thread")[2]
    frames = (frame for part in (current, text) for frame in _FRAME.finditer(part) if layer(frame["file"]) == 2)
    for frame in frames:
        place = place_of(frame["file"], int(frame["line"]))
        return f"{place.file}:{place.line}"
    return ""
