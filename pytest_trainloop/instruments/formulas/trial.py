"""An experiment: train the outputs of a loop's layers along its own loss, and watch what a textbook form is for.

See docs/how-it-decides.md#losses-written-by-hand. A form is only recognised; whether the loss does what a cause says is
tried. The outputs take steps along the gradient of all that the loop backpropagates in the step, in float64, from the
outputs of the run and from others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.instruments.formulas.cut import UNBOUNDED, other, slope
from pytest_trainloop.instruments.tracing.loss_slice import CannotReplay

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.instruments.tracing.loss_slice import Slice, Value

TRIAL_STEPS = 40
"""Gradient steps from each start."""

STARTS = 3
"""The outputs of the run, and others drawn in their range."""

LEAST_SHARE = 1e-2
"""Entries whose gradient is below this share of the largest one stay: where the loss gives none, what is left is that
of a regulariser."""

DISTINCT = 12
"""Steps to the start that a mistake needs."""

Outputs = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a form is for: a quantity, computed from the form's arguments, of which less is better (``rises``: more)."""

    name: str
    of: Callable[..., torch.Tensor | None]
    rises: bool = False
    best: float | None = None
    """What it is at best; else that is found by training on it, or on ``book``."""
    book: Callable[..., torch.Tensor | None] | None = None
    """The textbook's cost, where that is not the quantity."""
    groups: bool = False
    """Whether it is a number for each of several groups of entries: one that gets worse is enough."""
    start: Callable[..., torch.Tensor | None] | None = None
    """What outputs are trained on before, to get to where the mistake counts."""
    held: tuple[int, ...] = ()
    """Arguments that stay as they are."""
    endless: bool = False
    """Whether it is to get worse without end: as many steps again make it worse by at least as much again."""
    shared: bool = False
    """Whether all rows get one output: with an output for each row any spread is 0 at best."""
    of_value: bool = False
    """Whether the quantity is computed from the value that the form agreed with, and not from the arguments."""
    parallel: bool = False
    """Whether the value is to have no other direction than that of the quantity, whose gradient is compared."""
    moves: bool = False
    """Whether the quantity is how far the value itself is moved, as an output of its own."""
    alone: bool = False
    """Whether the form is to lead there alone, where the whole loss does: another term may make up for it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment showed: whether the quantity got worse, or did not get better, in numbers."""

    confirmed: bool
    text: str = ""


