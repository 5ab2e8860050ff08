"""What moved apart from the numbers: parameters, who steps them and by which options, schedulers and calls.

A fact is the cause of a difference in training where it can make that difference at the place where it is seen first.
One that cannot be seen within the recorded steps is a fault where it must show later (a parameter that is no longer
stepped, a schedule that is gone), and else says nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.names import same_optimizers
from pytest_trainloop.recording.plain_names import plain
from pytest_trainloop.wording import be, count, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.baselines.trajectory import Course, Tensor
    from pytest_trainloop.checks.guard.baseline.first import First, Kind
    from pytest_trainloop.checks.guard.baseline.names import Names

IMPLEMENTATION = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "name",
)
"""Options that say how a step is computed, or that schedulers note for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is another one than in the baseline."""

    cause: str
    culprits: tuple[str, ...]
    summary: str
    measured: str
    kinds: frozenset[Kind]
    """The kinds of places at which it can make the first difference."""
    only: bool = False
    """Whether it makes a difference to its culprits alone."""
    alone: bool = False
    """Whether it is a fault without a difference within the recorded steps."""
    shown: str = ""
    """What shows it, where no difference in the steps does."""
    repair: str = ""
    where: str = ""
    unseen: str = ""
    """Why the recorded steps cannot show it, of what is said all the same, as a note."""

    def accounts_for(self, first: First) -> bool:
        """Whether it can be what made the first difference."""
        if first.kind not in self.kinds:
            return False
        return not self.only or first.kind == "output" or set(first.names) <= set(self.culprits)


def facts(old: Course, new: Course, names: Names) -> list[Fact]:
    """The facts, those first that others may follow from."""
    found = [*_parameters(old, new, names), *_trained(old, new, names), *_held(old, new, names), *_consumed(old, new)]
    kinds = list(_optimizers(old, new, names))
    return [*found, *kinds, *([] if kinds else _options(old, new, names))]


def _parameters(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    every: frozenset[Kind] = frozenset({"output", "loss", "gradient", "update", "buffer"})
    gone = [name for name in names.gone if name in old.parameters and _used(old, name)]
    stale = {name for _, others in _replaced(old, new, names) for name in others}
    came = [name for name in names.came if name in new.parameters and _used(new, name) and name not in stale]
    if other := [name for name in came if name in old.parameters and name in gone]:
        gone, came = ([name for name in own if name not in other] for own in (gone, came))
        a, b = old.tensors[other[0]], new.tensors[other[0]]
        more = "" if len(other) == 1 else f", and {count(len(other) - 1, 'more parameter')} another one"
        yield Fact(
            cause="parameters_differ",
            culprits=tuple(other),
            summary=f"{other[0]} has shape {tuple(b.shape)} where the baseline has {tuple(a.shape)}{more}",
            measured=f"{math.prod(b.shape)} entries, {math.prod(a.shape)} in the baseline",
            kinds=every,
            alone=True,
        )
    for name, tensor in [(name, new.tensors[name]) for name in came]:
        if partner := _tied(name, tensor, old):
            came.remove(name)
            yield Fact(
                cause="parameters_differ",
                culprits=(name, *names.now(partner)),
                summary=f"{name} is a tensor of its own; in the baseline it is {partner}, under a second name",
                measured=f"{count(len(new.parameters), 'parameter')}, {len(old.parameters)} in the baseline",
                kinds=every,
                alone=True,
                repair=f"tie the two again: {name} = {partner}",
            )
    for name, tensor in [(name, old.tensors[name]) for name in gone]:
        if partner := _tied(name, tensor, new):
            gone.remove(name)
            yield Fact(
                cause="parameters_differ",
                culprits=(name, partner),
                summary=f"{name} is {partner} under a second name; in the baseline it is a tensor of its own",
                measured=f"{count(len(new.parameters), 'parameter')}, {len(old.parameters)} in the baseline",
                kinds=every,
                alone=True,
            )
    joined = {name: parts for name in came if (parts := _as_many(name, new, gone, old))}
    if joined:
        came = [name for name in came if name not in joined]
        gone = [name for name in gone if not any(name in parts for parts in joined.values())]
        name, parts = next(iter(joined.items()))
        more = "" if len(joined) == 1 else f"; {count(len(joined) - 1, 'more tensor')} likewise"
        yield Fact(
            cause="parameters_differ",
            culprits=(*joined, *(part for own in joined.values() for part in own)),
            summary=f"{name} {list(new.tensors[name].shape)} has as many entries as {' + '.join(parts)}, and other "
            f"random numbers{more}",
            measured=f"{math.prod(new.tensors[name].shape)} entries, in {len(parts)} tensors of the baseline",
            kinds=every,
            alone=True,
            repair=f"copy the old weights in to compare the steps: {name} = torch.cat([{', '.join(parts)}])",
        )
    if gone or came:
        parts = [f"{some(gone)} {be(gone)} gone"] if gone else []
        parts += [f"{some(came)} {be(came)} new"] if came else []
        yield Fact(
            cause="parameters_differ",
            culprits=(*came, *gone),
            summary=", ".join(parts),
            measured=f"{count(len(new.parameters), 'parameter')}, {len(old.parameters)} in the baseline; no other name "
            "holds their values",
            kinds=every,
            alone=True,
        )


def _used(course: Course, name: str) -> bool:
    """Whether a parameter trains: a copy that averages others, or a frozen one, may come and go."""
    held = any(name in optimizer.options_of() for optimizer in course.optimizers)
    return held or any(name in step.gradients for step in course.steps)


def _as_many(name: str, new: Course, gone: list[str], old: Course) -> list[str]:
    """Neighbours among the tensors that are gone, of one shape, that together have the shape of a new one."""
    shape = new.tensors[name].shape
    for place, first in enumerate(gone):
        part = old.tensors[first].shape
        if len(part) != len(shape) or part[1:] != shape[1:] or not part or shape[0] % part[0] or shape == part:
            continue
        parts = gone[place : place + shape[0] // part[0]]
        if len(parts) == shape[0] // part[0] and all(old.tensors[other].shape == part for other in parts):
            return parts
    return []


def _tied(name: str, tensor: Tensor, other: Course) -> str:
    """The tensor of the other course that has this one's name as a second one."""
    own = {plain(alias) for alias in (name, *tensor.also)}
    return next((n for n, t in other.parameters.items() if own & {plain(alias) for alias in t.also}), "")


