"""The first step and the first place in which two courses of a loop differ.

The gradients that a step reads, the rates, and the weights and buffers after it are what training is: courses that
agree in these agree. Data, outputs of modules and losses only say where a difference comes from: a refactor may hand
them over in another form, and what differs there while training agrees is no fault.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.baselines.trajectory import Digest
from pytest_trainloop.checks.guard.baseline.bounds import distance, number_distance, sum_of, without_order
from pytest_trainloop.checks.guard.baseline.layers import other_options
from pytest_trainloop.checks.guard.baseline.locating import Data, first_call, first_data, no_longer_called, rows_of
from pytest_trainloop.checks.guard.baseline.names import owner, same_optimizers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.baselines.trajectory import Course, Step
    from pytest_trainloop.checks.guard.baseline.bounds import Bounds
    from pytest_trainloop.checks.guard.baseline.locating import Apart
    from pytest_trainloop.checks.guard.baseline.names import Match, Names

Kind = Literal["data", "output", "loss", "gradient", "rate", "update", "buffer"]

RATE = 1e-9
"""The same schedule, computed by another formula, differs by rounding in Python's float64 over some hundred steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """Where two courses differ first."""

    kind: Kind
    step: Step
    before: Step
    """The same step of the baseline."""
    names: tuple[str, ...]
    """What differs at this place, by its names now: parameters, buffers, a module, the path of a batch."""
    agree: tuple[str, ...] = ()
    """What does not."""
    old: float = 0.0
    new: float = 0.0
    """Norms or values of the first of the names."""
    apart: float = 0.0
    """The relative difference of the first of the names."""
    bound: float = 0.0
    gone: tuple[str, ...] = ()
    """Modules that the baseline calls, and that are there but no longer called; of a difference in the loss."""
    call: Apart | None = None
    options: tuple[tuple[str, str, str], ...] = ()
    """What the first of the modules that differ was built with now and was in the baseline: name, old, new."""
    data: Data | None = None
    ratio: float | None = None
    """The factor between new and old, where it is one for all names."""


