"""Whether what the loss weighs a step by depends on rewards of a later episode.

Two runs of one step in float64 from the same start: in the second one the rewards after the end of an episode stand in
another order, so that every mean, spread and extreme over the rollout is the same. What meets a tensor with a history
and has one entry for each step (returns, advantages) is compared at the steps before the end. Where all of these are
scaled and shifted alike, the whole was standardised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.episodes import Episodes, read_episodes
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.source import here
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.same_start import SameStart, from_same_start
from pytest_trainloop.tracing.mode import WatchingMode
from pytest_trainloop.tracing.provenance import Lineage, name_of, watched

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Sequence

    from pytest_trainloop.batches.episodes import Border
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.provenance import Node

ROUNDING = 1e-9
"""Of the largest value: sums of the same numbers in another order differ by far less in float64."""

FARTHEST = 400
"""Nodes between a meeting and the values of steps behind it."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The weight of ``step`` changes from ``before`` to ``after`` with rewards after ``end``."""

    step: int
    end: int
    line: str
    """Which environment or row, where there are several."""
    before: float
    after: float
    place: str
    episodes: Episodes
    model_reads_flags: bool


@dataclass(slots=True)
class _Values:
    """What one call gave: a value for each step."""

    name: str
    place: str
    values: torch.Tensor