@dataclass(eq=False)
class Step:
    """All that a loop backpropagates in one step, as a function of outputs of its layers: the loss of ``part``, and
    those of other backward passes that start from the same outputs."""

    part: Slice
    others: Sequence[Slice] = ()
    _same: dict[int, list[tuple[Slice, int]]] = field(default_factory=dict)

    def loss(self, outputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        total = self.part.replay(outputs, [self.part.root])[0].double().sum()
        given: dict[int, tuple[Slice, Outputs]] = {}
        for number, tensor in outputs.items():
            for found, theirs in self._elsewhere(number):
                given.setdefault(id(found), (found, {}))[1][theirs] = tensor
        for found, same in given.values():
            total = total + found.replay(same, [found.root])[0].double().sum()
        return total

    def _elsewhere(self, number: int) -> list[tuple[Slice, int]]:
        if number not in self._same:
            mine = self.part.values[number]
            self._same[number] = [
                (found, v.number)
                for found in self.others
                if found.step == self.part.step and found is not self.part
                for v in found.of_kind("layer")
                if v.parameters == mine.parameters
                and v.tensor.shape == mine.tensor.shape
                and torch.equal(v.tensor, mine.tensor)
            ]
        return self._same[number]


def tried(
    step: Step,
    arguments: Sequence[int],
    value: int,
    aim: Aim,
    numbers: Mapping[str, float] | None = None,
    *,
    shifted: bool = False,
) -> Outcome | None:
    """What comes of training the outputs that ``arguments`` were computed from; None where it cannot be tried.
    ``value`` is what the form agreed with. ``shifted``: it is enough that the loss leaves the outputs that are best."""
    experiment = _Experiment(step, tuple(arguments), value, aim, dict(numbers or {}), shifted)
    try:
        experiment.prepare()
        outcome = experiment.directions() if aim.parallel else experiment.outcome()
        if aim.alone and outcome is not None and not outcome.confirmed and experiment.leave_only_the_value():
            outcome = experiment.outcome()
        return outcome
    except CannotReplay:
        return None


@dataclass(frozen=True, slots=True)
class _Course:
    """The quantity, less of which is better, from one start: there, where the loss led, and at best."""

    before: torch.Tensor
    after: torch.Tensor
    later: torch.Tensor
    """Where as many steps again led, if that is asked for."""
    best: torch.Tensor
    kept: torch.Tensor
    """Where training on the quantity leads, and then where the loss leads from there."""
    further: torch.Tensor
    """Where training on the quantity leads from there."""


@dataclass(eq=False)
class _Experiment:
    step: Step
    arguments: tuple[int, ...]
    value: int
    aim: Aim
    numbers: dict[str, float]
    shifted: bool
    leaves: tuple[Value, ...] = ()
    still: Outputs = field(default_factory=dict)
    """The entries that no step moves."""
    origin: Outputs = field(default_factory=dict)
    weights: torch.Tensor | None = None
    """Of the entries of the value in the loss, where the outputs are trained by it alone."""

    def prepare(self) -> None:
        found = self.step.part
        trained = [self.value] if self.aim.moves else _trainable(found, self.arguments)
        self.leaves = tuple(found.values[n] for n in trained)
        held = [self.arguments[i] for i in self.aim.held]
        self.still = {v.number: _reaches(found, v, held) for v in self.leaves} if held else {}

    def leave_only_the_value(self) -> bool:
        """Train by the value alone from now on, as it is weighted in the loss; whether it has a gradient there."""
        leaf = self.step.part.values[self.value].tensor.double().clone().requires_grad_()
        (root,) = self.step.part.replay({self.value: leaf}, [self.step.part.root])
        self.weights = slope(root, (leaf,))
        return self.weights is not None

    def outcome(self) -> Outcome | None:
        courses = [course for start in range(STARTS) if (course := self._course(start)) is not None]
        if len(courses) < 2:
            return None
        groups = range(courses[0].before.numel())
        for group in groups:
            by = 0.5 if self.aim.best is not None else 0.75
            if all(_worse(c, group, by) and (not self.aim.endless or _goes_on(c, group)) for c in courses):
                return Outcome(True, self._in_words(courses, group, "after"))
        if self.shifted:
            least = min(float((c.before - c.best).sum()) for c in courses)
            for group in groups:
                if all(_left(c, group, least) for c in courses):
                    return Outcome(True, self._in_words(courses, group, "kept"))
        return Outcome(False, self._in_words(courses, 0, "after"))

    def directions(self) -> Outcome | None:
        """Whether the value's gradient has the direction of the quantity's, at all starts."""
        cosines = []
        for index in range(STARTS):
            start = self._start(index)
            mine = _slope(lambda o: self.step.part.replay(o, [self.value])[0].double().sum(), start)
            plain = _slope(self._textbook, start)
            if mine is None or plain is None:
                return None
            cosines.append(float(torch.nn.functional.cosine_similarity(mine, plain, dim=0).abs()))
        parallel = min(cosines) > 1 - 1e-9
        text = (
            f"at {STARTS} starts the gradient is {'' if parallel else 'not '}that of {self.aim.name} times one number"
        )
        return Outcome(parallel, text)

    def _start(self, index: int) -> Outputs:
        tensors = {v.number: v.tensor.double() for v in self.leaves}
        if index:
            tensors = {n: other(t, 100 * index + n, UNBOUNDED) for n, t in tensors.items()}
            for number, still in self.still.items():
                own = next(v.tensor.double() for v in self.leaves if v.number == number)
                tensors[number] = torch.where(still, own, tensors[number])
        if self.aim.shared:
            tensors = {n: t.mean(0, keepdim=True) if t.dim() else t for n, t in tensors.items()}
        return tensors

    def _full(self, outputs: Outputs) -> Outputs:
        """Outputs for all rows."""
        if not self.aim.shared:
            return outputs
        return {
            v.number: torch.where(self.still[v.number], v.tensor.double(), outputs[v.number].expand(v.tensor.shape))
            if v.number in self.still
            else outputs[v.number].expand(v.tensor.shape)
            for v in self.leaves
        }

    def _course(self, index: int) -> _Course | None:
        start, first = self._start(index), self.aim.start
        held = {} if self.aim.shared else self.still
        if first is not None:
            start, _ = descended(lambda o: self._of(first, o).sum(), start, held, DISTINCT)
        self.origin = start
        trained, fell = descended(self._loss, start, held)
        if not (fell or self.aim.moves):
            return None
        again = descended(self._loss, trained, held)[0] if self.aim.endless else trained
        reached = [self._quantity(outputs) for outputs in (start, trained, again)]
        if self.aim.best is not None or self.aim.moves:  # known, and not to be found
            known = self.aim.best or 0.0
            best = torch.tensor([-known if self.aim.rises else known], dtype=torch.float64)
            reached += [best, best, best]
        else:
            taught, _ = descended(self._textbook, start, held)
            further, left = (descended(way, taught, held)[0] for way in (self._textbook, self._loss))
            reached += [self._quantity(outputs) for outputs in (taught, left, further)]
        known_all = [q.cpu() for q in reached if q is not None]
        return _Course(*known_all) if len(known_all) == len(reached) else None

    def _loss(self, outputs: Outputs) -> torch.Tensor:
        if self.weights is not None:
            (made,) = self.step.part.replay(self._full(outputs), [self.value])
            return (made.double().flatten() * self.weights.flatten()).sum()
        return self.step.loss(self._full(outputs))

    def _quantity(self, outputs: Outputs) -> torch.Tensor | None:
        """The quantity as a cost, one number for each group; None where it has none here."""
        try:
            made = self._of(self.aim.of, outputs)
        except CannotReplay:
            return None
        if bool(made.isnan().any()):
            return None
        return -made.detach() if self.aim.rises else made.detach()

    def _textbook(self, outputs: Outputs) -> torch.Tensor:
        made = self._of(self.aim.book or self.aim.of, outputs).sum()
        return -made if self.aim.rises and self.aim.book is None else made

    def _of(self, of: Callable[..., torch.Tensor | None], outputs: Outputs) -> torch.Tensor:
        full = self._full(outputs)
        if self.aim.moves:
            return torch.stack([(full[n] - self.origin[n]).abs().mean() for n in full])
        wanted = [self.value] if self.aim.of_value else list(self.arguments)
        arguments = self.step.part.replay(full, wanted)
        try:
            made = of(*arguments) if self.aim.of_value else of(*arguments, **self.numbers)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CannotReplay("the form refuses these arguments") from error
        if made is None:
            raise CannotReplay("the form takes no such arguments")
        return made.double() if self.aim.groups else made.double().mean().reshape(1)

    def _in_words(self, courses: Sequence[_Course], group: int, last: str) -> str:
        sign = -1.0 if self.aim.rises else 1.0

        def mean(name: str) -> str:
            shown = [sign * float(getattr(c, name)[group]) for c in courses]
            whole = sum(shown) / len(shown)
            return f"{whole if abs(whole) >= 1e-6 else 0.0:.3g}"

        alone = ", by this term alone," if self.weights is not None else ""
        by = f"{TRIAL_STEPS} gradient steps on the outputs{alone} from {len(courses)} starts"
        if last == "kept":
            return (
                f"{TRIAL_STEPS} gradient steps from the outputs that are best by the textbook form, from "
                f"{len(courses)} starts: {self.aim.name} went from {mean('best')} to {mean('kept')}"
            )
        if self.aim.moves:
            return f"{by}: {self.aim.name} moved by {mean('after')}"
        textbook = "the best is" if self.aim.best is not None else "trained on the textbook form it ends at"
        return f"{by}: {self.aim.name} went from {mean('before')} to {mean('after')}; {textbook} {mean('best')}"


def _worse(course: _Course, group: int, by: float) -> bool:
    """Whether the loss made the quantity worse, or left nearly all undone of what the textbook gains (``by``)."""
    before, after, best = (float(t[group]) for t in (course.before, course.after, course.best))
    if math.isinf(after) and after > 0:
        return True
    whole = max(abs(before - best), abs(after - before))
    return whole > 0 and after - best >= by * whole


def _goes_on(course: _Course, group: int) -> bool:
    before, after, later = (float(t[group]) for t in (course.before, course.after, course.later))
    return math.isinf(after) or later - after >= after - before > 0


def _left(course: _Course, group: int, least: float) -> bool:
    """Whether the loss leaves the best outputs."""
    best, kept, further = (float(t[group]) for t in (course.best, course.kept, course.further))
    return kept - best > max(10 * (best - further), 0.01 * least, 1e-6 * abs(best)) or (math.isinf(kept) and kept > 0)


def _trainable(found: Slice, numbers: Sequence[int]) -> list[int]:
    """The outputs of layers that values were computed from, and what has a gradient from nowhere that is known."""
    seen: dict[int, None] = {}
    for number in numbers:
        for n in sorted(found.ancestors(number)):
            value = found.values[n]
            if value.requires_grad and (value.kind == "layer" or (value.kind == "unknown" and value.made_by is None)):
                seen[n] = None
    return list(seen)


def _reaches(found: Slice, leaf: Value, numbers: Sequence[int]) -> torch.Tensor:
    """The entries of an output that these values are computed from."""
    reached = torch.zeros(leaf.tensor.shape, dtype=torch.bool, device=leaf.tensor.device)
    for number in numbers:
        if not found.depends(number, leaf.number):
            continue
        given = leaf.tensor.detach().double().clone().requires_grad_()
        (made,) = found.replay({leaf.number: given}, [number])
        if made.requires_grad:
            (gradient,) = torch.autograd.grad(made.double().sum(), given, allow_unused=True)
            reached |= torch.zeros_like(reached) if gradient is None else gradient != 0
    return reached


def _slope(objective: Callable[[Outputs], torch.Tensor], at: Outputs) -> torch.Tensor | None:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in at.items()}
    value = objective(leaves)
    if not value.requires_grad or not bool(value.isfinite()):
        return None
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.values(), found, strict=True)
    return torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for t, g in pairs])


