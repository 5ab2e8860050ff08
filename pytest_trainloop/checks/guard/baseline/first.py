"""The first step and the first place in which two courses of a loop differ by more than rounding.

Two courses agree if gradients, learning rates, weights and buffers agree. Data, outputs of modules and losses only say
where a difference comes from: a refactor may pass them in another form. If they differ and training agrees, there is no
fault.

The bound of each place is derived from the loop itself (docs/how-it-decides.md#a-baseline): it runs again with each
weight at the start moved by one unit in the last place. The bound is 1e3 times the largest difference that this makes
up to a step. A place that such a change moves by any amount (the bias before a batch norm, whose gradient is rounding)
decides nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.guard.baseline.names import owner
from pytest_trainloop.instruments.baselines.trajectory import Digest, distance, number_distance, sum_of
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_trainloop.checks.guard.baseline.names import Match, Names
    from pytest_trainloop.instruments.baselines.trajectory import Call, Course, Leaf, Step

ROUNDING = 1e3
"""Times the difference that one unit in the last place makes."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23}

UNDECIDED = 1e-2
"""A bound from which on a place decides nothing: it comes from growth that leaves no digits, and faults mostly change
numbers by more."""

LR_DIFFERENCE = 1e-9
"""The same schedule, computed by another formula, differs by rounding in Python's float64 over some hundred steps."""

DATA = 1e-9
"""Data are read and not computed by the model: they agree to the rounding of what prepares them."""

_OPTION = re.compile(r"(\w+)=(\([^()]*\)|[^,()]+)")


class Bounds:
    """The bound of each place of a course. ``nudged`` makes courses of the same loop with last digits moved, each with
    the number of steps by which its differences come early; it is asked once, and only where two courses differ by more
    than rounding makes in a single step."""

    def __init__(
        self, course: Course, nudged: Callable[[], Sequence[tuple[Course, int]]], eps: float, times: float = ROUNDING
    ) -> None:
        self.least, self.rounding = times * eps, ROUNDING * eps
        self._course, self._nudged, self._times = course, nudged, times
        self._moved: dict[tuple[str, str], list[tuple[int, float]]] | None = None

    def exceeded(self, gap: float, where: tuple[str, str], step: int) -> bool:
        """Whether a difference at this place and step is more than rounding."""
        return gap > self.least and gap > self.at(where, step)

    def is_open(self, where: tuple[str, str], step: int) -> bool:
        """Whether rounding was found to move this place by any amount; False where no bound was needed."""
        return self._moved is not None and math.isinf(self.at(where, step))

    def at(self, where: tuple[str, str], step: int) -> float:
        """The bound; infinite where the place decides nothing."""
        if self._moved is None:
            self._moved = defaultdict(list)
            for other, later in self._nudged():
                for mine, theirs in self._course.paired(other):
                    for place, gap in _apart_by_place(mine, theirs):
                        self._moved[place].append((mine.number + later, gap))
        largest = max((gap for at, gap in self._moved.get(where, ()) if at <= step), default=0.0)
        bound = max(self.least, self._times * largest)
        return math.inf if bound > UNDECIDED else bound


def _apart_by_place(mine: Step, theirs: Step) -> Iterator[tuple[tuple[str, str], float]]:
    for kind, own, others in (
        ("gradient", mine.gradients, theirs.gradients),
        ("weights", mine.weights, theirs.weights),
    ):
        for name in own.keys() & others.keys():
            yield (kind, name), distance(own[name], others[name])
    for a, b in zip(mine.losses, theirs.losses, strict=False):
        yield ("loss", ""), number_distance(a, b)
    for call, same in zip(mine.calls or (), theirs.calls or (), strict=False):
        if call.path == same.path:
            yield ("gave", call.path), distance(call.gave, same.gave)
            yield ("given", call.path), distance(call.given, same.given)


