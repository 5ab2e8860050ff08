"""What the processes of one launch did, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.events import Place

if TYPE_CHECKING:
    from pytest_trainloop.recording.events import Raised

NOWHERE = Place("", 0)

LOST = "gloo/transport"
"""What gloo's exceptions name where another process has gone."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a process group that a rank has made."""

    kind: str
    """As torch.distributed names it: "all_reduce", "broadcast", "barrier", "send"."""
    group: str
    """The name of the process group; "" is no group's name."""
    number: int
    """How many calls of this group the rank has made before; of a pair of sender and receiver for "send", "recv"."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that this rank gives (of those it gets, for "scatter" and "recv")."""
    takes: tuple[int, ...] = ()
    """Of a list of tensors that gets one from each rank: how many entries it has room for."""
    dtypes: tuple[str, ...] = ()
    bytes: int = 0
    root: int | None = None
    """The rank in the group that sends to all or gets from all."""
    place: Place = NOWHERE
    """The user's line; for what happens in a backward pass the line that began it."""
    steps: int = 0
    """Optimizer steps that the rank had made before."""
    in_backward: bool = False
    even: bool = False
    """Whether every rank of the group must give as much as every other."""
    waits: bool = False
    """Whether the call itself waits until all ranks of the group have made it; else whoever asks for the result."""

    def __str__(self) -> str:
        return f"{self.kind} number {self.number + 1} of group {self.group}"


@dataclass(frozen=True, slots=True)
class Rank:
    """What one process did."""

    number: int
    value: Any = None
    """What ``work`` gave back."""
    raised: Raised | None = None
    """The exception that left ``work``, with the user's frames only."""
    error: BaseException | None = None
    """The same as an object, where it is one of this package."""
    ended: str = ""
    """How the process ended without an exception and without a result: "signal SIGKILL", "exit status 3"."""
    collectives: tuple[Collective, ...] = ()
    steps: int = 0
    """Optimizer steps made."""
    written: Mapping[str, Place] = field(default_factory=dict)
    """The full path of each file that it opened to write, with the line; none of Python's own nor of torch's caches."""
    output: str = ""
    """The end of what it wrote to its standard output and error."""


@dataclass(frozen=True, slots=True)
class Other:
    """What another rank did while one waited."""

    number: int
    how: str
    """"left" (its work had ended), "raised", "ended" (its process had) or "waited"."""
    last: Collective | None
    """The last call that it made; for "waited" the one that it waited in."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A collective that can never complete: no clock was asked."""

    rank: int
    """The rank that waits."""
    collective: Collective
    """What it waits in."""
    others: tuple[Other, ...]
    """The ranks of the group that never enter it."""
    different: bool = False
    """Whether they enter another one in its place: another kind, or other shapes."""

    @property
    def line(self) -> Place:
        return self.collective.place


@dataclass(frozen=True, slots=True)
class Launch(Sequence[Rank]):
    """The ranks in their order."""

    ranks: tuple[Rank, ...]
    hang: Hang | None = None
    """What some of them would have waited in for ever: they were ended."""
    waiting: tuple[int, ...] = ()
    """The ranks that waited: how they ended follows from how the others did."""

    @property
    def raised(self) -> Rank | None:
        """The first rank that ended by itself with an exception or without a result."""
        return next((r for r in self.ranks if (r.raised or r.ended) and r.number not in self.waiting), None)

    def __getitem__(self, index: Any) -> Any:
        return self.ranks[index]

    def __len__(self) -> int:
        return len(self.ranks)
