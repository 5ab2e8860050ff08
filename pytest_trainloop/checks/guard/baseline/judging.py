"""A trajectory against the one that was recorded: what is said of the two."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.guard.baseline import findings
from pytest_trainloop.checks.guard.baseline.bounds import AT_HOME, EPS, ROUNDING, Bounds, Nudged, distance
from pytest_trainloop.checks.guard.baseline.calls import calls
from pytest_trainloop.checks.guard.baseline.facts import Fact, facts
from pytest_trainloop.checks.guard.baseline.first import Comparison
from pytest_trainloop.checks.guard.baseline.names import names_of, renames
from pytest_trainloop.checks.guard.baseline.schedulers import schedulers
from pytest_trainloop.checks.guard.baseline.start import begun
from pytest_trainloop.errors import CannotDecide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.baselines.trajectory import Course, Environment, Trajectory
    from pytest_trainloop.checks.guard.baseline.first import First
    from pytest_trainloop.checks.guard.baseline.names import Names
    from pytest_trainloop.finding import Finding

    Precision = Literal["float64", "own"]
    Moved = Callable[[Precision], Sequence[Nudged]]


def compare(
    old: Trajectory,
    new: Trajectory,
    nudged: Moved = lambda precision: (),
    found: Callable[[Comparison, First], None] = lambda comparison, first: None,
) -> Iterator[Finding]:
    """Yield what differs between a recorded trajectory and one of the loop as it is: faults, advice, and a note on
    names that changed.

    ``nudged`` makes courses of the loop as it is with last digits moved, from which bounds are derived; it is asked at
    most once a precision, and only where numbers differ by more than rounding makes in a single step. ``found`` is
    called with the place where training differs first.
    """
    if old.double is not None and new.double is not None:
        double = _Judged(old.double, new.double, "float64", lambda: nudged("float64"), found)
        yield from double.findings()
        if double.differs or not _one_environment(old, new):
            return
        before, now = set(old.double.asked), set(new.double.asked)
        came, gone = sorted(now - before), sorted(before - now)
        yield from _Judged(old.own, new.own, "own", lambda: nudged("own"), found).in_own_precision(came, gone)
    else:
        yield from _Judged(old.own, new.own, "own", lambda: nudged("own"), found).findings()


def _one_environment(old: Trajectory, new: Trajectory) -> bool:
    return old.environment == new.environment and old.own.repeatable


def comparable(old: Trajectory, new: Trajectory) -> str:
    """Why the two cannot be compared at all, in words; empty where they can."""
    if (old.double is not None and new.double is not None) or _one_environment(old, new):
        return ""
    why = new.why or old.why or "one of the two cannot be made in float64"
    then, now = old.environment, new.environment
    other = [f"{a}, now {b}" for a, b in zip(_shown(then), _shown(now), strict=True) if a != b]
    place = f"it was recorded on another environment ({'; '.join(other)})" if other else "it does not repeat itself"
    return f"{place}, and there is no course in float64 to compare: {why}"


def _shown(environment: Environment) -> tuple[str, ...]:
    return (
        f"torch {environment.torch}",
        f"python {environment.python}",
        environment.platform,
        environment.device,
        f"{environment.threads} threads",
        environment.cpu,
    )


def restless(course: Course, nudged: Sequence[Course]) -> dict[str, float]:
    """Parameters whose gradient is rounding and nothing else, as a bias before a batch norm has: with last digits moved
    it is another one altogether. By name the size of an entry's update in the first step, by which an optimizer that
    divides by the gradient's size throws them about."""
    found = {}
    for other in nudged:
        for mine, theirs in course.paired(other):
            for name, digest in mine.gradients.items():
                if name in theirs.gradients and distance(digest, theirs.gradients[name]) > NOISE[course.precision]:
                    size = math.prod(course.tensors[name].shape) if name in course.tensors else 1
                    found[name] = mine.updates.get(name, 0.0) / math.sqrt(max(size, 1))
            break
    return {name: size for name, size in found.items() if size > 0}


NOISE = {"float64": 1e-6, "own": 0.1}
"""The relative change of a gradient, for one unit in the last place of the weights, from which it is rounding alone: in
float64 ten digits of sixteen are lost by it, and training follows none of those that are left."""