@dataclass(frozen=True, slots=True)
class First:
    """Where two courses differ first."""

    stage: Literal["data", "output", "loss", "gradient", "lr", "update", "buffer"]
    step: Step
    before: Step
    """The same step of the baseline."""
    names: tuple[str, ...]
    """What differs at this place, by its names now: parameters, buffers, a module, the path of a batch."""
    agree: tuple[str, ...] = ()
    """What does not."""
    old: float = 0.0
    new: float = 0.0
    """Norms or values of the name that differs most."""
    gap: float = 0.0
    """Its relative difference."""
    bound: float = 0.0
    ratio: float | None = None
    """The factor between new and old, where it is one for all names."""
    text: str = ""
    """Of data, how they differ."""
    rows: str = ""
    """Of data, how the rows of all batches compare; empty where the rows differ."""
    calls: tuple[Call, Call] | None = None
    """Of an output, the call of the baseline and the one now."""
    times: tuple[int, int] = (1, 1)
    """How many times a step it was called in the baseline, and is now."""
    given_too: bool = False
    """Whether the input of the module differs too: then the change is before it."""
    inside: str | None = None
    """The innermost module that calls it and whose input does not differ; None: the loop passes something else to the
    model."""
    gone: tuple[str, ...] = ()
    """Of a loss, modules that the baseline calls, and that are there but no longer called."""
    options: tuple[tuple[str, str, str], ...] = ()
    """What the layer that differs was built with: name, in the baseline, now."""


