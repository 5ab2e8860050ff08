"""Whether the graphs of the first steps are alive many steps later, and what holds them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.memory_growth.heap import Heap
from pytest_trainloop.checks.state.memory_growth.holders import Holder, Reached, find, tensors_with_history
from pytest_trainloop.checks.state.memory_growth.lines import Lines, made, made_at, put_at
from pytest_trainloop.checks.state.memory_growth.names import Names
from pytest_trainloop.recording.graphs import SETTLED
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 9
"""Steps of one optimizer after which the first look is final."""

MOST = 36
"""Steps after which a graph of the first ones that is still alive is kept for good."""

_INDEX = re.compile(r"(\[\d+\])+$")
"""The end of ``state[0]``, of which all is carried over."""

_LOOKS = (STEPS, FULL_ROUNDS, 18, 24, MOST)


@dataclass(frozen=True, slots=True)
class Held:
    """A holder, with its lines as text."""

    how: str
    name: str
    kind: str
    items: int
    bounded: int | None
    where: str


@dataclass(frozen=True, slots=True)
class Look:
    """All graphs of the first steps were alive."""

    rounds: int
    windows: int
    """The number of first steps that were looked at."""
    nodes: int
    carried: bool
    """Whether the backward pass of each step went through the graphs of all earlier ones."""
    usable: bool
    """Whether every backward pass over them retained them, and what they need is as it was."""
    holders: tuple[Held, ...]
    growth: float | None
    """Bytes a step by which what torch allocated on the device grew; None without one."""


class Growth:
    """Looks for what holds the graphs of the first steps, in the hook of a step, where the loop's locals are alive."""

    def __init__(self) -> None:
        self.look: Look | None = None
        """The last look, None where some graphs were gone then."""
        self.rounds = 0
        """The steps after which the last look was."""
        self.carried: tuple[Held, ...] | None = None
        """The tensors through which a backward pass that raised came to an earlier graph."""
        self.alive: dict[int, int] = {}
        """By optimizer step, how many of the steps up to it have a graph that is alive: of those that are watched in
        full."""
        self._allocated: dict[int, int] = {}
        self._heap = Heap()

    @classmethod
    def of(cls, evidence: Evidence) -> Growth:
        """A longer run of the loop; of a run that cannot be repeated, what its instrument saw."""
        found, lines = cls(), Lines()
        plan = evidence.plan()
        record = evidence.run()
        count = plan.count if record.raised else _batches_for(MOST, record)
        with found._heap.of_this_block():
            evidence.rerun(
                plan,
                count=count,
                read_ahead=None,
                enough=lambda r: r.rounds >= MOST,
                contexts=lambda watch: (*lines.contexts(watch), found.looking(watch)),
                may_raise=True,
            )
        return found

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What ``observe()`` opens: without the function mode, which would cost each torch call."""
        return (self.looking(watch),)

    @contextlib.contextmanager
    def looking(self, watch: Watch) -> Iterator[None]:
        done: set[int] = set()

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            rounds = watch.record.rounds
            self.alive[rounds] = len(watch.graphs.alive())
            if not watch.is_suspended and rounds in _LOOKS and rounds not in done:
                done.add(rounds)
                with watch.suspended():
                    self._look(watch, rounds)

        def refused() -> None:
            with watch.suspended():
                self.carried = tuple(self._heap.searched(lambda: _carriers(watch, watch.graphs.roots, Names(watch))))

        watch.graphs.keeps_roots, watch.graphs.when_refused = True, refused
        try:
            with hooked(after_steps(stepped)):
                yield
        finally:
            watch.graphs.keeps_roots, watch.graphs.when_refused = False, lambda: None
            watch.graphs.roots = []

    def _look(self, watch: Watch, rounds: int) -> None:
        windows = range(1, min(rounds - SETTLED, FULL_ROUNDS) + 1)
        if devices := {tensor.device for tensor in watch.table.tensors if tensor.is_cuda}:
            self._allocated[rounds] = sum(map(torch.cuda.memory_allocated, devices))
        roots, watch.graphs.roots = watch.graphs.roots, []
        last, self.rounds, self.look = self.look, rounds, None
        if not watch.graphs.are_kept(windows):
            return
        if last is not None and rounds != MOST:
            self.look = replace(last, rounds=rounds)  # who holds them is looked at once, and at the end
            return
        reached = Reached(watch.graphs, windows)
        reaches = watch.graphs.reaches
        carried = all(reaches.get(w, frozenset()) >= set(range(1, w)) for w in windows)

        def holders() -> list[Held]:
            names = Names(watch)
            held = _carriers(watch, roots, names) if carried else []
            return held or [_held(holder, names) for holder in find(reached, names)]

        self.look = Look(
            rounds=rounds,
            windows=len(windows),
            nodes=reached.nodes,
            carried=carried,
            usable=set(windows) <= watch.graphs.retained() and not reached.overwritten,
            holders=tuple(self._heap.searched(holders)),
            growth=self._growth(),
        )

    def _growth(self) -> float | None:
        if len(self._allocated) < 2:
            return None
        (first, before), *_, (last, now) = self._allocated.items()
        return (now - before) / (last - first)


def further_record(evidence: Evidence) -> Record:
    """The watched run; one with more batches where that made too few steps for a look."""
    record = evidence.run()
    known = record.graphs
    if not evidence.repeatable or record.raised or not record.rounds or (known is not None and known.rounds >= STEPS):
        return record
    return evidence.shared(_longer)


def _longer(evidence: Evidence) -> Record:
    plan = replace(evidence.plan(), count=_batches_for(STEPS, evidence.run()), read_ahead=None)
    return evidence.rerun(plan, enough=lambda r: r.rounds >= STEPS)


def _batches_for(steps: int, record: Record) -> int:
    """Batches for so many steps, at the rate of the watched run, and one window more."""
    return -(-(steps + 1) * max(1, record.items) // max(1, record.rounds)) + 1


def _held(holder: Holder, names: Names) -> Held:
    """The holder with the line that made its tensor, or that puts tensors into it."""
    place = made_at(holder.made_by)
    if holder.how == "kept_tensors":
        known = made(holder.made_by)
        files = [*names.files, *(file for file, _ in (known.site if known is not None else ()))]
        place = put_at(holder.name, files) or place
    return Held(holder.how, holder.name, holder.kind, holder.items, holder.bounded, str(place or ""))


def _carriers(watch: Watch, roots: list[Any], names: Names) -> list[Held]:
    """The tensors through which a backward pass came to the graphs of earlier steps.

    One that was replaced since is known by the tensor that the same line made in its place.
    """
    found: dict[str, Held] = {}
    alive = tensors_with_history()
    for node in _carried_over(watch, roots)[:8]:
        place = made_at(node)
        same = [t for t, by in alive if by is node]
        alike = [t for t, by in alive if type(by) is type(node) and place is not None and made_at(by) == place]
        name = next(filter(None, map(names.of, [*same, *alike][:6])), "")
        whole = _INDEX.sub("", name)
        kind = "Tensor" if whole == name else "tuple"
        found.setdefault(whole, Held("carried_graph", whole, kind, 1, None, str(place or "")))
    named = [held for held in found.values() if held.name]
    return (named or list(found.values()))[:2]


def _carried_over(watch: Watch, roots: list[Any]) -> list[Any]:
    """The first nodes below these that an earlier step or batch made: what carries the graph is their output.

    Without ``Lines`` these are the first nodes that an earlier pass went through.
    """
    window, item = watch.record.rounds + 1, watch.items()
    found, seen, nodes = [], set(roots), list(roots)
    while nodes:
        node = nodes.pop()
        at = made(node)
        marked = watch.graphs.window_of(node) if at is None else None
        if (marked or window) < window or (at is not None and (at.window < window or at.item < item)):
            found.append(node)
            continue
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        nodes += below
    return found
