"""Whether the graphs of the first steps are alive many steps later, and what is said of who holds them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.memory_growth import causes
from pytest_trainloop.checks.state.memory_growth.causes import found
from pytest_trainloop.checks.state.memory_growth.holders import (
    GraphHolder,
    Heap,
    Lines,
    Names,
    Reached,
    find,
    made,
    tensors_with_history,
)
from pytest_trainloop.core.wording import filled
from pytest_trainloop.instruments.tracing.statements import only_call
from pytest_trainloop.recording.graphs import SETTLED
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record, RefusedBackward
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

FIRST_LOOK = 9
"""Steps of one optimizer after which the first look is final."""

LAST_LOOK = 36
"""Steps after which a graph of the first ones that is still alive is kept for good."""

_LOOKS = (FIRST_LOOK, FULL_ROUNDS, 18, 24, LAST_LOOK)

_INDEX = re.compile(r"(\[\d+\])+$")
"""The end of ``state[0]``, of which all is carried over."""


class Growth:
    """Looks for what holds the graphs of the first steps, in the hook of a step, where the loop's locals are alive."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        """By optimizer step, how many of the steps up to it have a graph that is alive: of those that are watched in
        full."""
        self._facts: dict[str, Any] = {}
        """Of the last look; none where some graphs were gone then."""
        self._holders: list[GraphHolder] = []
        self._refused: list[GraphHolder] = []
        """The tensors through which a backward pass that raised came to an earlier graph."""
        self._allocated: dict[int, int] = {}
        self._heap = Heap()

    @classmethod
    def of(cls, evidence: Evidence) -> Growth:
        """A longer run of the loop; of a run that cannot be repeated, what its instrument saw."""
        seen, lines = cls(), Lines()
        plan, record = evidence.plan(), evidence.run()
        with seen._heap.of_this_block():
            evidence.rerun(
                plan,
                count=plan.count if record.raised else _batches_for(LAST_LOOK, record),
                read_ahead=None,
                enough=lambda r: r.rounds >= LAST_LOOK,
                contexts=lambda watch: (*lines.contexts(watch), *seen.contexts(watch)),
                may_raise=True,
            )
        return seen

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        """What ``observe()`` opens: without the function mode, which would cost each torch call."""
        return (self._looking(watch),)

    @contextlib.contextmanager
    def _looking(self, watch: Watch) -> Iterator[None]:
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
                self._refused = self._heap.searched(lambda: _carriers(watch, watch.graphs.roots, Names(watch)))

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
        last, self._facts = self._facts, {}
        if not watch.graphs.are_kept(windows):
            return
        if last and rounds != LAST_LOOK:
            self._facts = last | {"rounds": rounds}  # who holds them is looked at once, and at the end
            return
        reached = Reached(watch.graphs, windows)
        reaches = watch.graphs.reaches
        # whether the backward pass of each step went through the graphs of all earlier ones
        carried = all(reaches.get(w, frozenset()) >= set(range(1, w)) for w in windows)

        def holders() -> list[GraphHolder]:
            names = Names(watch)
            return (_carriers(watch, roots, names) if carried else []) or find(reached, names)

        more = ""
        if len(self._allocated) > 1:
            (first, before), *_, (latest, now) = self._allocated.items()
            more = f"{(now - before) / (latest - first) / 2**20:.2f}"
        self._facts = {
            "carried": carried,
            "usable": set(windows) <= watch.graphs.retained() and not reached.overwritten,
            "rounds": rounds,
            "windows": len(windows),
            "each": round(reached.nodes / len(windows)) if reached.nodes >= len(windows) else 0,
            "more": more,
        }
        self._holders = self._heap.searched(holders)

    def kept(self) -> Iterator[Finding]:
        """What holds the graphs of all first steps; nothing where some of them were gone at the last look."""
        for held in self._holders if self._facts else ():
            cause, variant = "carried_graph" if self._facts["carried"] else held.how, ""
            why = causes.USABLE if self._facts["usable"] else causes.ENDED if self._facts["rounds"] < LAST_LOOK else ""
            why = why if held.bounded is None else causes.BOUNDED
            why = filled(why, {"bounded": held.bounded, "most": LAST_LOOK})
            unnamed = {"held_outside_python": "something outside of Python", "kept_tensors": f"a {held.kind}"}
            unnamed |= {"running_sum": "a tensor", "carried_graph": "a tensor"}
            if cause == "held_outside_python" and not held.name:
                variant = "passed"
            elif cause == "kept_tensors" and held.name.endswith("._backward_hooks"):
                variant = "hooks"
            facts = self._facts | {"holder": held.name or unnamed[cause], "kind": held.kind}
            facts |= {"items": held.items, "why": why, "level": "advice" if why else "fault"}
            culprit = held.name or held.kind or "autograd graph"
            if variant == "hooks":
                facts["change"] = only_call(str(held.where), "register_hook")
            yield found(cause, held.where, (culprit,), variant, **facts, **_detached(cause, held))

    def refused(self, refused: RefusedBackward) -> Iterator[Finding]:
        """What carries the graph of a step into the next, whose backward pass raises."""
        for held in self._refused:
            facts: dict[str, Any] = {"holder": held.name or "a tensor", **_detached("carried_graph", held)}
            facts |= {"message": refused.message.splitlines()[0][:120]}
            facts |= {"modified": "modified by an inplace" in refused.message}
            culprit = held.name or "autograd graph"
            yield found("carried_graph", held.where or refused.place, (culprit,), "refused", **facts)


def _detached(cause: str, held: GraphHolder) -> dict[str, str]:
    """The repair of a tensor with a name that is carried over."""
    if cause != "carried_graph" or not held.name:
        return {}
    last = held.name.rpartition(".")[2]
    detached = f"{last}.detach()" if held.kind == "Tensor" else f"tuple(each.detach() for each in {last})"
    return {"repair": filled(causes.DETACH, {"holder": held.name, "last": last, "detached": detached})}


def further_record(evidence: Evidence) -> Record:
    """The watched run; one with more batches where that made too few steps for a look."""
    record = evidence.run()
    known = record.graphs
    if (
        not evidence.repeatable
        or record.raised
        or not record.rounds
        or (known is not None and known.rounds >= FIRST_LOOK)
    ):
        return record
    return evidence.shared(_longer)


def _longer(evidence: Evidence) -> Record:
    plan = replace(evidence.plan(), count=_batches_for(FIRST_LOOK, evidence.run()), read_ahead=None)
    return evidence.rerun(plan, enough=lambda r: r.rounds >= FIRST_LOOK)


def _batches_for(steps: int, record: Record) -> int:
    """Batches for so many steps, at the rate of the watched run, and one window more."""
    return -(-(steps + 1) * max(1, record.items) // max(1, record.rounds)) + 1


def _carriers(watch: Watch, roots: list[Any], names: Names) -> list[GraphHolder]:
    """The tensors through which a backward pass came to the graphs of earlier steps: the outputs of the first nodes
    below its roots that an earlier step or batch made; without ``Lines``, that an earlier pass went through.

    One that was replaced since is known by the tensor that the same line made in its place.
    """
    window, item = watch.record.rounds + 1, watch.items()
    carrying, seen, nodes = [], set(roots), list(roots)
    while nodes:
        node = nodes.pop()
        at = made(node)
        marked = watch.graphs.window_of(node) if at is None else None
        if (marked or window) < window or (at is not None and (at.window < window or at.item < item)):
            carrying.append(node)
            continue
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        nodes += below
    holders: dict[str, GraphHolder] = {}
    alive = tensors_with_history()
    for node in carrying[:8]:
        at = made(node)
        same = [t for t, by in alive if by is node]
        same_line = [t for t, by in alive if type(by) is type(node) and at and (m := made(by)) and m.place == at.place]
        name = next(filter(None, map(names.of, [*same, *same_line][:6])), "")
        whole = _INDEX.sub("", name)
        kind = "Tensor" if whole == name else "tuple"
        holders.setdefault(whole, GraphHolder("carried_graph", whole, kind, 1, None, str(at.place) if at else ""))
    named = [held for held in holders.values() if held.name]
    return (named or list(holders.values()))[:2]