class Comparison:
    """Two courses in one precision, with the names that the first has in the second."""

    def __init__(self, old: Course, new: Course, names: Names, bounds: Bounds) -> None:
        self.old, self.new, self.names, self.bounds = old, new, names, bounds
        self._only: dict[tuple[int, int], frozenset[str]] = {}
        """Of a pair of steps that are counted by optimizer, the tensors that both of their optimizers hold."""
        self.pairs = self._paired()
        self._top_lr = max((lr for step in old.steps for lr in step.lrs), default=0.0)

    def _paired(self) -> list[tuple[Step, Step]]:
        """The steps of both that belong together: by number where the optimizers take turns as they did, or a loop
        builds a new one now and then; else the same round of two optimizers."""
        shared = same_optimizers(self.old, self.new, self.names)
        now = {index: number for index, number, _ in shared}
        theirs, ours = ([step.optimizer for step in course.steps] for course in (self.old, self.new))
        made_anew = any(a[0] == b[0] and a[2] & b[2] for a, b in itertools.combinations(shared, 2))
        turns = zip((now.get(index, index) for index in theirs), ours, strict=False)
        # optimizers that swap places in the list: the numbers of the steps agree, and their optimizers do not
        # (refactor: optimizers_take_turns_otherwise)
        kept = {index for index, number, _ in shared if index == number} >= now.keys()
        if (ours == theirs and kept) or made_anew or all(a == b for a, b in turns):
            return list(self.old.paired(self.new))
        pairs = []
        for index, number, own in shared:
            before = (step for step in self.old.steps if step.optimizer == index)
            after = (step for step in self.new.steps if step.optimizer == number)
            for a, b in zip(before, after, strict=False):
                self._only[a.number, b.number] = own
                pairs.append((a, b))
        return sorted(pairs, key=lambda pair: pair[1].number)

    def first(self) -> First | None:
        """The first difference in training, with what comes before it in the same step and was the same in the steps
        before; None where training is the same."""
        for before, step in self.pairs:
            found = self._tensors("gradient", before, step) or self._lrs(before, step)
            if found is None and (found := self._tensors("weights", before, step)) is not None:
                own = tuple(name for name in found.names if name in self.new.parameters)
                found = replace(found, stage="update" if own else "buffer", names=own or found.names)
            if found is not None:
                return found if found.stage == "lr" else self._traced_back(found)
        return None

    def first_gradient(self) -> First | None:
        """The difference in the gradient of the first step, where that is more than rounding makes of the gradient of
        all parameters together: for a precision in which later steps have no digits left to compare."""
        for before, step in self.pairs[:1]:
            whole = math.sqrt(sum(digest.squares for digest in step.gradients.values()))
            found = self._tensors("gradient", before, step, whole=whole)
            return None if found is None else self._traced_back(found)
        return None

    def loss_alone(self) -> First | None:
        """The first loss that has another value; of courses whose training is the same."""
        return next(filter(None, (self._loss(before, step) for before, step in self.pairs)), None)

    def decides_nothing(self) -> bool:
        """Whether rounding moves every gradient of the first step by any amount."""
        gradients = self.pairs[0][1].gradients if self.pairs else {}
        return bool(gradients) and all(self.bounds.is_open(("gradient", name), 1) for name in gradients)

    def gradients_apart(self) -> dict[str, dict[int, float]]:
        """By parameter and step how far the gradients differ, relative to their own size; for pictures."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for before, step in self.pairs:
            for match, a, b in self._digests("gradient", before, step):
                for name in match.new:
                    found[name][step.number] = distance(a, b)
        return dict(found)

    def _traced_back(self, found: First) -> First:
        before, step = found.before, found.step
        if found.stage == "buffer":
            found = replace(found, options=self._options(owner(found.names[0])))
        base = replace(found, ratio=None)
        if (data := _first_data(self.old.since(before), self.new.since(step))) is not None:
            path, text, gap = data
            return replace(base, stage="data", names=(path,), text=text, gap=gap, rows=self._rows(path))
        if (call := self._call(base)) is not None:
            return call
        loss = self._loss(before, step)
        return found if loss is None else replace(loss, gone=self._no_longer_called())

    def _loss(self, before: Step, step: Step) -> First | None:
        if not before.losses or not step.losses:
            return None
        a, b = sum(before.losses), sum(step.losses)
        gap = number_distance(a, b)
        if not self.bounds.exceeded(gap, ("loss", ""), step.number):
            return None
        bound = self.bounds.at(("loss", ""), step.number)
        return First("loss", step, before, ("loss",), (), a, b, gap, bound, b / a if a else None)

    def _tensors(
        self, kind: Literal["gradient", "weights"], before: Step, step: Step, whole: float | None = None
    ) -> First | None:
        """The tensors that differ, relative to their own size or to that of the ``whole``."""
        differ: list[tuple[Match, float, float, float]] = []
        agree: list[str] = []
        for match, a, b in self._digests(kind, before, step):
            gap = distance(a, b)
            if whole is not None:
                gap *= max(a.norm, b.norm) / whole if whole else 0.0
            if all(self.bounds.exceeded(gap, (kind, name), step.number) for name in match.new):
                differ.append((match, a.norm, b.norm, gap))
            else:
                agree += match.new
        if not differ:
            return None
        match, old, new, gap = max(differ, key=lambda entry: entry[3])
        factors = [b / a for _, a, b, _ in differ if a and b]
        one_factor = len(factors) == len(differ) and max(factors) - min(factors) <= 1e-6 * abs(factors[0])
        names = tuple(name for one, *_ in differ for name in one.new)
        bound = max(self.bounds.at((kind, name), step.number) for name in match.new)
        ratio = factors[0] if one_factor else None
        return First("gradient", step, before, names, tuple(agree), old, new, gap, bound, ratio)

    def _digests(self, kind: str, before: Step, step: Step) -> Iterator[tuple[Match, Digest, Digest]]:
        """Digests of both; a gradient that is not there counts as zero where the other one is."""
        mine, theirs = (before.gradients, step.gradients) if kind == "gradient" else (before.weights, step.weights)
        only = self._only.get((before.number, step.number))
        for match in self.names.matches if mine else ():  # else the file keeps none of this step
            known = any(name in mine for name in match.old), any(name in theirs for name in match.new)
            if (only is None or only.issuperset(match.new)) and (all(known) or (any(known) and kind == "gradient")):
                yield (match, *match.digests(mine, theirs))

    def _lrs(self, before: Step, step: Step) -> First | None:
        mine, theirs = _lrs_of(self.old, before), _lrs_of(self.new, step)
        both = [(a, b) for a, b in self.names.pairs if a in mine and b in theirs]
        other = [(a, b) for a, b in both if number_distance(mine[a], theirs[b], self._top_lr) > LR_DIFFERENCE]
        if not other:
            return None
        old, new = mine[other[0][0]], theirs[other[0][1]]
        names, gap = tuple(dict.fromkeys(b for _, b in other)), number_distance(old, new, self._top_lr)
        return First("lr", step, before, names, (), old, new, gap, LR_DIFFERENCE, new / old if old else None)

    def _call(self, base: First) -> First | None:
        """The first call of a module, of those that both have, that gave something else; children come before parents.
        Modules that gave something else in an earlier step already, when training was the same, are left out."""
        before, step, bounds = base.before, base.step, self.bounds
        if before.calls is None or step.calls is None:
            return None
        unlike = {
            new.path
            for a, b in self.pairs
            if b.number < step.number
            for old, new, times in self._calls(a, b)
            if bounds.exceeded(_call_apart(old.gave, new.gave, times), ("gave", new.path), b.number)
        }
        agree: dict[str, None] = {}
        pairs = self._calls(before, step)
        for place, (old, new, times) in enumerate(pairs):
            gap = _call_apart(old.gave, new.gave, times)
            if new.path in unlike:
                continue
            if not bounds.exceeded(gap, ("gave", new.path), step.number):
                agree.setdefault(new.path)
                continue
            others = [(distance(old.gave, o.gave), o.path) for o in step.calls if old.kind != new.kind]
            if any(not bounds.exceeded(gap, ("gave", path), step.number) for gap, path in others):
                continue  # modules without weights changed places: another one gives this now
            around = (
                later.path
                for was, later, _ in pairs[place + 1 :]
                if new.path.startswith(f"{later.path}.") or (later.path == later.kind and "." not in later.path)
                if not bounds.exceeded(distance(was.given, later.given), ("given", later.path), step.number)
            )
            given = _call_apart(old.given, new.given, times)
            return replace(
                base,
                stage="output",
                names=(new.path,),
                calls=(old, new),
                times=times,
                gap=gap,
                agree=tuple(agree),
                bound=bounds.at(("gave", new.path), step.number),
                given_too=bounds.exceeded(given, ("given", new.path), step.number),
                inside=next(around, None),
                options=self._options(new.path, old.path),
            )
        return None

    def _calls(self, before: Step, step: Step) -> list[tuple[Call, Call, tuple[int, int]]]:
        """The calls of one module, in the order of those now, with the times that it is called. A module that is called
        another number of times in a step is compared by the sum of its calls."""
        was, now = before.calls or (), step.calls or ()
        queues: dict[str, list[Call]] = defaultdict(list)
        for call in was:
            queues[self.names.now(call.path)].append(call)
        counted, called = {path: len(own) for path, own in queues.items()}, Counter(plain(call.path) for call in now)
        found, done = [], set()
        for call in now:
            path = plain(call.path)
            if not queues[path] or path in done:
                continue
            times = counted[path], called[path]
            if times[0] == times[1]:
                found.append((queues[path].pop(0), call, times))
            else:
                done.add(path)
                found.append((_summed(queues[path]), _summed([c for c in now if plain(c.path) == path]), times))
        return found

    def _no_longer_called(self) -> tuple[str, ...]:
        """Modules that hold tensors, by their paths now, that no step calls any more: the outermost ones."""
        both = [(a.calls, b.calls) for a, b in self.pairs if a.calls is not None and b.calls is not None]
        called = {plain(call.path) for _, calls in both for call in calls}
        silent = [
            path
            for path in dict.fromkeys(self.names.now(call.path) for calls, _ in both for call in calls)
            if not any(other == path or other.startswith(f"{path}.") for other in called)
            and any(plain(name).startswith(f"{path}.") for name in self.new.tensors)
        ]
        return tuple(path for path in silent if not any(path.startswith(f"{other}.") for other in silent))

    def _options(self, path: str, before: str = "") -> tuple[tuple[str, str, str], ...]:
        """What a layer of torch's own was built with, where that is another number or switch: ``p`` of a dropout."""
        then = before or next((a for a, b in self.names.modules.items() if b == path), path)
        was, now = (
            dict(_OPTION.findall(layers.get(own, "")))
            for layers, own in ((self.old.layers, then), (self.new.layers, path))
        )
        return tuple((name, was[name], value) for name, value in now.items() if was.get(name, value) != value)

    def _rows(self, path: str) -> str:
        """Of batches that differ, whether they are made of the same rows in another order: then the sums over some
        first batches, an epoch, are the same."""
        one, other = (
            [leaf.values for batch in c.batches for leaf in batch if leaf.path == path] for c in (self.old, self.new)
        )
        for number in range(2, min(len(one), len(other)) + 1):
            a, b = sum_of(one[:number]).unordered, sum_of(other[:number]).unordered
            if a.total is not None and distance(a, b) <= DATA:
                return (
                    f"the first {number} batches have the same values in another order: the order of the rows differs"
                )
        return ""


