"""Episodes in a batch of steps: which rewards and observations the values of each step depend on.

A run with the rewards after an episode's end in another order has the same mean, spread and extremes of the rollout.
What meets a tensor with a history and has one entry for each step (returns, advantages) is compared at the steps before
the end. Where all of these are scaled by one factor and shifted by one offset, the whole was standardised. Targets of
single transitions are compared between runs with other observations, rewards and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pytest_trainloop.checks.batch.segment_independence.causes import found
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.episodes import read_episodes, read_transitions
from pytest_trainloop.instruments.tracing.arguments import floats
from pytest_trainloop.instruments.tracing.mode import WatchingMode
from pytest_trainloop.instruments.tracing.provenance import Lineage, name_of, watched
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.same_start import SameStart, from_same_start

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.batches.episodes import Border
    from pytest_trainloop.instruments.tracing.provenance import Node
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

FARTHEST = 400
"""Nodes between a meeting and the values of steps behind it."""

ROUNDING = 1e-9
"""Of the largest value: sums of the same numbers in another order differ by far less in float64."""


def returns_across_episodes(evidence: Evidence, batch: Any, *, declared: bool) -> Iterator[Finding]:
    """A step whose weight in the loss depends on rewards of a later episode."""
    episodes = read_episodes(batch)
    if episodes is None:
        return
    runs = StepRuns(evidence, batch, episodes.ends.shape, episodes.flags)
    rewards = next(t for path, t in nested.paths(batch) if path == episodes.rewards).detach()
    rewards = unequal(rewards)
    base = None
    for borders in episodes.borders:
        base = base or runs.with_values({episodes.rewards: rewards})
        moved = reordered(rewards, borders)
        other = runs.with_values({episodes.rewards: moved})
        if base is None or other is None or (crossing := first_crossing(base, other, borders)) is None:
            continue
        intended = episodes.limits or episodes.streams > 1 or base.model_reads_flags
        facts = {"rewards": nested.shown(episodes.rewards), "flags": nested.shown(episodes.flags)}
        yield crossing_found(crossing, level="advice" if intended and not declared else "fault", **facts)
        return


def unequal(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards of which some differ: returns of equal ones look standardised."""
    if not bool((rewards == rewards.flatten()[0]).all()):
        return rewards
    return rewards + torch.randn(rewards.shape, generator=torch.Generator().manual_seed(0)).to(rewards)


def reordered(rewards: torch.Tensor, borders: Sequence[Border]) -> torch.Tensor:
    """The rewards, with those after the borders in another order."""
    cells = [cell for border in borders for cell in border.cells(range(border.step + 1, border.steps))]
    moved = rewards.clone()
    for to, by in zip(cells, [*cells[1:], cells[0]], strict=True):
        moved[to] = rewards[by]
    return moved


Crossing: TypeAlias = "tuple[Border, int, Values, Values]"
"""An end, a step before it, and what the loss reads of that step in two runs."""


def first_crossing(
    base: StepValues, other: StepValues, borders: Sequence[Border], rounding: float = ROUNDING
) -> Crossing | None:
    """Where two runs with other rewards after the borders differ before them."""
    for number in base.read if _comparable(base, other) else ():
        one, two = base.found[number], other.found[number]
        if one.values.shape != two.values.shape:
            continue
        pairs = [(a.values, b.values) for a, b in zip(base.found, other.found, strict=True)]
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape == one.values.shape]
        for border in borders:
            if (step := _reached(one.values, two.values, border, borders, pairs, rounding)) is not None:
                return border, step, one, two
    return None


def crossing_found(crossing: Crossing, *, rewards: str, flags: str, level: str, culprit: str = "") -> Finding:
    border, step, *values = crossing
    (cell,) = border.cells(range(step, step + 1))
    before, after = (float(v.values[cell].flatten()[0]) for v in values)
    of = f" of {'row' if border.axis else 'environment'} {border.at[0]}" if border.at else ""
    facts: dict[str, Any] = {"rewards": rewards, "flags": flags, "step": step, "end": border.step, "of": of}
    facts |= {"before": before, "after": after, "level": level}
    made = found("returns_across_episodes", values[0].place, (culprit or rewards,), kinds=("input",), **facts)
    return replace(made, smallest=f"steps {step} to {border.step + 2}{of}")