def _consumed(old: Course, new: Course) -> Iterator[Fact]:
    """Rows and steps: the same batch, given again and again, makes the same steps in twice the number."""
    rows, before = _rows_a_step(new), _rows_a_step(old)
    if missing := _missing(old, new):
        every = old.steps[0].batches
        numbers = [str(number) for number in missing]
        after = "each" if every == 1 else f"every {every}"
        due = count(len(new.steps) + len(missing), "update")
        yield Fact(
            cause="calls_differ",
            culprits=("step()",),
            summary=f"{len(missing)} of {due} {be(numbers)} missing: no step follows "
            f"batch{'' if len(missing) == 1 else 'es'} {some(numbers, most=4)}",
            measured=f"{count(len(new.steps), 'step')} for {count(new.steps[-1].batches, 'batch')}; in the baseline "
            f"one after {after}",
            kinds=frozenset({"data", "output", "loss", "gradient", "update", "buffer"}),
            alone=True,
            where=new.steps[0].where,
            repair="step the optimizer after each batch, as in the baseline",
        )
    elif before and rows and not 1 / MORE < rows / before < MORE:
        yield Fact(
            cause="data_differs",
            culprits=("batch",),
            summary=f"a step takes {rows:.4g} rows; in the baseline {before:.4g}",
            measured=f"{rows:.4g} rows a step against {before:.4g}, over {count(len(new.steps), 'step')}",
            shown="its batches are equal here, so each step is the same: of batches that differ it is another one",
            kinds=frozenset({"data", "output", "loss", "gradient", "update", "buffer"}),
            alone=True,
        )
    elif len(old.optimizers) == len(new.optimizers) and len(old.steps) != len(new.steps):
        yield Fact(
            cause="calls_differ",
            culprits=("step()",),
            summary=f"the loop makes {count(len(new.steps), 'optimizer step')}; in the baseline {len(old.steps)}",
            measured=f"{len(new.steps)} steps against {len(old.steps)}, from the same number of batches",
            shown="the steps that both make are the same",
            kinds=frozenset(),
            alone=True,
            where=new.steps[-1].where if new.steps else "",
        )


def _missing(old: Course, new: Course) -> list[int]:
    """The batches after which the baseline makes a step and the loop makes none, where it makes others; of loops with
    one optimizer that took a step every so many batches."""
    if len(old.optimizers) != 1 or len(new.optimizers) != 1 or not new.steps:
        return []
    then, now = ([step.batches for step in course.steps] for course in (old, new))
    every = then[0]
    if every == 0 or then != list(range(every, every * len(then) + 1, every)):
        return []
    regular = now[0]
    if regular and now == list(range(regular, regular * len(now) + 1, regular)):
        return []  # it accumulates more batches
    due = list(range(every, now[-1] + 1, every))
    return [batch for batch in due if batch not in now] if set(now) < set(due) else []


MORE = 1.4
"""Times the rows a step from which a loop takes other data, and not one batch ahead."""


def _rows_a_step(course: Course) -> float:
    """The rows of the largest tensor of each batch, for each step."""
    if not course.steps:
        return 0.0
    taken = course.batches[: course.steps[-1].batches]
    rows = [max((leaf.shape[0] for leaf in batch if leaf.shape), default=0) for batch in taken]
    return sum(rows) / max(Counter(step.optimizer for step in course.steps).values())