def same_optimizers(old: Course, new: Course, names: Names) -> list[tuple[int, int, frozenset[str]]]:
    """Optimizers of both that hold tensors in common, by number, with these tensors by their names now."""
    held = [{b for a, b in names.pairs if a in optimizer.options_of()} for optimizer in old.optimizers]
    return [
        (index, number, frozenset(own & set(other.options_of())))
        for index, own in enumerate(held)
        for number, other in enumerate(new.optimizers)
        if own & set(other.options_of())
    ]


def _lrs_of(course: Course, step: Step) -> dict[str, float]:
    """The learning rate of each parameter at a step."""
    groups = course.optimizers[step.optimizer].groups if step.optimizer < len(course.optimizers) else ()
    return {name: lr for group, lr in zip(groups, step.lrs, strict=False) for name in group.parameters}


def _summed(calls: Sequence[Call]) -> Call:
    return replace(calls[0], given=sum_of(c.given for c in calls), gave=sum_of(c.gave for c in calls))


def _call_apart(old: Digest, new: Digest, times: tuple[int, int]) -> float:
    """How far what a module gave in a step is from what it gave; called more often it may give the rows in parts, or
    the same each time."""
    gap = distance(old, new)
    if times[0] == times[1] or not all(times):
        return gap
    factor = times[1] / times[0]
    repeated = Digest(old.squares * factor, None if old.total is None else old.total * factor)
    return min(gap, distance(repeated, new.unordered))


