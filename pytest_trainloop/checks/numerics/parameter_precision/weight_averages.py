"""Averages of trained weights that are kept in a low precision, and whose blends rounding takes back.

In float64 the change of such a copy between two steps is w (p - a) for one weight w: no other rule moves it so. With
that w, half the spacing at an entry's value tells how far the trained weight must be away before the entry moves.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.optimizers.lost_updates import spaced_by_index
from pytest_trainloop.optimizers.spacing import spacings
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

HALF = 0.5
"""Share of a copy's entries that must rest."""

LEAST_BLENDS = 3

LONGER = 5
"""Times as many steps for a displaced copy to come back: 60 blends of a sixteenth of the spacing."""

EXACT = 1e-6
"""How far a change may be from w (p - a), against its own size: float64 leaves 1e-9 of it where both are 1e-4 apart."""


@dataclass(frozen=True, slots=True)
class LostAverage:
    """Copies that rest: the weight of each blend, the largest change of an entry that one makes in float64, the median
    spacing of the entries that rest, and the least distance, in multiples of its own size, from which half of them
    move."""

    names: tuple[str, ...]
    dtype: str
    weight: float
    largest: float
    spacing: float
    needed: float
    place: str


@dataclass(frozen=True, slots=True)
class _Blend:
    weight: float
    largest: float


@dataclass(slots=True)
class _Looks:
    """Of the float64 run: the entries of copies and of trained weights before each step, and where copies change."""

    entries: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    place: str = ""


def resting_copies(record: Record, dtypes: Collection[str]) -> list[Parameter]:
    """Low-precision tensors that nobody steps, as large as one that trains, half of whose entries keep their bits."""
    trained = {record.parameters[i].shape for i in record.held}
    return [
        p
        for p in record.parameters
        if p.dtype in dtypes
        and p.index not in record.held
        and p.shape in trained
        and not p.gone
        and p.index in record.end
        and float(_rests(record, p).double().mean() if len(p.start.sample) else 0.0) >= HALF
    ]


def _rests(record: Record, p: Parameter) -> torch.Tensor:
    start, end = values(p.start, p.dtype), values(record.end[p.index], p.dtype)
    return start == end if len(start) == len(end) else torch.zeros(1, dtype=torch.bool)


class Averages:
    """The watched run in float64, with a look at copies and trained weights before every step."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun

    def lost(self, dtypes: Collection[str]) -> list[LostAverage]:
        copies = {p.name: p for p in resting_copies(self._seen, dtypes)}
        trained = {self._seen.name(i): self._seen.parameters[i] for i in self._seen.held}
        looks = _Looks()
        contexts = lambda watch: (_looking(watch, looks, {*copies, *trained}), _Places(watch, looks, set(copies)))  # noqa: E731
        self._run(replace(self._plan, double=True, contexts=contexts))
        found = []
        for name, copy in copies.items():
            partners = [n for n, p in trained.items() if p.shape == copy.shape]
            blends = next((b for n in partners if (b := _blends(looks.entries[name], looks.entries[n]))), [])
            if len(blends) >= LEAST_BLENDS:
                found.append(self._judged(copy, blends, looks.place))
        return list(filter(None, map(self._staying, _together([f for f in found if f.needed >= 1.0]))))

    def _staying(self, found: LostAverage) -> LostAverage | None:
        """Those of the copies that do not come back from an eighth of the distance at which they begin to move. One
        that is written anew from a better average, kept in float32, does after a few blends."""

        def displaced(watch: Watch) -> None:
            with torch.no_grad():
                for entry, tensor in zip(watch.book.entries, watch.book.tensors, strict=True):
                    if entry.name in found.names:
                        tensor.div_(1.0 + found.needed / 8)
            watch.book.begin_anew()

        enough = lambda record: record.rounds >= LONGER * FULL_ROUNDS  # noqa: E731
        plan = replace(self._plan, prepare=displaced, count=LONGER * self._plan.count, enough=enough)
        record = self._run(plan)
        if record.rounds < LONGER * FULL_ROUNDS // 2:
            return None  # too few for it to come back
        resting = {p.name for p in resting_copies(record, {found.dtype})}
        names = tuple(name for name in found.names if name in resting)
        return replace(found, names=names) if names else None

    def _judged(self, copy: Parameter, blends: Sequence[_Blend], place: str) -> LostAverage:
        weight = max(b.weight for b in blends)
        at = values(copy.start, copy.dtype)[_rests(self._seen, copy)]
        spacing = spacings(at, copy.dtype)
        needed = spacing / 2 / (weight * at.abs().clamp_min(torch.finfo(torch.float64).tiny))
        largest = max(b.largest for b in blends)
        return LostAverage(
            (copy.name,), copy.dtype, weight, largest, float(spacing.median()), float(needed.median()), place
        )


def _together(found: Sequence[LostAverage]) -> list[LostAverage]:
    """One finding for the copies of one dtype."""
    by_dtype: dict[str, list[LostAverage]] = defaultdict(list)
    for one in found:
        by_dtype[one.dtype].append(one)
    return [
        replace(min(all_of, key=lambda f: f.needed), names=tuple(n for f in all_of for n in f.names))
        for all_of in by_dtype.values()
    ]


def _blends(copy: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> list[_Blend]:
    """The changes of a copy, where each is one weight times its distance to the trained one; else none."""
    found: list[_Blend] = []
    for (a, p), (a_next, p_next) in zip(
        zip(copy, trained, strict=False), list(zip(copy, trained, strict=False))[1:], strict=False
    ):
        change = a_next - a
        if not bool(change.any()):
            continue
        blend = next((b for q in (p_next, p) if (b := _blend(a, change, q)) is not None), None)
        if blend is None:
            return []
        found.append(blend)
    return found


def _blend(a: torch.Tensor, change: torch.Tensor, p: torch.Tensor) -> _Blend | None:
    away = p - a
    length = float(away @ away)
    weight = float(change @ away) / length if length > 0.0 else 0.0
    left = float((change - weight * away).abs().max())
    exact = left <= EXACT * float(change.abs().max()) + 16 * torch.finfo(torch.float64).eps * float(a.abs().max())
    return _Blend(weight, float(change.abs().max())) if exact and 0.0 < weight < 1.0 else None


@contextlib.contextmanager
def _looking(watch: Watch, looks: _Looks, names: set[str]) -> Iterator[None]:
    def enter(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not watch.full:
            return
        with watch.quietly(), torch.no_grad():
            for entry, tensor in zip(watch.book.entries, watch.book.tensors, strict=True):
                if entry.name in names and readable(tensor) and tensor.dtype is torch.float64:
                    looks.entries[entry.name].append(spaced_by_index(tensor).clone())

    with hooked(register_optimizer_step_pre_hook(enter)):
        yield


class _Places(FunctionMode):
    """Notes the first line that writes to a copy."""

    def __init__(self, watch: Watch, looks: _Looks, names: set[str]) -> None:
        super().__init__()
        self._watch, self._looks, self._names = watch, looks, names

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._looks.place and name.endswith("_") and not name.endswith("__") and args:
            target = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
            index = self._watch.book.index(target) if isinstance(target, torch.Tensor) else None
            if index is not None and self._watch.book.entries[index].name in self._names:
                self._looks.place = str(here(2)[0])
        return func(*args, **kwargs)