def descended(
    objective: Callable[[Outputs], torch.Tensor],
    start: Outputs,
    held: Mapping[int, torch.Tensor],
    steps: int = TRIAL_STEPS,
) -> tuple[Outputs, bool]:
    """The outputs after some steps along the gradient's signs, and whether the objective fell.

    An entry's steps grow while the sign of its gradient stays, and are halved where it turns (Rprop): no unit of the
    outputs or of the loss matters. It ends early where the objective is no number.
    """
    at, best = dict(start), dict(start)
    sizes = {n: torch.full_like(t, 0.1 * max(1.0, float(t.std(correction=0)))) for n, t in start.items()}
    signs = {n: torch.zeros_like(t) for n, t in start.items()}
    lowest = first = math.inf
    for count in range(steps + 1):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in at.items()}
        try:
            value = objective(leaves)
        except CannotReplay:
            if not count:
                raise
            break
        now = float(value.detach())
        if math.isnan(now):
            break
        if not count:
            first = now
        if now <= lowest:
            lowest, best = now, at
        if count == steps or math.isinf(now) or not value.requires_grad:
            break
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        slopes = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves.values(), found, strict=True)]
        gradients = dict(zip(leaves, slopes, strict=True))
        largest = max((float(g.abs().nan_to_num(0.0, 0.0, 0.0).max()) for g in slopes if g.numel()), default=0.0)
        for n, gradient in gradients.items():
            sign = torch.where(gradient.abs() >= max(LEAST_SHARE * largest, 1e-300), gradient.sign(), 0.0).nan_to_num(
                0.0
            )
            if n in held:
                sign = torch.where(held[n], torch.zeros_like(sign), sign)
            turned = sign * signs[n]
            sizes[n] = sizes[n] * torch.where(turned > 0, 1.2, torch.where(turned < 0, 0.5, 1.0))
            signs[n] = torch.where(turned < 0, torch.zeros_like(sign), sign)
            at = {**at, n: at[n] - signs[n] * sizes[n]}
    return best, lowest < first