class Comparison:
    """Two courses in one precision, with the names that the first has in the second."""

    def __init__(self, old: Course, new: Course, names: Names, bounds: Bounds) -> None:
        self.old, self.new, self.names, self.bounds = old, new, names, bounds
        self._of_pair: dict[tuple[int, int], frozenset[str]] = {}
        self.pairs = self._paired()
        self._top_rate = max((rate for step in old.steps for rate in step.rates), default=0.0)

    def _paired(self) -> list[tuple[Step, Step]]:
        """The steps of both that belong together: by number where the optimizers take turns as they did; else the same
        round of two optimizers, for the tensors that both of them hold."""
        shared = list(same_optimizers(self.old, self.new, self.names))
        now = {index: number for index, number, _ in shared}
        turns = [now.get(step.optimizer, step.optimizer) for step in self.old.steps]
        ours = [step.optimizer for step in self.new.steps]
        theirs = [step.optimizer for step in self.old.steps]
        if ours == theirs or _made_anew(shared) or all(a == b for a, b in zip(turns, ours, strict=False)):
            return list(self.old.paired(self.new))
        pairs = []
        for index, number, own in shared:
            before = [step for step in self.old.steps if step.optimizer == index]
            after = [step for step in self.new.steps if step.optimizer == number]
            for a, b in zip(before, after, strict=False):
                self._of_pair[a.number, b.number] = own
                pairs.append((a, b))
        return sorted(pairs, key=lambda pair: pair[1].number)

    def first(self) -> First | None:
        """The first difference; None where training is the same."""
        for before, step in self.pairs:
            found = self._gradients(before, step) or self._rates(before, step) or self._weights(before, step)
            if found is not None:
                return self._traced_back(found)
        return None

    def gradients_apart(self) -> dict[str, dict[int, float]]:
        """By parameter and step how far the gradients differ, relative to their own size; for what is drawn."""
        found: dict[str, dict[int, float]] = {}
        for before, step in self.pairs:
            for match, a, b in self._digests("gradient", before, step):
                for name in match.new:
                    found.setdefault(name, {})[step.number] = distance(a, b)
        return found

    def decides_nothing(self) -> bool:
        """Whether rounding throws every gradient of the first step anywhere."""
        gradients = self.pairs[0][1].gradients if self.pairs else {}
        return bool(gradients) and all(self.bounds.is_open(("gradient", name), 1) for name in gradients)

    def first_gradient(self) -> First | None:
        """The difference in the gradient of the first step, where that is more than rounding makes of the gradient of
        all parameters together: for a precision in which later steps have no digits left to compare."""
        if not self.pairs:
            return None
        before, step = self.pairs[0]
        whole = sum(digest.squares for digest in step.gradients.values()) ** 0.5
        found = self._tensors("gradient", before, step, whole=whole)
        return None if found is None else self._traced_back(found)

    def loss_alone(self) -> First | None:
        """The first loss that has another value; of courses whose training is the same."""
        return next(filter(None, (self._loss(before, step) for before, step in self.pairs)), None)

    def _traced_back(self, found: First) -> First:
        """What comes before a difference in the same step, and was the same in the steps before."""
        before, step = found.before, found.step
        if found.kind == "rate":
            return found
        if found.kind == "buffer":
            found = replace(found, options=other_options(self.old, self.new, self.names, owner(found.names[0])))
        earlier = [pair for pair in self.pairs if pair[1].number < step.number]
        base = replace(found, ratio=None)
        if (data := first_data(self.old.since(before), self.new.since(step))) is not None:
            data = replace(data, rows=rows_of(self.old, self.new, data.path))
            return replace(base, kind="data", names=(data.path,), data=data, apart=data.apart)
        if (call := first_call(before, step, earlier, self.names, self.bounds)) is not None:
            bound = self.bounds.at(("gave", call.path), step.number)
            return replace(
                base,
                kind="output",
                names=(call.path,),
                call=call,
                apart=call.apart,
                agree=call.agree,
                bound=bound,
                options=other_options(self.old, self.new, self.names, call.path, call.old.path),
            )
        loss = self._loss(before, step)
        return found if loss is None else replace(loss, gone=no_longer_called(self.pairs, self.names, self.new))

    def _loss(self, before: Step, step: Step) -> First | None:
        if not before.losses or not step.losses:
            return None
        a, b = sum(before.losses), sum(step.losses)
        apart = number_distance(a, b)
        if not self.bounds.exceeded(apart, ("loss", ""), step.number):
            return None
        bound = self.bounds.at(("loss", ""), step.number)
        ratio = b / a if a else None
        return First(
            kind="loss", step=step, before=before, names=("loss",), old=a, new=b, apart=apart, bound=bound, ratio=ratio
        )

    def _gradients(self, before: Step, step: Step) -> First | None:
        return self._tensors("gradient", before, step)

    def _weights(self, before: Step, step: Step) -> First | None:
        found = self._tensors("weights", before, step)
        if found is None:
            return None
        stepped = {name for match in self.names.matches for name in match.new if name in self.new.parameters}
        own = tuple(name for name in found.names if name in stepped)
        if own:
            return replace(found, kind="update", names=own)
        return replace(found, kind="buffer")

    def _tensors(
        self, kind: Literal["gradient", "weights"], before: Step, step: Step, whole: float | None = None
    ) -> First | None:
        """The tensors that differ, relative to their own size or to that of the ``whole``."""
        differ: list[tuple[Match, float, float, float]] = []
        agree: list[str] = []
        for match, a, b in self._digests(kind, before, step):
            apart = distance(a, b)
            if whole is not None:
                apart *= max(a.norm, b.norm) / whole if whole else 0.0
            if all(self.bounds.exceeded(apart, (kind, name), step.number) for name in match.new):
                differ.append((match, a.norm, b.norm, apart))
            else:
                agree += match.new
        if not differ:
            return None
        match, old, new, apart = max(differ, key=lambda entry: entry[3])
        return First(
            kind="gradient",
            step=step,
            before=before,
            names=tuple(name for one, *_ in differ for name in one.new),
            agree=tuple(agree),
            old=old,
            new=new,
            apart=apart,
            bound=max(self.bounds.at((kind, name), step.number) for name in match.new),
            ratio=_one_factor([(a, b) for _, a, b, _ in differ]),
        )

    def _digests(
        self, kind: Literal["gradient", "weights"], before: Step, step: Step
    ) -> Iterator[tuple[Match, Digest, Digest]]:
        """Digests of both; a gradient that is not there counts as zero where the other one is."""
        mine, theirs = (before.gradients, step.gradients) if kind == "gradient" else (before.weights, step.weights)
        if not mine:
            return  # the file keeps none of this step
        none = Digest(squares=0.0, total=0.0, ordered=0.0, by_row=0.0)
        only = self._of_pair.get((before.number, step.number))
        for match in self.names.matches:
            if only is not None and not only.issuperset(match.new):
                continue
            known = any(name in mine for name in match.old), any(name in theirs for name in match.new)
            if not any(known) or (kind == "weights" and not all(known)):
                continue
            a = [mine.get(name, none) for name in match.old]
            b = [theirs.get(name, none) for name in match.new]
            if match.ordered:
                yield match, a[0], b[0]
            else:
                yield match, without_order(sum_of(a)), without_order(sum_of(b))

    def _rates(self, before: Step, step: Step) -> First | None:
        mine, theirs = rates_of(self.old, before), rates_of(self.new, step)
        for match in self.names.matches:
            for a, b in ((a, b) for a in match.old for b in match.new):
                if a not in mine or b not in theirs:
                    continue
                apart = number_distance(mine[a], theirs[b], self._top_rate)
                if apart > RATE:
                    return First(
                        kind="rate",
                        step=step,
                        before=before,
                        names=self._of_other_rates(mine, theirs),
                        old=mine[a],
                        new=theirs[b],
                        apart=apart,
                        bound=RATE,
                        ratio=theirs[b] / mine[a] if mine[a] else None,
                    )
        return None

    def _of_other_rates(self, mine: dict[str, float], theirs: dict[str, float]) -> tuple[str, ...]:
        limit = RATE * self._top_rate
        return tuple(
            name
            for match in self.names.matches
            for name in match.new
            if name in theirs and any(abs(mine.get(old, theirs[name]) - theirs[name]) > limit for old in match.old)
        )


def _made_anew(shared: Sequence[tuple[int, int, frozenset[str]]]) -> bool:
    """Whether two optimizers of one course hold the same tensors, as those of a loop that builds a new one now and
    then: their steps follow one another."""
    return any(a[0] == b[0] and a[2] & b[2] for a, b in itertools.combinations(shared, 2))


def rates_of(course: Course, step: Step) -> dict[str, float]:
    """The learning rate of each parameter at a step."""
    if step.optimizer >= len(course.optimizers):
        return {}
    groups = course.optimizers[step.optimizer].groups
    return {name: rate for group, rate in zip(groups, step.rates, strict=False) for name in group.parameters}


def _one_factor(norms: list[tuple[float, float]]) -> float | None:
    """The factor between the norms, where all have the same."""
    if any(a == 0 or b == 0 for a, b in norms):
        return None
    factors = [b / a for a, b in norms]
    return factors[0] if max(factors) - min(factors) <= 1e-6 * abs(factors[0]) else None
