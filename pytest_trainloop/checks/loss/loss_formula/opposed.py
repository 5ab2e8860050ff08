"""Two terms of one loss that compare the same outputs with the same targets, and are best at different outputs.

See docs/how-it-decides.md#terms-that-disagree. The outputs are trained freely on each term, and on both.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.loss.loss_formula.causes import found
from pytest_trainloop.checks.loss.loss_formula.values import culprits_of
from pytest_trainloop.instruments.formulas.cut import other
from pytest_trainloop.instruments.formulas.trial import STARTS, descended
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay, terms
from pytest_trainloop.recording.torch_names import (
    ADDITIONS,
    CASTS,
    DISTANCE_LOSSES,
    EQUALITIES,
    MULTIPLICATIONS,
    NEGATIONS,
    ORDER_COMPARISONS,
    SUBTRACTIONS,
    VIEWS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.formulas.trial import Outputs
    from pytest_trainloop.instruments.tracing.loss_slice import Call, Slice, Term
    from pytest_trainloop.runs.evidence import Evidence

STEPS = 30
"""Of one descent: the step of an entry grows to 23 times the first one."""

LARGEST = 1 << 15
"""Entries of the outputs up to which terms are tried."""

MOST_TERMS = 4
"""Terms of one loss that are compared with each other."""

RANGE = 1.0
"""Other outputs are drawn from at least -1 to 1."""

DISAGREE = 0.25
"""What two terms that disagree keep at best of what each alone can lose, added up."""

TOGETHER = 0.1
"""The same for two terms that agree."""

MARGIN = 10
"""How many times less a changed term keeps."""

_SAME_TARGET = (
    VIEWS | CASTS | EQUALITIES | ORDER_COMPARISONS | ADDITIONS | SUBTRACTIONS | MULTIPLICATIONS | NEGATIONS
    | frozenset("""one_hot log log1p exp expm1 sqrt square pow __pow__ abs sign clamp div true_divide __truediv__ sum
    mean var std norm normalize relu scatter scatter_ stack cat where pad __getitem__ conv1d conv2d conv3d avg_pool1d
    avg_pool2d avg_pool3d max_pool2d max_pool3d interpolate""".split())
)  # fmt: skip
"""Functions whose results hold the same target, rows in the order of the batch."""

_OF_CLASSES = frozenset({"cross_entropy", "nll_loss", "softmax", "log_softmax", "logsumexp"})

_PLAIN = DISTANCE_LOSSES | SUBTRACTIONS | MULTIPLICATIONS | VIEWS | CASTS | frozenset("pow square abs mean sum".split())
"""Functions of a distance without more."""

_SQUASHES = ("outputs.sigmoid", "outputs.softmax")

Change = tuple[str, "Callable[[torch.Tensor], torch.Tensor]"]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A term that reads outputs of layers and targets."""

    call: Call
    number: int
    sign: float
    """Of the term in the loss."""
    outputs: tuple[int, ...]
    targets: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Course:
    """What became of the outputs from one start, by each of the two terms."""

    start: Outputs
    taught: tuple[Outputs, Outputs]
    best: tuple[float, float]
    ranges: tuple[float, float]
    kept: float
    """What both terms keep at best of their ranges, added up."""


def opposed(part: Slice, evidence: Evidence, known: set[tuple[str, str]]) -> Iterator[Finding]:
    """The pairs of terms that disagree, and agree once the outputs are changed before one of them."""
    comparing = [c for term in terms(part, part.root) if (c := _comparison(part, term)) is not None][:MOST_TERMS]
    for pair in itertools.combinations(comparing, 2):
        one, two = pair
        places = f"{one.call.name} {one.call.place}", f"{two.call.name} {two.call.place}"
        if one.outputs != two.outputs or one.targets != two.targets or places in known:
            continue
        known.add(places)
        if any(o.maximizes for o in evidence.run().optimizers):
            continue
        try:
            said = _Pair(part, pair).said()
        except CannotReplay:  # the calls refuse other outputs
            continue
        if said:
            who, facts = said
            changed, still = pair[who].call, pair[1 - who].call
            facts |= {"two": changed.name, "one": still.name, "other": str(still.place), "starts": STARTS}
            yield found("terms_disagree", changed, culprits_of(part, (one.number, two.number)), "change", **facts)