class _Judged:
    """Two courses in one precision."""

    def __init__(
        self,
        old: Course,
        new: Course,
        precision: Precision,
        nudged: Callable[[], Sequence[Nudged]],
        found: Callable[[Comparison, First], None],
    ) -> None:
        self.old, self.new, self._found = old, new, found
        self.precision = _lower(old, new) if precision == "float64" else _coarsest(new)
        self.eps = EPS.get(self.precision, 2.0**-8)
        self.names = names_of(old, new, ROUNDING * self.eps)
        self.differs = False
        self._nudged = nudged

    def findings(self) -> Iterator[Finding]:
        said = list(self._said())
        self.differs = any(finding.level == "fault" for finding in said)
        yield from said
        if texts := list(renames(self.names)):
            yield findings.renamed(texts, [name for match in self.names.moved for name in match.new])

    def _said(self) -> Iterator[Finding]:
        own = [
            *facts(self.old, self.new, self.names),
            *schedulers(self.old, self.new, self.names),
            *calls(self.old, self.new),
        ]
        start = begun(self.old, self.new, self.names)
        if start is not None:
            others = [fact for fact in own if fact.alone]
            if start.scaled or not any(fact.cause == "parameters_differ" for fact in others):
                yield findings.of_start(start)  # else other random numbers follow from other parameters
            yield from (findings.of_fact(fact, None, self.precision, compared=False) for fact in others)
            return
        compared = Comparison(self.old, self.new, self.names, Bounds(self.new, self._nudged, self.eps))
        first = compared.first()
        if first is not None:
            self._found(compared, first)
        if first is None and compared.decides_nothing():
            raise CannotDecide("rounding alone changes every gradient of the first step: no place can be compared")
        explaining = [fact for fact in own if first is not None and fact.accounts_for(first)]
        later = [fact for fact in own if fact.alone and fact not in explaining]
        for fact in _roots(explaining):
            yield findings.of_fact(fact, first, self.precision)
        if first is None:
            yield from (findings.of_fact(fact, None, self.precision) for fact in later)
            if not later:
                yield from (findings.unseen(fact) for fact in own if fact.unseen)
                yield from self._loss_alone(compared)
        elif not explaining:
            yield findings.of_first(first, self.precision)
            yield from (findings.of_fact(fact, None, self.precision) for fact in later)

    def _loss_alone(self, compared: Comparison) -> Iterator[Finding]:
        """What is said of courses whose training is the same as far as it was recorded."""
        loss = compared.loss_alone()
        if loss is not None:
            found = findings.of_first(loss, self.precision)
            yield replace(
                found,
                level="advice",
                shown_by="gradients and updates of all recorded steps are those of the baseline; the value differs",
            )

    def in_own_precision(self, came: Sequence[str], gone: Sequence[str]) -> Iterator[Finding]:
        """What differs in the loop's own precision, where float64 shows no difference; ``came`` and ``gone`` are dtypes
        to which one of the two loops casts and the other does not."""
        for old, new in _dtypes(self.old, self.new, self.names):
            yield findings.precision(old, new)
            return
        if self.precision not in EPS:
            return  # rounding of bfloat16 hides what it would show
        bounds = Bounds(self.new, self._nudged, self.eps, AT_HOME if came or gone else ROUNDING)
        compared = Comparison(self.old, self.new, self.names, bounds)
        first = compared.first_gradient()
        if first is not None:
            self._found(compared, first)
            yield findings.in_own(findings.of_first(first, self.precision), self.precision, came, gone)


def _roots(explaining: Sequence[Fact]) -> list[Fact]:
    """Of the facts that explain one difference those that no other one explains: a parameter that is gone is held by no
    optimizer either."""
    gone = [fact for fact in explaining if fact.cause in ("parameters_differ", "frozen_differs")]
    return gone or list(explaining)


def _lower(old: Course, new: Course) -> str:
    """The precision of courses that were to be in float64: that of the coarsest operation."""
    seen = " ".join((*old.lower, *new.lower))
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in seen), "float64")


def _coarsest(course: Course) -> str:
    """The coarsest floating dtype of weights and outputs."""
    seen = {tensor.dtype for tensor in course.tensors.values()}
    seen |= {call.dtype for step in course.steps for call in step.calls or ()}
    order = ("bfloat16", "float16", "float32", "float64")
    return next((dtype for dtype in order if dtype in seen), "float32")


def _dtypes(old: Course, new: Course, names: Names) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Tensors, then outputs of modules, of another dtype: name and dtype of both."""
    for match in names.matches:
        for a, b in ((a, b) for a in match.old for b in match.new):
            if old.tensors[a].dtype != new.tensors[b].dtype:
                yield (a, old.tensors[a].dtype), (b, new.tensors[b].dtype)
    for before, step in old.paired(new):
        known = {call.path: call for call in before.calls or ()}
        for call in step.calls or ():
            if call.path in known and known[call.path].dtype != call.dtype and call.dtype and known[call.path].dtype:
                yield (call.path, known[call.path].dtype), (call.path, call.dtype)
