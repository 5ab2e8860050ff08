"""What changed besides the numbers: parameters, optimizers and their options, schedulers, and calls between two steps.

A fact is the cause of a difference in training where it can make that difference at the stage that differs first. A
fact that no recorded step shows is a fault if it must show later (a parameter that is no longer stepped, a schedule
that is gone). Otherwise it says nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.core.wording import be, count, some
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.guard.baseline.first import First
    from pytest_trainloop.checks.guard.baseline.names import Names
    from pytest_trainloop.instruments.baselines.trajectory import Course, Event, Scheduler, Tensor

IMPLEMENTATION = frozenset("lr foreach fused capturable differentiable initial_lr max_lr min_lr swa_lr name".split())
"""Options that only say how a step is computed, that schedulers keep for themselves, and the learning rate, which each
step has."""

MORE = 1.4
"""Times the rows per step from which a loop takes other data, and is not just one batch ahead."""

GRADIENT = frozenset({"gradient", "update"})
STEPPED = frozenset({"gradient", "lr", "update"})
TRAINING = frozenset({"output", "loss", "gradient", "update", "buffer"})

_SCHEDULED = re.compile(r"^\w+\.step\(.*\)$")
_LIMIT = re.compile(r"clip_grad_norm_\(([^)]+)\)")
WATCHED = (
    (re.compile(r"zero_grad|^zero_$|^_foreach_zero_"), "zero_grad()", GRADIENT),
    (re.compile(r"^clip_grad_norm_|^clip_grad_value_"), "", GRADIENT),
    (re.compile(r"^scaler\.unscale"), "scaler.unscale_()", GRADIENT),
    (_SCHEDULED, "", frozenset({"lr"})),
)
"""Calls between two steps that change what a step reads, with the stages that they can change."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that differs from the baseline."""

    kind: str
    culprits: tuple[str, ...]
    summary: str
    measured: str
    stages: frozenset[str]
    """The stages at which it can make the first difference."""
    only: bool = False
    """Whether it changes its culprits only."""
    alone: bool = False
    """Whether it is a fault without a difference within the recorded steps."""
    shown: str = ""
    """What shows it, where no difference in the steps does."""
    repair: str = ""
    where: str = ""
    unseen: str = ""
    """Why the recorded steps cannot show it: then it is a note."""

    def accounts_for(self, first: First) -> bool:
        """Whether it can be the cause of the first difference."""
        own = not self.only or first.stage == "output" or set(first.names) <= set(self.culprits)
        return first.stage in self.stages and own


def facts(old: Course, new: Course, names: Names) -> list[Fact]:
    """The facts; those that others may follow from come first."""
    sources = (
        _parameters(old, new, names),
        _settings(old, new, names),
        _steps(old, new),
        _schedulers(old, new, names),
        _calls(old, new),
    )
    return [fact for source in sources for fact in source]