class StepValues(WatchingMode):
    """Values that have one entry for each step of a rollout, without a history, and which of them the loss reads."""

    def __init__(self, shape: torch.Size, flags: Callable[[], torch.Tensor | None]) -> None:
        super().__init__()
        self.found: list[_Values] = []
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
            return func(*args, **kwargs)
        with watch.suspended():
            parents = self._lineage.before(name, args, kwargs)
            given = list(tensors_in(args, kwargs))
            if any(t.requires_grad for t in given):
                for tensor in given:
                    if not tensor.requires_grad and tensor.is_floating_point():
                        self._meets(tensor, name, bool(watch.module_path()))
        out = func(*args, **kwargs)
        with watch.suspended():
            self._lineage.note(watch, func, name, args, kwargs, parents, out)
            target = args[0] if name == "__setitem__" and args else out
            for tensor in tensors_in(target):
                if self._is_of_steps(tensor) and not tensor.requires_grad:
                    self._keep(tensor, name)
        return out

    def _is_of_steps(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.shape[: len(self._shape)] == self._shape

    def _keep(self, tensor: torch.Tensor, name: str) -> None:
        node = self._lineage.of(tensor)
        self._known[id(node)] = (node, len(self.found))
        self.found.append(_Values(name, str(here()[0]), tensor.detach().double().cpu().clone()))

    def _meets(self, tensor: torch.Tensor, name: str, in_model: bool) -> None:
        """Note the values of steps that stand nearest behind what meets a tensor with a history."""
        start = self._lineage.of(tensor)
        if id(start) not in self._known and self._is_of_steps(tensor) and not start.op:
            flags = self._flags()
            if flags is None or tensor.data_ptr() != flags.data_ptr():
                self.found.append(_Values(name, str(here()[0]), tensor.detach().double().cpu().clone()))
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


def crossing(evidence: Evidence) -> tuple[Episodes | None, Crossing | None]:
    """The episodes of the example batch, and a step whose weight depends on rewards of a later one."""
    loop = evidence.fresh_loop()
    batch = first_batches(loop, 1)[0] if loop.batch is None else loop.batch
    episodes = read_episodes(batch)
    if episodes is None:
        return None, None
    runs = _Runs(evidence, batch, episodes)
    for borders in episodes.borders:
        found = runs.crossing(borders)
        if found is not None:
            return episodes, found
    return episodes, None


class _Runs:
    def __init__(self, evidence: Evidence, batch: Any, episodes: Episodes) -> None:
        self._evidence, self._batch, self._episodes = evidence, batch, episodes
        self._start = SameStart()
        rewards = next(t for path, t in nested.paths(batch) if path == episodes.rewards).detach()
        if bool((rewards == rewards.flatten()[0]).all()):  # returns of equal rewards look standardised
            random = torch.Generator().manual_seed(0)
            rewards = rewards + torch.randn(rewards.shape, generator=random).to(rewards)
        self._rewards = rewards
        self._base: StepValues | None = None

    def crossing(self, borders: Sequence[Border]) -> Crossing | None:
        if self._base is None:
            self._base = self._run(self._rewards)
        moved = self._run(self._in_other_order(borders))
        base = self._base
        if base is None or moved is None or [v.name for v in base.found] != [v.name for v in moved.found]:
            return None
        for number in base.read:
            one, other = base.found[number], moved.found[number]
            if one.values.shape != other.values.shape:
                continue
            for border in borders:
                step = _reached(one.values, other.values, border, borders)
                if step is not None:
                    (cell,) = border.cells(range(step, step + 1))
                    was, now = (float(v.values[cell].flatten()[0]) for v in (one, other))
                    line = f"{'row' if border.axis else 'environment'} {border.at[0]}" if border.at else ""
                    reads = base.model_reads_flags
                    return Crossing(step, border.step, line, was, now, one.place, self._episodes, reads)
        return None

    def _in_other_order(self, borders: Sequence[Border]) -> torch.Tensor:
        cells = [cell for border in borders for cell in border.cells(range(border.step + 1, border.steps))]
        moved = self._rewards.clone()
        for to, by in zip(cells, [*cells[1:], cells[0]], strict=True):
            moved[to] = self._rewards[by]
        return moved

    def _run(self, rewards: torch.Tensor) -> StepValues | None:
        item = nested.mapped(
            nested.copy(self._batch),
            lambda path, t: rewards.clone() if path == self._episodes.rewards else t,
            lambda value: isinstance(value, torch.Tensor),
        )
        flags: list[torch.Tensor] = []

        def note(number: int, given: Any) -> None:
            if not number:
                flags.extend(t for path, t in nested.paths(given) if path == self._episodes.flags)
                for tensor in flags:
                    mode.follow_flags(tensor)

        mode = StepValues(self._episodes.ends.shape, lambda: flags[0] if flags else None)
        seen = self._evidence.run()
        window = max(1, round(seen.items / seen.rounds)) if seen.rounds else 1
        plan = from_same_start(self._evidence.plan(), self._start, lambda _loop: [item] * window)
        contexts = plan.contexts

        def around(watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
            return (*mode.contexts(watch), *contexts(watch))

        plan = replace(plan, contexts=around, before_item=note, enough=_stepped, may_raise=True)
        record = self._evidence.rerun(plan)
        return mode if record.raised is None and record.double else None


def _stepped(record: Record) -> bool:
    return record.rounds >= 1


def _reached(one: torch.Tensor, other: torch.Tensor, border: Border, borders: Sequence[Border]) -> int | None:
    """The last step before the end whose value changes otherwise than by standardising, of one line or of all."""
    limit = ROUNDING * max(float(one.abs().max()), float(other.abs().max()))
    before, after = (_before(values, border) for values in (one, other))
    if limit != limit or not bool(((after - before).abs() > limit).any()):
        return None
    lines = [b for b in borders if b.axis == border.axis]
    whole = [torch.cat([_before(values, b) for b in lines]) for values in (one, other)]
    if _scaled(before, after, limit) or _scaled(whole[0], whole[1], limit):
        return None
    return int(((after - before).abs() > limit).reshape(len(before), -1).any(1).nonzero().max())


def _before(values: torch.Tensor, border: Border) -> torch.Tensor:
    return torch.stack([values[cell] for cell in border.cells(range(border.step))])


def _scaled(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    """Whether one factor and one shift make the second of the first."""
    basis = torch.stack([one.flatten(), torch.ones_like(one.flatten())], 1)
    fit = torch.linalg.lstsq(basis, other.flatten()[:, None], driver="gelsd").solution
    return bool(((basis @ fit)[:, 0] - other.flatten()).abs().max() <= 10 * limit)