def _comparison(part: Slice, term: Term) -> _Comparison | None:
    call = part.call_of(term.number)
    if call is None or not math.isfinite(term.factor) or not term.factor:
        return None
    before = [part.values[n] for n in part.ancestors(term.number)]
    if any(v.kind == "unknown" for v in before):
        return None
    outputs = part.trained(term.number)
    targets = _targets(part, term.number)
    if not outputs or not targets or sum(v.tensor.numel() for v in outputs) > LARGEST:
        return None
    return _Comparison(call, term.number, math.copysign(1.0, term.factor), tuple(v.number for v in outputs), targets)


def _targets(part: Slice, number: int) -> frozenset[int]:
    """What of the batch a term reads: before reshapes, casts and other functions that leave its rows in order."""
    roots: set[int] = set()
    todo, seen = [number], {number}
    while todo:
        at = todo.pop()
        call = part.call_of(at)
        if not part.from_batch(at):
            continue
        if call is not None and (part.trained(at) or _keeps_rows(part, at)):
            todo.extend(set(call.inputs) - seen)
            seen.update(call.inputs)
        else:
            roots.add(at)
    return frozenset(roots)


def _keeps_rows(part: Slice, number: int) -> bool:
    call = part.call_of(number)
    if call is None or call.name not in _SAME_TARGET:
        return False
    if call.name == "__getitem__":  # y[:, 1:], and not y[order]
        index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index)
    if call.name in ADDITIONS | SUBTRACTIONS:  # noise
        still = [part.values[n].tensor for n in call.inputs if not part.from_batch(n)]
        return all(t.numel() and bool((t == t.flatten()[0]).all()) for t in still)
    return True