def _trained(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    for now in (False, True):
        own = [
            name
            for match in names.matches
            for name in match.new
            if name in new.parameters
            and new.tensors[name].trains is now
            and all(old.tensors[before].trains is not now for before in match.old)
        ]
        if own:
            does = "requires" if len(own) == 1 else "require"
            text = (
                f"{does} a gradient"
                if now
                else f"no longer {does} a gradient"
                if len(own) == 1
                else f"no longer {does} gradients"
            )
            yield Fact(
                cause="frozen_differs",
                culprits=tuple(own),
                summary=f"{some(own)} {text}; in the baseline {'they do' if len(own) > 1 else 'it does'}"
                + (" not" if now else ""),
                measured=f"requires_grad is {now} as the run begins, {not now} in the baseline",
                kinds=frozenset({"gradient", "update"}),
                alone=not now,
            )


def _held(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    before = {name for optimizer in old.optimizers for name in optimizer.options_of()}
    now = {name for optimizer in new.optimizers for name in optimizer.options_of()}
    pairs = [(match, name) for match in names.matches for name in match.new if name in new.parameters]
    left = [name for match, name in pairs if name not in now and all(n in before for n in match.old)]
    came = [name for match, name in pairs if name in now and not any(n in before for n in match.old)]
    replaced = dict(_replaced(old, new, names))
    if left:
        instead = ""
        if any(name in replaced for name in left):
            instead = ", but tensors of their shapes that no module has: they were replaced after it was built"
        yield Fact(
            cause="left_out_of_optimizer",
            culprits=tuple(left),
            summary=f"no optimizer holds {some(left)} any more{instead}",
            measured=f"{count(len(left), 'parameter')} of {len(before)} in the optimizers of the baseline",
            kinds=frozenset({"gradient", "rate", "update"}),
            alone=True,
        )
    if came:
        yield Fact(
            cause="group_differs",
            culprits=tuple(came),
            summary=f"an optimizer holds {some(came)}, which none does in the baseline",
            measured=f"{count(len(now), 'parameter')} in the optimizers, {len(before)} in the baseline",
            kinds=frozenset({"gradient", "rate", "update"}),
        )


def _replaced(old: Course, new: Course, names: Names) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Parameters that an optimizer of the baseline holds and none does now, with the tensors of their shape that one
    holds in their place and that no module has."""
    now = {name for optimizer in new.optimizers for name in optimizer.options_of()}
    before = {name for optimizer in old.optimizers for name in optimizer.options_of()}
    foreign = [name for name in names.came if name in now and new.tensors[name].role == "foreign"]
    for match in names.matches:
        for name in match.new:
            if name in now or not before.issuperset(match.old) or name not in new.parameters:
                continue
            if same := tuple(n for n in foreign if new.tensors[n].shape == new.tensors[name].shape):
                yield name, same


def _optimizers(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    """Another class; the same in all other respects is told by the numbers."""
    for index, number, own in same_optimizers(old, new, names):
        a, b = old.optimizers[index], new.optimizers[number]
        if a.kind != b.kind:
            yield Fact(
                cause="optimizer_differs",
                culprits=tuple(name for name in b.options_of() if name in own),
                summary=f"the optimizer is {b.kind}; in the baseline it is {a.kind}",
                measured=f"{b.kind} steps {count(len(b.options_of()), 'parameter')}",
                kinds=frozenset({"update"}),
            )


def _options(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    """Options of groups that are others, by option and both values."""
    before = {n: o for optimizer in old.optimizers for n, o in optimizer.options_of().items()}
    now = {n: o for optimizer in new.optimizers for n, o in optimizer.options_of().items()}
    changed: dict[tuple[str, str, str], list[str]] = {}
    for match in names.matches:
        for a, b in ((a, b) for a in match.old for b in match.new if a in before and b in now):
            for option, was, is_ in _other_options(before[a], now[b]):
                own = changed.setdefault((option, was, is_), [])
                if b not in own:
                    own.append(b)
    for (option, was, is_), own in changed.items():
        yield Fact(
            cause="group_differs",
            culprits=tuple(own),
            summary=f"{option} of {some(own)} is {is_}; in the baseline it is {was}",
            measured=f"{count(len(own), 'parameter')} of {len(now)} in the optimizers: {some(_groups(new, own))}",
            kinds=frozenset({"update", "gradient"}),
            only=True,
            repair=f"{option}={was} for {some(own)}",
        )


def _groups(course: Course, own: list[str]) -> list[str]:
    return [
        f"group {number} of {optimizer.kind}"
        for optimizer in course.optimizers
        for number, group in enumerate(optimizer.groups)
        if set(group.parameters) & set(own)
    ]


def _other_options(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for option in [*new, *(name for name in old if name not in new)]:
        if option in IMPLEMENTATION or option == "lr":
            continue
        was, is_ = old.get(option), new.get(option)
        if was is not None and is_ is not None and not equal(was, is_):
            yield option, was, is_


def equal(a: str, b: str) -> bool:
    if a == b:
        return True
    numbers = [text.strip("()[] ").split(",") for text in (a, b)]
    try:
        one, other = ([float(part) for part in text if part.strip()] for text in numbers)
    except ValueError:
        return False
    return len(one) == len(other) and all(math.isclose(x, y, rel_tol=1e-12) for x, y in zip(one, other, strict=True))
