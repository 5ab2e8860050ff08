"""Which rank waits in a collective that can never complete, decided without a clock.

A rank whose work has ended enters no collective any more. So a collective of a group that it belongs to, and that it
has not entered, never completes. The same holds where all ranks wait in collectives that only the others could
complete, and where two ranks make different calls as the n-th of one group. What was read from the ranks may be behind
what they did, and the conclusion holds: none of the calls that are missed can happen before another of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_trainloop.runs.ranks.facts import Hang, Other

if TYPE_CHECKING:
    from pytest_trainloop.runs.ranks.facts import Collective

FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")


class Waiting:
    """What the ranks of one launch have called so far."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._calls: dict[str, dict[int, list[Collective]]] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._at: dict[int, tuple[str, Collective] | None] = dict.fromkeys(self._ranks)
        self._last: dict[int, Collective | None] = dict.fromkeys(self._ranks)
        self._gone: dict[int, str] = {}
        self._from_anybody: set[int] = set()
        """The ranks that receive from whoever sends first."""

    def entered(self, rank: int, channel: str, members: tuple[int, ...], call: Collective) -> None:
        """A rank calls a group. ``channel`` is the group, or a sender and a receiver in it, that ``members`` are."""
        self._members.setdefault(channel, members)
        if not members:
            self._from_anybody.add(rank)
        self._calls.setdefault(channel, {}).setdefault(rank, []).append(call)
        self._at[rank] = channel, call
        self._last[rank] = call

    def went_on(self, rank: int) -> None:
        """A rank has done something else since its last call."""
        self._at[rank] = None

    def gone(self, rank: int, how: str) -> None:
        """A rank makes no call any more: it "left", "raised" or "ended"."""
        self._gone.setdefault(rank, how)

    def different(self, rank: int, channel: str, call: Collective) -> Hang | None:
        """Another rank that makes a different call as the n-th of this group."""
        for other, calls in sorted(self._calls[channel].items()):
            if other == rank or ">" in channel or len(calls) <= call.number:
                continue
            theirs = calls[call.number]
            if not (same_call(call, theirs) and self._fit(channel, {rank: call, other: theirs})):
                (first, own), (second, its) = sorted([(rank, call), (other, theirs)], key=lambda pair: pair[0])
                return Hang(first, own, (Other(second, "waited", its),), different=True)
        return None

    def _fit(self, channel: str, calls: dict[int, Collective]) -> bool:
        """Whether lists of tensors that get one from each rank have room for just what the ranks give. They may be
        uneven where the sizes are known: nccl takes that, and gloo does not (github.com/pytorch/pytorch/issues/156627).
        """
        members = self._members[channel]
        return all(
            len(mine.takes) != len(members) or mine.takes[members.index(other)] == _entries(theirs)
            for mine in calls.values()
            for other, theirs in calls.items()
        )

    def stuck(self) -> Hang | None:
        """A rank that waits in a call which the ranks that are gone or wait themselves never enter."""
        blocked = set(self._ranks)
        while True:
            free = {rank for rank in blocked if rank not in self._gone and not self._blocked(rank, blocked)}
            if not free:
                break
            blocked -= free
        waits = ((rank, self._at[rank]) for rank in sorted(blocked - self._gone.keys()))
        return next((self._hang(rank, *at) for rank, at in waits if at is not None), None)

    def doomed(self) -> Hang | None:
        """A call that a rank has begun, and another that is gone has not. Who waits for it waits for ever; the call
        itself may have come back."""
        found = (self.lost(rank) for rank in self._ranks if rank not in self._gone)
        return next((hang for hang in found if hang is not None), None)

    def lost(self, rank: int) -> Hang | None:
        """The first call of a rank that another which is gone has not made."""
        for channel, by_rank in self._calls.items():
            for call in by_rank.get(rank, ()):
                if any(other in self._gone for other in self._missing(rank, channel, call)):
                    return self._hang(rank, channel, call)
        return None

    def _blocked(self, rank: int, blocked: set[int]) -> bool:
        at = self._at[rank]
        return at is not None and at[1].waits and bool(set(self._missing(rank, *at)) & blocked)

    def _missing(self, rank: int, channel: str, call: Collective) -> list[int]:
        """The ranks that this one needs in the call, and that have not entered it."""
        members = self._members[channel]
        if rank not in members:
            return []
        own = members.index(rank)
        needed = members
        if call.root is not None and call.kind in FROM_ROOT + TO_ROOT:
            gives = (call.kind in FROM_ROOT) == (own == call.root)
            needed = () if gives else members if own == call.root else (members[call.root],)  # giving is not waiting
        if call.kind == "send":
            needed = tuple(r for r in needed if r not in self._from_anybody)
        return [r for r in needed if r != rank and len(self._calls[channel].get(r, ())) <= call.number]

    def _hang(self, rank: int, channel: str, call: Collective) -> Hang:
        others = [
            Other(other, self._gone.get(other, "waited"), self._last[other])
            for other in self._missing(rank, channel, call)
        ]
        return Hang(rank, call, tuple(others))


def same_call(mine: Collective, theirs: Collective) -> bool:
    """Whether two ranks may make these calls as the n-th of one group."""
    if mine.kind != theirs.kind or mine.root != theirs.root:
        return False
    if not (mine.even and theirs.even):
        return True
    return _entries(mine) == _entries(theirs) and set(mine.dtypes) == set(theirs.dtypes)


def _entries(call: Collective) -> int:
    return sum(map(math.prod, call.shapes))