@dataclass(eq=False, slots=True)
class _Pair:
    part: Slice
    terms: tuple[_Comparison, _Comparison]

    def said(self) -> tuple[int, dict[str, Any]] | None:
        """Which of the two terms is to be given other outputs, and which, as facts of the finding."""
        if self._functions(0) == self._functions(1):  # one criterion with two targets, as in mixup
            return None
        courses: list[_Course] = []
        for index in range(STARTS):
            course = self._course(index)
            if course is None or not course.kept >= DISAGREE or not all(self._says(course, who) for who in (0, 1)):
                return None
            courses.append(course)
        kept = min(course.kept for course in courses)
        shared = self._shared()
        if shared is None:
            return None
        for change, who in itertools.product(self._changes(shared), (1, 0)):
            left = -math.inf
            for course in courses:
                left = max(left, self._left(course, who, change, shared))
                if not left <= kept / MARGIN:
                    break
            else:
                # scores are pulled to their labels on purpose, too, to keep them small (squentropy)
                pulled = _PLAIN.issuperset(self._functions(who)) and change[0].startswith(_SQUASHES)
                level = "advice" if pulled else "fault"
                return who, {"made": change[0], "kept": f"{kept:.2f}", "left": f"{max(left, 0.0):.2f}", "level": level}
        return None

    def _cost(self, who: int, outputs: Outputs, change: Change | None = None, at: int | None = None) -> torch.Tensor:
        """One of the terms as it is minimised, as a function of outputs; with a change of the value ``at``."""
        term = self.terms[who]
        if change is not None and at is not None:
            (value,) = self.part.replay(outputs, [at])
            outputs = {at: change[1](value)}
        return term.sign * self.part.replay(outputs, [term.number])[0].double().sum()

    def _at(self, who: int, outputs: Outputs, *changed: Any) -> float:
        return float(self._cost(who, outputs, *changed).detach())

    def _down(self, who: int, start: Outputs, *changed: Any) -> Outputs:
        return descended(lambda o: self._cost(who, o, *changed), start, {}, STEPS)[0]

    def _course(self, index: int) -> _Course | None:
        """None where a term gains nothing, or no end of it is in sight, or the best of one is good for the other."""
        start = {n: self.part.values[n].tensor.double() for n in self.terms[0].outputs}
        if index:
            start = {n: other(t, 100 * index + n, RANGE) for n, t in start.items()}
        first = [self._at(who, start) for who in (0, 1)]
        taught = self._down(0, start), self._down(1, start)
        (low, then), end = (self._at(who, taught[0]) for who in (0, 1)), self._at(1, taught[1])
        if then - end <= TOGETHER * (max(first[1], then) - end):  # so it mostly is
            return None
        there = self._down(1, taught[0])
        (lost, now), gain = (self._at(who, there) for who in (0, 1)), first[0] - low
        if lost - low <= TOGETHER * gain and now - end <= TOGETHER * (first[1] - end):
            return None
        end = min(end, now)
        best: list[float] = []
        for who in (0, 1):
            reached, later = (self._at(who, o) for o in (taught[who], self._down(who, taught[who])))
            if not first[who] - reached > 0 or reached - later > TOGETHER * (first[who] - reached):
                return None
            best.append(min(later, end) if who else later)
        ranges = first[0] - best[0], first[1] - best[1]

        def both(outputs: Outputs) -> torch.Tensor:
            zero, one = ((self._cost(who, outputs) - best[who]) / ranges[who] for who in (0, 1))
            return zero + one

        kept = min(float(both(descended(both, o, {}, STEPS)[0]).detach()) for o in (start, *taught))
        return _Course(start, taught, (best[0], best[1]), ranges, kept)

    def _says(self, course: _Course, who: int) -> bool:
        """Whether targets count in a term: the best outputs of other rows are worse."""
        rows = max(min(t.shape[0] if t.dim() else 1 for t in course.taught[who].values()), 1)
        rolled = ({n: t.roll(by, 0) for n, t in course.taught[who].items()} for by in (1, rows // 2))
        worst = max(self._at(who, outputs) for outputs in rolled) if rows > 1 else -math.inf
        return worst - course.best[who] >= TOGETHER * course.ranges[who]

    def _left(self, course: _Course, who: int, change: Change, shared: int) -> float:
        """What the changed term keeps, of what it can lose, at outputs that are best for the other term. It must end
        at a value as good as before."""
        at = course.taught[1 - who]
        changed = change, shared
        try:
            first, now = self._at(who, course.start, *changed), self._at(who, at, *changed)
            down = self._down(who, at, *changed)
            best, later = self._at(who, down, *changed), self._at(who, self._down(who, down, *changed), *changed)
        except CannotReplay:
            return math.inf
        whole = max(first, now) - best
        ended = best - later <= TOGETHER * whole and best <= course.best[who] + TOGETHER * course.ranges[who]
        return (now - best) / whole if ended and whole > 0 else math.inf

    def _functions(self, who: int) -> list[str]:
        """What a term is made of, from the outputs on."""
        before = self.part.ancestors(self.terms[who].number)
        between = (c for c in self.part.calls if before.intersection(c.outputs))
        return [c.name for c in between if any(self.part.trained(n) for n in c.inputs)]

    def _shared(self) -> int | None:
        """The last value by way of which both terms read all outputs."""
        numbers = [term.number for term in self.terms]
        common = self.part.ancestors(numbers[0]) & self.part.ancestors(numbers[1])
        made = [n for call in self.part.calls for n in call.outputs if n in common and self.part.trained(n)]
        outputs = {n: self.part.values[n].tensor.clone().requires_grad_() for n in self.terms[0].outputs}
        for number in (*reversed(made), *outputs):
            cut = {**outputs, number: self.part.values[number].tensor}
            if not any(t.requires_grad for t in self.part.replay(cut, numbers)):
                return number
        return None

    def _changes(self, shared: int) -> Iterator[Change]:
        """What outputs may have to pass through before one of the terms, the commonest first."""
        shape = self.part.values[shared].tensor.shape
        axes = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (d != 1, -d))
        squashes: list[Change] = [(f"outputs.softmax({d})", partial(torch.softmax, dim=d)) for d in axes]
        before = self.part.ancestors(self.terms[0].number) | self.part.ancestors(self.terms[1].number)
        classes = any(call.name in _OF_CLASSES and before.intersection(call.outputs) for call in self.part.calls)
        squashes.insert(len(axes) if classes else 0, ("outputs.sigmoid()", torch.sigmoid))
        yield from squashes
        for name in ("tanh", "exp", "expm1", "log", "log1p"):
            yield f"outputs.{name}()", getattr(torch, name)