def _parameters(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    def fact(culprits: Sequence[str], summary: str, measured: str, repair: str = "") -> Fact:
        return Fact("parameters", tuple(culprits), summary, measured, TRAINING, alone=True, repair=repair)

    number = f"{count(len(new.parameters), 'parameter')}, {len(old.parameters)} in the baseline"
    stale = {name for _, others in _replaced(old, new, names) for name in others}
    gone = [name for name in names.gone if name in old.parameters and _trains(old, name)]
    came = [name for name in names.came if name in new.parameters and _trains(new, name) and name not in stale]
    if other := [name for name in came if name in gone]:
        gone, came = ([name for name in own if name not in other] for own in (gone, came))
        a, b = old.tensors[other[0]], new.tensors[other[0]]
        more = "" if len(other) == 1 else f", and {count(len(other) - 1, 'more parameter')} another shape"
        summary = f"{other[0]} has shape {tuple(b.shape)} where the baseline has {tuple(a.shape)}{more}"
        yield fact(other, summary, f"{b.size} entries, {a.size} in the baseline")
    for name in list(came):
        if partner := _tied(name, new.tensors[name], old):
            came.remove(name)
            now = [b for a, b in names.pairs if a == partner]
            summary = f"{name} is a tensor of its own; in the baseline it is {partner}, under a second name"
            yield fact([name, *now], summary, number, f"tie the two again: {name} = {partner}")
    for name in list(gone):
        if partner := _tied(name, old.tensors[name], new):
            gone.remove(name)
            summary = f"{name} is {partner} under a second name; in the baseline it is a tensor of its own"
            yield fact([name, partner], summary, number)
    if joined := {name: parts for name in came if (parts := _as_many(new.tensors[name].shape, gone, old))}:
        own = [part for parts in joined.values() for part in parts]
        gone, came = [name for name in gone if name not in own], [name for name in came if name not in joined]
        name, parts = next(iter(joined.items()))
        more = "" if len(joined) == 1 else f"; {count(len(joined) - 1, 'more tensor')} likewise"
        summary = (
            f"{name} {list(new.tensors[name].shape)} has as many entries as {' + '.join(parts)}, and other random "
            f"numbers{more}"
        )
        measured = f"{new.tensors[name].size} entries, in {len(parts)} tensors of the baseline"
        repair = f"copy the old weights in to compare the steps: {name} = torch.cat([{', '.join(parts)}])"
        yield fact([*joined, *own], summary, measured, repair)
    if gone or came:
        texts = [f"{some(gone)} {be(gone)} gone"] if gone else []
        texts += [f"{some(came)} {be(came)} new"] if came else []
        yield fact([*came, *gone], ", ".join(texts), f"{number}; no other name holds their values")


def _trains(course: Course, name: str) -> bool:
    """A copy that averages others, or a frozen parameter, may come and go."""
    held = any(name in optimizer.options_of() for optimizer in course.optimizers)
    return held or any(name in step.gradients for step in course.steps)


def _tied(name: str, tensor: Tensor, other: Course) -> str:
    """The tensor of the other course that has this one's name as a second one."""
    own = {plain(alias) for alias in (name, *tensor.also)}
    return next((n for n, t in other.parameters.items() if own & {plain(alias) for alias in t.also}), "")


def _as_many(shape: tuple[int, ...], gone: list[str], old: Course) -> list[str]:
    """Neighbours among the tensors that are gone, of one shape, that together have the shape of a new one."""
    for place, first in enumerate(gone):
        part = old.tensors[first].shape
        if part and len(part) == len(shape) and part[1:] == shape[1:] and shape != part and not shape[0] % part[0]:
            parts = gone[place : place + shape[0] // part[0]]
            if len(parts) == shape[0] // part[0] and all(old.tensors[other].shape == part for other in parts):
                return parts
    return []


def _replaced(old: Course, new: Course, names: Names) -> list[tuple[str, tuple[str, ...]]]:
    """Parameters that an optimizer of the baseline holds and none does now, with the tensors of their shape that one
    holds in their place and that no module has."""
    before, now = ({n for o in course.optimizers for n in o.options_of()} for course in (old, new))
    foreign = [name for name in names.came if name in now and new.tensors[name].role == "foreign"]
    left = [b for a, b in names.pairs if b not in now and a in before and b in new.parameters]
    same = ((b, tuple(n for n in foreign if new.tensors[n].shape == new.tensors[b].shape)) for b in left)
    return [(name, own) for name, own in same if own]


def _settings(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    """By setting and both values, the parameters whose setting changed."""
    before, now = _by_parameter(old), _by_parameter(new)
    changed: dict[tuple[str, str, str], list[str]] = {}
    for match in names.matches:
        for name in match.new:
            options, earlier = now.get(name, {}), [before.get(a, {}) for a in match.old]
            for setting in dict.fromkeys((*options, *itertools.chain.from_iterable(earlier))):
                then, is_ = {one.get(setting, "") for one in earlier}, options.get(setting, "")
                known = all(then) and is_ if setting not in ("optimizer", "requires_grad") else name in new.parameters
                for a in sorted(then) if known and not any(equal(one, is_) for one in then) else ():
                    changed.setdefault((setting, a, is_), []).append(name)
    held, total = (sum("optimizer" in row for row in rows.values()) for rows in (before, now))
    order = {"requires_grad": 0, "optimizer": 1}
    classes = any(setting == "optimizer" and was and is_ for setting, was, is_ in changed)
    for (setting, was, is_), own in sorted(changed.items(), key=lambda one: order.get(one[0][0], 2)):
        measured = f"{count(len(own), 'parameter')} of {held} in the optimizers of the baseline"
        if setting == "requires_grad":
            does = f"{'no longer ' if was == 'True' else ''}require{'' if len(own) > 1 else 's'} a gradient"
            they = "they do" if len(own) > 1 else "it does"
            summary = f"{some(own)} {does}; in the baseline {they}{' not' if is_ == 'True' else ''}"
            measured = f"requires_grad is {is_} as the run begins, {was} in the baseline"
            yield Fact("frozen", tuple(own), summary, measured, GRADIENT, alone=was == "True")
        elif setting == "optimizer" and not is_:
            replaced = {name for name, _ in _replaced(old, new, names)}
            why = ", but tensors of their shapes that no module has: they were replaced after it was built"
            summary = f"no optimizer holds {some(own)} any more{why if replaced & set(own) else ''}"
            yield Fact("left out", tuple(own), summary, measured, STEPPED, alone=True)
        elif setting == "optimizer" and not was:
            summary = f"an optimizer holds {some(own)}, which none does in the baseline"
            measured = f"{count(total, 'parameter')} in the optimizers, {held} in the baseline"
            yield Fact("group", tuple(own), summary, measured, STEPPED)
        elif setting == "optimizer":
            measured = f"{is_} steps {count(sum(row.get('optimizer') == is_ for row in now.values()), 'parameter')}"
            summary = f"the optimizer is {is_}; in the baseline it is {was}"
            yield Fact("optimizer", tuple(own), summary, measured, frozenset({"update"}))
        elif not classes:
            groups = [
                f"group {number} of {optimizer.kind}"
                for optimizer in new.optimizers
                for number, group in enumerate(optimizer.groups)
                if set(group.parameters) & set(own)
            ]
            summary = f"{setting} of {some(own)} is {is_}; in the baseline it is {was}"
            measured = f"{count(len(own), 'parameter')} of {total} in the optimizers: {some(groups)}"
            repair = f"{setting}={was} for {some(own)}"
            yield Fact("group", tuple(own), summary, measured, GRADIENT, only=True, repair=repair)


def _by_parameter(course: Course) -> dict[str, dict[str, str]]:
    found = {name: {"requires_grad": str(tensor.trains)} for name, tensor in course.parameters.items()}
    for optimizer in course.optimizers:
        for name, options in optimizer.options_of().items():
            known = {option: text for option, text in options.items() if option not in IMPLEMENTATION}
            found[name] = {**found.get(name, {}), "optimizer": optimizer.kind, **known}
    return found


def equal(a: str, b: str) -> bool:
    """Numbers to rounding, also as pairs."""
    if a == b:
        return True
    numbers = [text.strip("()[] ").split(",") for text in (a, b)]
    try:
        one, other = ([float(part) for part in text if part.strip()] for text in numbers)
    except ValueError:
        return False
    return bool(one) and len(one) == len(other) and all(map(lambda x, y: math.isclose(x, y, rel_tol=1e-12), one, other))


def _steps(old: Course, new: Course) -> Iterator[Fact]:
    """Equal batches make equal steps, however many: only the number of rows and of steps shows it."""
    rows, before = _rows_a_step(new), _rows_a_step(old)
    every = frozenset({"data", *TRAINING})
    if missing := _missing(old, new):
        numbers, each = [str(number) for number in missing], old.steps[0].batches
        due = count(len(new.steps) + len(missing), "update")
        batches = f"batch{'' if len(missing) == 1 else 'es'} {some(numbers, most=4)}"
        summary = f"{len(missing)} of {due} {be(numbers)} missing: no step follows {batches}"
        made = f"{count(len(new.steps), 'step')} for {count(new.steps[-1].batches, 'batch')}"
        measured = f"{made}; in the baseline one after {'each' if each == 1 else f'every {each}'}"
        where, repair = new.steps[0].where, "step the optimizer after each batch, as in the baseline"
        yield Fact("calls", ("step()",), summary, measured, every, alone=True, where=where, repair=repair)
    elif before and rows and not 1 / MORE < rows / before < MORE:
        summary = f"a step takes {rows:.4g} rows; in the baseline {before:.4g}"
        measured = f"{rows:.4g} rows a step against {before:.4g}, over {count(len(new.steps), 'step')}"
        shown = "all batches of this test are equal, so each step is the same; with batches that differ it is not"
        yield Fact("rows", ("batch",), summary, measured, every, alone=True, shown=shown)
    elif len(old.optimizers) == len(new.optimizers) and len(old.steps) != len(new.steps):
        summary = f"the loop makes {count(len(new.steps), 'optimizer step')}; in the baseline {len(old.steps)}"
        measured = f"{len(new.steps)} steps against {len(old.steps)}, from the same number of batches"
        where, shown = new.steps[-1].where if new.steps else "", "the steps that both make are the same"
        yield Fact("calls", ("step()",), summary, measured, frozenset(), alone=True, shown=shown, where=where)


def _missing(old: Course, new: Course) -> list[int]:
    """The batches after which the baseline makes a step and the loop makes none, where it makes others; of loops with
    one optimizer that took a step every so many batches."""
    if len(old.optimizers) != 1 or len(new.optimizers) != 1 or not new.steps:
        return []
    then, now = ([step.batches for step in course.steps] for course in (old, new))

    def regular(taken: list[int]) -> bool:
        return taken[0] > 0 and taken == list(range(taken[0], taken[0] * len(taken) + 1, taken[0]))

    if not regular(then) or regular(now):
        return []  # else it accumulates more batches
    due = range(then[0], now[-1] + 1, then[0])
    return [batch for batch in due if batch not in now] if set(now) < set(due) else []


def _rows_a_step(course: Course) -> float:
    """The rows of the largest tensor of each batch, for each step."""
    if not course.steps:
        return 0.0
    taken = course.batches[: course.steps[-1].batches]
    rows = [max((leaf.shape[0] for leaf in batch if leaf.shape), default=0) for batch in taken]
    return sum(rows) / max(Counter(step.optimizer for step in course.steps).values())


def _schedulers(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    """Those that are gone or have another setting. If one is built and no longer stepped, only the call is gone."""
    lr = frozenset({"lr"})
    if old.schedulers and not new.schedulers:
        kinds = [scheduler.kind for scheduler in old.schedulers]
        if not set(kinds) & set(new.idle):
            summary = f"{some(kinds)} {be(kinds)} gone: no scheduler is built"
            measured = f"{count(len(old.schedulers), 'scheduler')} in the baseline, none now"
            alone = _is_flat(old)  # learning rates that still move are set by other means
            yield Fact("scheduler", (f"{kinds[0]}()",), summary, measured, lr, alone=alone)
        return
    for a, b in zip(old.schedulers, new.schedulers, strict=False):
        changed = [
            name
            for name, was in a.settings.items()
            if name in b.settings
            and not equal(was, b.settings[name])
            and not _alike_by_group(name, a, b, old, new, names)
        ]
        if a.kind != b.kind:
            settings = ", ".join(f"{name}={text}" for name, text in list(b.settings.items())[:3])
            summary, measured = f"the scheduler is {b.kind}; in the baseline it is {a.kind}", f"{b.kind}({settings})"
        elif changed:
            name = changed[0]
            now, then = (
                entries[0] if len(set(entries := _entries(s.settings[name]))) == 1 else s.settings[name] for s in (b, a)
            )
            if now == then:
                now, then = b.settings[name], a.settings[name]
            summary = f"{name} of {b.kind} is {now}; in the baseline it is {then}"
            measured = f"{count(len(changed), 'setting')} of {b.kind} changed: {some(changed, most=4)}"
        else:
            continue
        alone = a.kind == b.kind and not any("lambda" in name for name in changed)
        yield Fact("scheduler", (f"{b.kind}()",), summary, measured, lr, alone=alone)


def _is_flat(course: Course) -> bool:
    """Whether the learning rates are constant in the recorded steps."""
    return len({lr for step in course.steps for lr in step.lrs}) <= len(course.optimizers)


def _alike_by_group(name: str, a: Scheduler, b: Scheduler, old: Course, new: Course, names: Names) -> bool:
    """A list with an entry for each group is compared parameter by parameter: other groups with the same options are no
    change."""
    rows: list[dict[str, str]] = []
    for scheduler, course in ((a, old), (b, new)):
        known = scheduler.optimizer is not None and scheduler.optimizer < len(course.optimizers)
        groups = course.optimizers[scheduler.optimizer or 0].groups if known else ()
        entries = _entries(scheduler.settings[name])
        pairs = zip(groups, entries, strict=True) if len(entries) == len(groups) else ()
        rows.append({parameter: entry for group, entry in pairs for parameter in group.parameters})
    both = [(rows[0][x], rows[1][y]) for x, y in names.pairs if x in rows[0] and y in rows[1]]
    return bool(both) and all(equal(one, other) for one, other in both)


def _entries(text: str) -> list[str]:
    """The entries of a list that was written as text: ``[factor(100, 4), factor(100, 4)]`` has two."""
    if not text.startswith("[") or not text.endswith("]"):
        return []
    parts, depth = [""], 0
    for letter in text[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _calls(old: Course, new: Course) -> Iterator[Fact]:
    """Those that are gone, new, or come before or after another one now, of the steps of which both have the calls."""
    pairs = [(a, b) for a, b in old.paired(new) if a.events is not None and b.events is not None]
    stopped = {s.kind for s in old.schedulers} & set(new.idle)
    for pattern, name, stages in WATCHED:
        was, now = (
            ([_seen(step.events or (), pattern) for step in side] for side in zip(*pairs, strict=True))
            if pairs
            else ([], [])
        )
        scheduled = pattern is _SCHEDULED
        if was == now or (scheduled and not new.schedulers and not stopped):
            continue  # else the scheduler itself is gone
        before, after = ({(what, phase) for step in side for what, phase, _ in step} for side in (was, now))
        olds, whats = ({what for what, _ in side} for side in (before, after))
        shown = name or next(iter(sorted(whats | olds)), "")
        first, last = count(len(now), "step"), sum(map(len, was))
        measured = f"{count(sum(map(len, now)), 'call')} in the first {first}, {last} in the baseline"
        phases, others = ({phase for _, phase in side} for side in (after, before))
        if not after:
            text = f"{shown} is no longer called between two steps"
            if scheduled and stopped:
                text = f"{shown} is no longer called: the scheduler is built, and the learning rate stays constant"
        elif not before:
            text = f"{shown} is called between two steps, and not in the baseline"
        elif phases != others:
            phase, other = min(phases - others or phases), min(others - phases or others)
            here, there = _neighbours(new, pattern, phase), _neighbours(old, pattern, other)
            text = f"{shown} is called {here or phase}; in the baseline {there or other}"
        elif not name and whats != olds:
            text = f"{min(whats - olds or whats)} is called; in the baseline {min(olds - whats or olds)}"
            clips = next(((a.clips[0], b.clips[0]) for a, b in old.paired(new) if a.clips and b.clips), None)
            if clips:
                measured = (
                    f"the gradient's norm before the clip is {clips[1]:.4g} at the first clip, {clips[0]:.4g} in the "
                    "baseline"
                )
        elif [len(step) for step in was] != [len(step) for step in now]:
            text = f"{shown} is called {_at(now)}; in the baseline {_at(was)}"
        else:
            continue
        idle = not after and scheduled and not new.schedulers
        culprit = re.sub(r"\(.*| x \d+$", "()", shown) if "(" in shown else f"{shown}()"
        where = next((place for step in now for *_, place in step), "")
        alone = idle and _is_flat(old)  # the learning rate of the baseline moves after the recorded steps
        unseen = "" if idle or after else _without_effect(whats | olds, old)
        yield Fact("calls", (culprit,), text, measured, stages, where=where, alone=alone, unseen=unseen)


def _seen(events: Sequence[Event], pattern: re.Pattern[str]) -> list[tuple[str, str, str]]:
    """The calls of one kind: what, when, where."""
    first = next((i for i, e in enumerate(events) if re.match(r"backward|autograd", e.what)), len(events))
    return [
        (event.what, "before backward()" if i < first else "between backward() and step()", event.where)
        for i, event in enumerate(events)
        if pattern.search(event.what)
    ]


def _neighbours(course: Course, pattern: re.Pattern[str], phase: str) -> str:
    """What is called right before and right after the first such call of a step after the first one: ``after step() and
    before zero_grad()``."""

    def called(event: Event) -> str:
        what = re.sub(r" x \d+$", "", event.what)
        return f"the {what}" if what.startswith("forward of") else what if re.search(r"[( ]", what) else f"{what}()"

    watched = [step.events for step in course.steps if step.events is not None]
    for before, events in itertools.pairwise(watched):
        wanted = {(what, where) for what, own, where in _seen(events, pattern) if own == phase}
        places = [i for i, event in enumerate(events) if (event.what, event.where) in wanted]
        if places:
            earlier, later = [*before, *events[: places[0]]], events[places[-1] + 1 :]
            sides = [f"after {called(earlier[-1])}"] if earlier else []
            return " and ".join([*sides, *([f"before {called(later[0])}"] if later else [])])
    return ""


def _at(steps: Sequence[Sequence[object]]) -> str:
    """The steps before which a call is made, in words."""
    own = [str(number) for number, calls in enumerate(steps, 1) if calls]
    if len(own) == len(steps):
        return "before each step" if all(len(calls) == 1 for calls in steps) else "several times a step"
    if len(own) == 1:
        return f"only before step {own[0]}"
    every_other = own == [str(number) for number in range(2, len(steps) + 1)]
    return "before each step but the first" if every_other else f"before the steps {some(own, most=6)}"


def _without_effect(calls: set[str], old: Course) -> str:
    """Why a call of the baseline that is gone changes no recorded step; empty where it did something there, and another
    call does it now."""
    limits = [float(found[1]) for found in map(_LIMIT.match, calls) if found]
    norms = [norm for step in old.steps for norm in step.clips]
    if limits and len(limits) == len(calls) and norms and max(norms) < min(limits):
        return f"the largest norm in the steps of the baseline is {max(norms):.4g}, and the limit {min(limits):g}"
    scheduled = all(_SCHEDULED.match(what) for what in calls) and _is_flat(old)
    return "in the steps of the baseline the learning rate is constant" if scheduled else ""
