"""Which operation keeps a gradient from parameters: candidates, each tried in a run of its own.

The loop is run again with a candidate left out (a detach that passes its input on, a no_grad that is none, a rounding
that is straight-through): if the gradient is there now, that operation is the cut. Where an operation cannot be left
out (numpy, float), its result is moved instead: if the loss changes, the value passes there without its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pytest_trainloop.checks.wiring.gradient_reaches_every_param.stopped_side import other_side
from pytest_trainloop.checks.wiring.gradient_reaches_every_param.uses import wanted_elsewhere
from pytest_trainloop.gradients.dependence import (
    difference,
    moved_a_little,
    roots_before_first_step,
    until_stepped,
)
from pytest_trainloop.gradients.tolerances import CANCELLATION
from pytest_trainloop.tracing.cut_candidates import Candidate, Kind, Tracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.stopped_side import OtherSide
    from pytest_trainloop.checks.wiring.gradient_reaches_every_param.uses import Wanted
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence


MOST = 16
"""Candidates tried one by one, those nearest to the loss first."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The operation where the gradient is lost."""

    candidate: Candidate
    gradient: float | None
    """The largest entry that arrives with it left out; None where its result was moved instead."""
    change: float = 0.0
    """By how much the loss changed then."""
    reached: frozenset[str] = frozenset()
    """Parameters that get a gradient with it left out."""
    fired: frozenset[str] = frozenset()
    """Those that get one, even of zeros."""
    others: tuple[Candidate, ...] = ()
    """Operations that had to be left out as well, on other paths to the loss."""


class Search(NamedTuple):
    """What was found: the cut, if any, and the names of all parameters that entered some computation."""

    cut: Cut | None
    touched: set[str]


class CutSearch:
    """The search for where gradients are lost. Finds nothing where the loop cannot be run again."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def find(self, names: Sequence[str], kinds: set[Kind]) -> Search:
        """Look for the operation of these kinds that keeps the gradient from these parameters."""
        evidence = self._evidence
        if not evidence.repeatable:
            return Search(None, set())
        listed, tracer = _traced(evidence, names)
        touched = {listed.parameters[i].name for i in tracer.touched}
        candidates = [c for c in reversed(tracer.found.values()) if c.kind in kinds]
        return Search(_proven(evidence, names, candidates) or _moved(evidence, names, candidates, listed), touched)

    def saddles(self, names: Sequence[str]) -> dict[str, float]:
        """Parameters that start at exactly zero and get a gradient once all weights are moved a little: zero times zero
        has no slope. The largest entry of that gradient by name."""
        evidence = self._evidence
        if not evidence.repeatable:
            return {}
        zeros = {p.name for p in evidence.run().parameters if p.start.zero}
        record = evidence.rerun(prepare=moved_a_little, enough=until_stepped(evidence, names))
        return arriving(record, [n for n in names if n in zeros])

    def wanted_elsewhere(self, names: Sequence[str], cut: Cut) -> Wanted | None:
        """The two uses of the cut's result, where one of them is meant to have no history."""
        return wanted_elsewhere(self._evidence, names, cut.candidate)

    def other_side(self, names: Sequence[str], cut: Cut) -> OtherSide | None:
        """The comparison on whose other side the gradient is to stop, where that is shown by a run."""
        if cut.candidate.kind != "detach" or cut.gradient is None:
            return None
        return other_side(self._evidence, names, [cut.candidate, *cut.others], cut.reached)


def _proven(evidence: Evidence, names: Sequence[str], candidates: list[Candidate]) -> Cut | None:
    """A cut shown by leaving it out: all candidates at once, then halves, down to one; where several are needed, the
    one nearest to the loss. One by one where leaving all out is too much for the loop."""
    candidates = [c for c in candidates if c.kind != "custom"]
    if len(candidates) > 1 and _without(evidence, names, candidates):
        return _narrowed(evidence, names, candidates)
    cuts = (_without(evidence, names, [c]) for c in candidates[:MOST])
    return next((cut for cut in cuts if cut), None)


def _narrowed(evidence: Evidence, names: Sequence[str], needed: list[Candidate]) -> Cut | None:
    while len(needed) > 1:
        half = len(needed) // 2
        smaller = next((part for part in (needed[:half], needed[half:]) if _without(evidence, names, part)), None)
        if smaller is None:
            break
        needed = smaller
    for candidate in needed[:MOST] if len(needed) > 1 else ():
        rest = [c for c in needed if c is not candidate]
        if rest and _without(evidence, names, rest):
            needed = rest
    return _without(evidence, names, needed)


def _moved(evidence: Evidence, names: Sequence[str], candidates: list[Candidate], listed: Record) -> Cut | None:
    """A cut shown by moving the result of the operation."""
    broken = next((c for c in candidates if c.kind == "custom"), None)
    if broken is not None:
        return Cut(broken, None)
    base = roots_before_first_step(listed, names)
    for candidate in candidates[:MOST]:
        if candidate.kind in ("value", "detach", "grad_off"):
            moved, _ = _traced(evidence, names, [candidate], nudge=True)
            change = difference(base, roots_before_first_step(moved, names))
            if change > 1e-6:
                return Cut(candidate, None, change)
    return None


def _without(evidence: Evidence, names: Sequence[str], left_out: list[Candidate]) -> Cut | None:
    """The first of these operations as the cut, if a gradient reaches one of the parameters with all left out."""
    record, _ = _traced(evidence, names, left_out)
    if refused := _refused_pass(evidence.run()):
        passed = record.autograd_passes()[refused - 1 :][:1]
        names = [p.name for p in record.parameters if p.name in names and any(b.arrivals.get(p.index) for b in passed)]
    peaks = arriving(record, names)
    if evidence.run().raised is not None and _accepted(record) <= _accepted(evidence.run()):
        return None  # torch refused a backward pass, and refuses it still
    fired = frozenset(p.name for p in record.parameters if p.name in set(names) and any(record.arrivals(p.index)))
    if not peaks:
        return None
    return Cut(left_out[0], max(peaks.values()), reached=frozenset(peaks), fired=fired, others=tuple(left_out[1:]))


def _refused_pass(record: Record) -> int:
    """The number of the backward pass that torch refused, from 1 on; 0 without one."""
    passes = record.autograd_passes()
    refused = record.raised is not None and passes and not any(root.history for root in passes[-1].roots)
    return len(passes) if refused else 0


def _accepted(record: Record) -> int:
    """Backward passes from a root with a history."""
    return sum(all(root.history for root in b.roots) for b in record.autograd_passes())


def arriving(record: Record, names: Sequence[str]) -> dict[str, float]:
    """The largest gradient entry at each of the parameters that gets one that is not zero."""
    peaks = {p.name: max((a.incoming.peak for a in record.arrivals(p.index)), default=0.0) for p in record.parameters}
    largest = max((peak for peak in peaks.values() if math.isfinite(peak)), default=0.0)
    return {name: peaks[name] for name in names if name in peaks and not peaks[name] <= CANCELLATION * largest}


def _traced(
    evidence: Evidence, names: Sequence[str], chosen: Sequence[Candidate] = (), *, nudge: bool = False
) -> tuple[Record, Tracer]:
    tracer = Tracer(chosen, nudge=nudge)
    return evidence.rerun(
        enough=until_stepped(evidence, names), contexts=tracer.contexts, may_raise=bool(chosen)
    ), tracer
