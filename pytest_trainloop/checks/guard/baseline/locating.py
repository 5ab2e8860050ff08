"""What differs before a difference in training: the data of the step, and the calls of modules, in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.baselines.trajectory import Digest
from pytest_trainloop.checks.guard.baseline.bounds import distance, sum_of, without_order
from pytest_trainloop.recording.plain_names import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.baselines.trajectory import Call, Course, Leaf, Step
    from pytest_trainloop.checks.guard.baseline.bounds import Bounds
    from pytest_trainloop.checks.guard.baseline.names import Names

DATA = 1e-9
"""Data are read and not computed by the model: they agree to the rounding of what prepares them."""


@dataclass(frozen=True, slots=True)
class Data:
    """The first tensor of a batch that differs."""

    path: str
    text: str
    """What differs, in words."""
    apart: float = 0.0
    rows: str = ""
    """How the rows of all batches compare, in words; empty where they are others."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The first call of a module that differs."""

    path: str
    kind: str
    apart: float
    given_too: bool
    """Whether what it was given differs as well: then the change lies before it."""
    old: Call
    new: Call
    agree: tuple[str, ...]
    """The modules that were called before it and gave what they gave."""
    times: tuple[int, int] = (1, 1)
    """How many times a step it was called in the baseline, and is now."""
    inside: str | None = None
    """The innermost module that calls it and was given what it was given; None where none was: then the loop gives
    something else to the model."""


def first_data(old: Sequence[Sequence[Leaf]], new: Sequence[Sequence[Leaf]]) -> Data | None:
    """The first tensor that differs between the batches of one step; None where they are the same, also in another
    number of micro-batches or under other names."""
    if not old or not new:
        return None
    if len(old) == len(new):
        return next(filter(None, (_batch(a, b) for a, b in zip(old, new, strict=True))), None)
    return _batch(_joined(old), _joined(new), joined=True)


def rows_of(old: Course, new: Course, path: str) -> str:
    """Of batches that differ, whether they are made of the same rows in another order: then the sums over some first
    batches, an epoch, are the same; empty where no number of batches within the recorded steps has that."""
    one, other = ([leaf.values for batch in c.batches for leaf in batch if leaf.path == path] for c in (old, new))
    for number in range(2, min(len(one), len(other)) + 1):
        a, b = sum_of(one[:number]), sum_of(other[:number])
        if a.total is not None and distance(without_order(a), without_order(b)) <= DATA:
            return f"the first {number} batches have the same values in another order: the order of the rows differs"
    return ""


def _batch(old: Sequence[Leaf], new: Sequence[Leaf], *, joined: bool = False) -> Data | None:
    known = {leaf.path: leaf for leaf in old}
    if len(old) == len(new) and {leaf.path for leaf in new} != set(known):
        known = {now.path: leaf for leaf, now in zip(old, new, strict=True)}  # a dict in place of a tuple
    for leaf in new:
        before = known.get(leaf.path)
        if before is None:
            continue  # a field that nothing had before: what reads it tells
        if not joined and before.shape != leaf.shape:
            return Data(leaf.path, f"shape {_shape(leaf)} where the baseline has {_shape(before)}")
        if _is_float(before) != _is_float(leaf):
            return Data(leaf.path, f"{leaf.dtype} where the baseline has {before.dtype}")
        apart = distance(before.values, leaf.values)
        if apart > DATA:
            total = distance(sum_of([before.values]), sum_of([leaf.values])) > DATA
            text = "other values" if total else "the same values in another order"
            return Data(leaf.path, text, apart)
    paths = {leaf.path for leaf in new}
    gone = [path for path in known if path not in paths]
    return Data(gone[0], "the baseline has it, and the batch no longer does") if gone else None


def _joined(batches: Sequence[Sequence[Leaf]]) -> list[Leaf]:
    """The batches of one step as one, by path."""
    from dataclasses import replace

    parts: dict[str, list[Leaf]] = defaultdict(list)
    for batch in batches:
        for leaf in batch:
            parts[leaf.path].append(leaf)
    return [replace(own[0], values=sum_of(leaf.values for leaf in own)) for own in parts.values()]


def _shape(leaf: Leaf) -> str:
    return str(tuple(leaf.shape))


def _is_float(leaf: Leaf) -> bool:
    return leaf.dtype.startswith(("float", "bfloat", "complex"))