def _reached(
    one: torch.Tensor,
    other: torch.Tensor,
    border: Border,
    borders: Sequence[Border],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rounding: float,
) -> int | None:
    """The last step before the end whose value changes otherwise than by standardising, of one line or of all: the
    value itself, or one of the ``pairs`` that does not change and that it is made of (standardised returns less what a
    critic says, odd: returns_standardised_before_the_baseline)."""
    limit = rounding * max(float(one.abs().max()), float(other.abs().max()))
    before, after = (_before(values, border) for values in (one, other))
    if limit != limit or not bool(((after - before).abs() > limit).any()):
        return None
    lines = [b for b in borders if b.axis == border.axis]
    for within in ([border], lines):
        mine, theirs, *parts = (
            torch.cat([_before(values, b) for b in within])
            for values in (one, other, *(p for a, b in pairs for p in (a, b)))
        )
        same = [a for a, b in zip(parts[::2], parts[1::2], strict=True) if bool(((a - b).abs() <= limit).all())]
        if scaled(mine, theirs, limit) or any(scaled(part, theirs - mine, limit) for part in same):
            return None
    return int(((after - before).abs() > limit).reshape(len(before), -1).any(1).nonzero().max())


def _before(values: torch.Tensor, border: Border) -> torch.Tensor:
    return torch.stack([values[cell] for cell in border.cells(range(border.step))])


