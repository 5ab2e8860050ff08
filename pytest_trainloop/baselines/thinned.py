"""What a file keeps of a trajectory, so that it stays small enough to read in review.

Losses and rates are kept at every step. Of tensors four numbers are kept at some steps and the norm at others, at the
fewer the more tensors there are; of calls of modules all numbers at the first steps. In the loop's own precision, which
is compared on one kind of machine only, the gradients of the first step are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_trainloop.baselines.trajectory import IN_FULL, LATER, Course, Digest, Step, Trajectory

NUMBERS = 4_000
"""Numbers of gradients, updates and weights that are kept at most, where fewer steps are enough for that."""

CALL_NUMBERS = 800
"""The same of calls of modules."""

ALL = (*range(1, IN_FULL + 1), *LATER)


@dataclass(frozen=True, slots=True)
class Kept:
    """The steps at which tensors are kept."""

    whole: frozenset[int]
    """With all numbers of a digest."""
    norms: frozenset[int]
    """With their norms alone."""

    @property
    def numbers(self) -> int:
        """The numbers of one tensor: two digests and an update, or three norms, a step."""
        return 9 * len(self.whole) + 3 * len(self.norms)


def _kept(whole: tuple[int, ...], norms: tuple[int, ...]) -> Kept:
    return Kept(frozenset(whole), frozenset(norms) - frozenset(whole))


LADDER = (
    _kept((1, 2, 3, IN_FULL), ALL),
    _kept((1, 2, IN_FULL), (3, 4, 6, 8, 10, LATER[-1])),
    _kept((1, IN_FULL), (2, 4, LATER[-1])),
    _kept((1,), (2, IN_FULL)),
    _kept((), (1, IN_FULL)),
)
"""From small models to large ones."""

OWN = _kept((1,), ())


def thinned(trajectory: Trajectory) -> Trajectory:
    """The trajectory as its file has it."""
    double = None if trajectory.double is None else _course(trajectory.double, _steps_of(trajectory.double))
    own = _course(trajectory.own, OWN) if double is not None else _course(trajectory.own, _steps_of(trajectory.own))
    if double is not None:
        own = replace(own, steps=tuple(replace(step, updates={}, weights={}) for step in own.steps))
    return replace(trajectory, double=double, own=own)


def _steps_of(course: Course) -> Kept:
    count = len(course.tensors) * max(1, len({step.optimizer for step in course.steps}))
    return next((kept for kept in LADDER if kept.numbers * count <= NUMBERS), LADDER[-1])


def _course(course: Course, kept: Kept) -> Course:
    made: dict[int, int] = {}
    calls = _steps_with_calls(course, kept)
    steps = []
    for step in course.steps:
        made[step.optimizer] = made.get(step.optimizer, 0) + 1
        steps.append(_step(step, made[step.optimizer], kept, keeps_calls=step.number in calls))
    return replace(course, steps=tuple(steps))


def _steps_with_calls(course: Course, kept: Kept) -> frozenset[int]:
    counts = {step.number: 8 * len(step.calls or ()) for step in course.steps}
    first = next(iter(counts), 1)
    wanted = [first] if kept is OWN else [*list(counts)[:3], *(n for n in (IN_FULL,) if n in counts)]
    most = [
        number for place, number in enumerate(wanted) if sum(counts[n] for n in wanted[: place + 1]) <= CALL_NUMBERS
    ]
    return frozenset(most or [first])


def _step(step: Step, number: int, kept: Kept, *, keeps_calls: bool) -> Step:
    calls = step.calls if keeps_calls else None
    if number in kept.whole:
        return replace(step, calls=calls)
    if number not in kept.norms:
        return replace(step, calls=calls, gradients={}, updates={}, weights={})
    return replace(
        step,
        calls=calls,
        gradients={name: Digest(digest.squares) for name, digest in step.gradients.items()},
        weights={name: Digest(digest.squares) for name, digest in step.weights.items()},
    )