def first_call(
    before: Step, step: Step, earlier: Sequence[tuple[Step, Step]], names: Names, bounds: Bounds
) -> Apart | None:
    """The first call of a module, of those that both have, that gave something else; children come before parents.

    Modules that gave something else in an earlier step already, when training was the same, are left out.
    """
    if before.calls is None or step.calls is None:
        return None
    unlike = {path for a, b in earlier for path in _unlike(a, b, names, bounds)}
    agree: dict[str, None] = {}
    pairs = _pairs(before.calls, step.calls, names)
    for place, (old, new) in enumerate(pairs):
        if new.path in unlike:
            continue
        times = _times(old, before, names), _times(new, step)
        apart = _apart(old.gave, new.gave, times)
        if not bounds.exceeded(apart, ("gave", new.path), step.number):
            agree.setdefault(new.path)
            continue
        if old.kind != new.kind and any(_is_same(old, other, bounds, step.number) for other in step.calls):
            continue  # modules without weights changed places: another one gives this now
        given_too = bounds.exceeded(_apart(old.given, new.given, times), ("given", new.path), step.number)
        return Apart(
            new.path,
            new.kind,
            apart,
            given_too,
            old,
            new,
            tuple(agree),
            times,
            _inside(new.path, pairs[place + 1 :], step, bounds),
        )
    return None


def _inside(path: str, later: Sequence[tuple[Call, Call]], step: Step, bounds: Bounds) -> str | None:
    """Of the modules around one, those that come back after it, the innermost that was given what it was given."""
    for old, new in later:
        around = path.startswith(f"{new.path}.") or (new.path == new.kind and "." not in new.path)
        if around and not bounds.exceeded(distance(old.given, new.given), ("given", new.path), step.number):
            return new.path
    return None


def _times(call: Call, step: Step, names: Names | None = None) -> int:
    path = plain(call.path) if names is None else _now(call.path, names)
    others = (plain(c.path) if names is None else _now(c.path, names) for c in step.calls or ())
    return sum(other == path for other in others)


def _apart(old: Digest, new: Digest, times: tuple[int, int]) -> float:
    """How far what a module gave in a step is from what it gave; called more often it may give the rows in parts, or
    the same each time."""
    apart = distance(old, new)
    if times[0] == times[1] or not all(times):
        return apart
    factor = times[1] / times[0]
    repeated = Digest(old.squares * factor, None if old.total is None else old.total * factor)
    return min(apart, distance(repeated, without_order(new)))


def no_longer_called(pairs: Sequence[tuple[Step, Step]], names: Names, new: Course) -> tuple[str, ...]:
    """Modules that hold tensors, by their paths now, that no step calls any more: the outermost ones."""
    both = [(a.calls, b.calls) for a, b in pairs if a.calls is not None and b.calls is not None]
    called = {plain(call.path) for _, calls in both for call in calls}
    before = dict.fromkeys(_now(call.path, names) for calls, _ in both for call in calls)
    silent = [
        path
        for path in before
        if not any(other == path or other.startswith(f"{path}.") for other in called)
        and any(plain(name).startswith(f"{path}.") for name in new.tensors)
    ]
    return tuple(path for path in silent if not any(path.startswith(f"{other}.") for other in silent))


def _is_same(old: Call, new: Call, bounds: Bounds, step: int) -> bool:
    return not bounds.exceeded(distance(old.gave, new.gave), ("gave", new.path), step)


def _unlike(before: Step, step: Step, names: Names, bounds: Bounds) -> set[str]:
    return {
        new.path
        for old, new in _pairs(before.calls or (), step.calls or (), names)
        if bounds.exceeded(
            _apart(old.gave, new.gave, (_times(old, before, names), _times(new, step))), ("gave", new.path), step.number
        )
    }


def _pairs(old: Sequence[Call], new: Sequence[Call], names: Names) -> list[tuple[Call, Call]]:
    """The calls of one module, in the order of those now. A module that is called another number of times in a step is
    compared by the sum of its calls."""
    paths = [_now(call.path, names) for call in old]
    counted, called = Counter(paths), Counter(plain(call.path) for call in new)
    queues: dict[str, list[Call]] = defaultdict(list)
    for path, call in zip(paths, old, strict=True):
        queues[path].append(call)
    pairs = []
    done: set[str] = set()
    for call in new:
        path = plain(call.path)
        if not queues[path] or path in done:
            continue
        if counted[path] == called[path]:
            pairs.append((queues[path].pop(0), call))
        else:
            done.add(path)
            own = [other for other in new if plain(other.path) == path]
            pairs.append((_summed(queues[path]), _summed(own)))
    return pairs


def _now(path: str, names: Names) -> str:
    """The path that a module of the baseline has now: its own where its tensors moved, else that of the nearest module
    above it that did."""
    head, tail = path, ""
    while head:
        if head in names.modules and names.modules[head] != head:
            moved = names.modules[head]
            return plain(f"{moved}.{tail}" if tail else moved)
        head, _, last = head.rpartition(".")
        tail = f"{last}.{tail}" if tail else last
    return plain(path)


def _summed(calls: Sequence[Call]) -> Call:
    from dataclasses import replace

    given: Digest = sum_of(call.given for call in calls)
    return replace(calls[0], given=given, gave=sum_of(call.gave for call in calls))