def scaled(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    """Whether one factor and one shift make the second of the first."""
    basis = torch.stack([one.flatten(), torch.ones_like(one.flatten())], 1)
    fit = torch.linalg.lstsq(basis, other.flatten()[:, None], driver="gelsd").solution
    return bool(((basis @ fit)[:, 0] - other.flatten()).abs().max() <= 10 * limit)


def target_past_the_end(evidence: Evidence, batch: Any) -> Iterator[Finding]:
    """A target of an episode's last step that depends on the observation after it, which begins another episode.
    Targets are values that meet the model's outputs in the loss, one for each row, and change with the rewards."""
    given = read_transitions(batch)
    if given is None:
        return
    tensors = {path: t.detach() for path, t in nested.paths(batch)}
    runs, ends = StepRuns(evidence, batch, given.ends.shape, given.flags[0]), given.ends.flatten()
    base = runs.with_values({})
    if base is None or not base.read:
        return

    made: dict[str, StepValues | None] = {}

    def changed(number: int, what: str, new: Mapping[Path, torch.Tensor]) -> torch.Tensor | None:
        """Which rows of a value are other ones in a run with these tensors; None where other values are computed."""
        if what not in made:
            made[what] = runs.with_values(new)
        other = made[what]
        if other is None or not _comparable(base, other):
            return None
        one, two = base.found[number].values, other.found[number].values
        return one.flatten() != two.flatten() if one.numel() == ends.numel() and one.shape == two.shape else None

    flipped = {path: (tensors[path] == 0).to(tensors[path].dtype) for path in given.flags}
    for number in base.read:
        moved = changed(number, "after", {given.after: tensors[given.after].roll(1, 0)})
        if moved is None or not bool(moved[ends].all()):
            continue
        inverted = not bool(moved[~ends].any())
        rewarded = changed(number, "rewards", {given.rewards: tensors[given.rewards] + 1.0})
        if rewarded is None or not bool(rewarded[ends].any()):
            continue
        read = changed(number, "flags", flipped)
        if read is not None and bool(read.any()) == inverted:
            flags, after = (nested.shown(path) for path in (given.flags[0], given.after))
            row, level = int(ends.nonzero()[0]), "fault" if inverted or given.certain else "advice"
            repair = f"target = reward + gamma * (1 - {flags}) * value({after})"
            facts = {"after": after, "flags": flags, "row": row, "inverted": inverted, "level": level, "repair": repair}
            made_ = found("target_past_the_end", base.found[number].place, (flags,), kinds=("input",), **facts)
            yield replace(made_, smallest=f"row [{row}]")
            return


def _comparable(one: StepValues, other: StepValues) -> bool:
    """Whether two runs compute the same values by name."""
    return [v.name for v in one.found] == [v.name for v in other.found]


@dataclass(slots=True)
class Values:
    """What one call gave: a value for each step."""

    name: str
    place: str
    values: torch.Tensor


class StepValues(WatchingMode):
    """Values that have one entry for each step of a rollout, without a history, and which of them the loss reads."""

    def __init__(self, shape: torch.Size, flags: Callable[[], torch.Tensor | None]) -> None:
        super().__init__()
        self.found: list[Values] = []
        self.read: dict[int, None] = {}
        self.model_reads_flags = False
        self._shape, self._lineage = shape, Lineage()
        self._known: dict[int, tuple[Node, int]] = {}
        self._flags = flags

    def active(self) -> bool:
        watch = self.watch
        return super().active() and not watch.record.begun

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch, name = self.watch, name_of(func)
        if not watched(name):
            return passed_on(func, args, kwargs)
        with watch.suspended():
            parents = self._lineage.before(name, args, kwargs)
            given = list(tensors_in(args, kwargs))
            if any(t.requires_grad for t in given):
                for tensor in given:
                    if not tensor.requires_grad and tensor.is_floating_point():
                        self._meets(tensor, name, bool(watch.module_path()))
        out = passed_on(func, args, kwargs)
        with watch.suspended():
            self._lineage.note(watch, func, name, args, kwargs, parents, out)
            target = args[0] if name == "__setitem__" and args else out
            for tensor in tensors_in(target):
                if self._is_of_steps(tensor) and not tensor.requires_grad:
                    node = self._lineage.of(tensor)
                    self._known[id(node)] = (node, len(self.found))
                    self._keep(tensor, name)
        return out

    def _is_of_steps(self, tensor: torch.Tensor) -> bool:
        return bool(floats([tensor])) and tensor.shape[: len(self._shape)] == self._shape

    def _keep(self, tensor: torch.Tensor, name: str) -> None:
        self.found.append(Values(name, str(here()[0]), tensor.detach().double().cpu().clone()))

    def _meets(self, tensor: torch.Tensor, name: str, in_model: bool) -> None:
        """Note the values of steps that are nearest behind what meets a tensor with a history."""
        start = self._lineage.of(tensor)
        if id(start) not in self._known and self._is_of_steps(tensor) and not start.op:
            flags = self._flags()
            if flags is None or tensor.data_ptr() != flags.data_ptr():
                self._keep(tensor, name)
                self.read[len(self.found) - 1] = None
        todo, seen = [start], set[int]()
        while todo and len(seen) < FARTHEST:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            known = self._known.get(id(node))
            if node.op == "batch" and in_model:
                self.model_reads_flags = True
            if known is not None and not in_model:
                self.read[known[1]] = None
            else:
                todo.extend(node.parents)

    def follow_flags(self, flags: torch.Tensor) -> None:
        self._lineage.adopt(flags)


class StepRuns:
    """Runs of one step, in float64 from one start, with other tensors in the batch. ``shape`` is that of one value for
    each step."""

    def __init__(self, evidence: Evidence, batch: Any, shape: torch.Size, flags: Path) -> None:
        self._evidence, self._batch, self._shape, self._flags = evidence, batch, shape, flags
        self._start = SameStart()
        seen = evidence.run()
        self._window = max(1, round(seen.items / seen.rounds)) if seen.rounds else 1

    def with_values(self, new: Mapping[Path, torch.Tensor]) -> StepValues | None:
        """What the loss reads of a run with these tensors in the batch; None where the loop cannot be run so."""
        item = nested.mapped(
            nested.copy(self._batch),
            lambda path, t: new[path].clone() if path in new else t,
            lambda value: isinstance(value, torch.Tensor),
        )
        flags: list[torch.Tensor] = []

        def note(number: int, given: Any) -> None:
            if not number:
                flags.extend(t for path, t in nested.paths(given) if path == self._flags)
                for tensor in flags:
                    mode.follow_flags(tensor)

        mode = StepValues(self._shape, lambda: flags[0] if flags else None)
        plan = from_same_start(self._evidence.plan(), self._start, lambda _loop: [item] * self._window)
        contexts = plan.contexts

        def around(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            return (*mode.contexts(watch), *contexts(watch))

        enough = replace(plan, contexts=around, before_item=note, enough=lambda r: r.rounds >= 1, may_raise=True)
        record = self._evidence.rerun(enough)
        return mode if record.raised is None and record.double else None