def _first_data(old: Sequence[Sequence[Leaf]], new: Sequence[Sequence[Leaf]]) -> tuple[str, str, float] | None:
    """Path, difference in words and in size of the first tensor that differs between the batches of one step; None
    where they are the same, also in another number of micro-batches or under other names."""
    if not old or not new:
        return None
    if len(old) == len(new):
        return next(filter(None, (_batch(a, b) for a, b in zip(old, new, strict=True))), None)
    return _batch(_joined(old), _joined(new), joined=True)


def _batch(old: Sequence[Leaf], new: Sequence[Leaf], *, joined: bool = False) -> tuple[str, str, float] | None:
    known, paths = {leaf.path: leaf for leaf in old}, {leaf.path for leaf in new}
    if len(old) == len(new) and paths != set(known):
        known = {now.path: leaf for leaf, now in zip(old, new, strict=True)}  # a dict in place of a tuple
    for leaf in new:
        before = known.get(leaf.path)
        if before is None:
            continue  # a field that nothing had before: what reads it tells
        if not joined and before.shape != leaf.shape:
            return leaf.path, f"shape {tuple(leaf.shape)} (in the baseline {tuple(before.shape)})", 0.0
        floating = [one.dtype.startswith(("float", "bfloat", "complex")) for one in (before, leaf)]
        if floating[0] != floating[1]:
            return leaf.path, f"{leaf.dtype} (in the baseline {before.dtype})", 0.0
        gap = distance(before.values, leaf.values)
        if gap > DATA:
            moved = distance(sum_of([before.values]), sum_of([leaf.values])) <= DATA
            return leaf.path, "the same values in another order" if moved else "other values", gap
    gone = [path for path in known if path not in paths]
    return (gone[0], "the baseline has it, and the batch no longer does", 0.0) if gone else None


def _joined(batches: Sequence[Sequence[Leaf]]) -> list[Leaf]:
    """The batches of one step as one, by path."""
    parts: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in itertools.chain.from_iterable(batches):
        parts[leaf.path].append(leaf)
    return [replace(own[0], values=sum_of(leaf.values for leaf in own)) for own in parts.values()]
