"""Averages of trained weights that are kept in a low precision, and whose updates rounding takes back.

In float64 such a copy a changes between two steps by w (p - a), with one weight w for all entries of the trained p; no
other rule moves it so. Given w, half a ULP at an entry's value says how far p must be away before the entry moves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.gradients.vectors import values
from pytest_trainloop.optimizers.lost_updates import spaced_by_index
from pytest_trainloop.optimizers.spacing import spacings
from pytest_trainloop.recording.function_mode import FunctionMode
from pytest_trainloop.recording.hooks import before_steps
from pytest_trainloop.recording.samples import readable
from pytest_trainloop.recording.seams import passed_on
from pytest_trainloop.recording.source import here
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pytest_trainloop.recording.record import Parameter, Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

HALF = 0.5
"""Share of a copy's entries that must keep their bits."""

LEAST_UPDATES = 3

LONGER = 5
"""Times as many steps for a displaced copy to come back: 60 updates of a sixteenth of a ULP."""

EXACT = 1e-6
"""How far a change may be from w (p - a), relative to its own size: float64 leaves 1e-9 of it where both are 1e-4
apart."""


@dataclass(frozen=True, slots=True)
class LostAverage:
    """Averages in one dtype that never move."""

    names: tuple[str, ...]
    dtype: str
    weight: float
    """Of the trained weights in each update of the average."""
    largest: float
    """Largest change of an entry that one update makes in float64."""
    ulp: float
    """Median ULP of the entries that keep their bits."""
    needed: float
    """Least distance to the trained weight, in multiples of the entry's size, from which half of them move."""
    place: str


@dataclass(frozen=True, slots=True)
class _Update:
    weight: float
    largest: float


@dataclass(slots=True)
class _Float64Run:
    """Entries of copies and of trained weights before each step, and the first line that writes to a copy."""

    entries: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    place: str = ""


def resting_copies(record: Record, dtypes: Collection[str]) -> list[Parameter]:
    """Low-precision tensors in no optimizer, shaped like a trained one, half of whose entries keep their bits."""
    trained = {record.parameters[i].shape for i in record.held}
    return [
        p
        for p in record.parameters
        if p.dtype in dtypes
        and p.index not in record.held
        and p.shape in trained
        and not p.gone
        and p.index in record.end
        and float(_unchanged(record, p).double().mean() if len(p.start.raw) else 0.0) >= HALF
    ]


def _unchanged(record: Record, p: Parameter) -> torch.Tensor:
    start, end = values(p.start, p.dtype), values(record.end[p.index], p.dtype)
    return start == end if len(start) == len(end) else torch.zeros(1, dtype=torch.bool)


class WeightAverages:
    """The watched run in float64, with the values of copies and trained weights before every step."""

    def __init__(self, evidence: Evidence) -> None:
        self._record, self._plan, self._rerun = evidence.run(), evidence.plan(), evidence.rerun

    def lost(self, dtypes: Collection[str]) -> list[LostAverage]:
        """The averages that never move, those of one dtype together."""
        copies = {p.name: p for p in resting_copies(self._record, dtypes)}
        trained = {self._record.name(i): self._record.parameters[i] for i in self._record.held}
        wide = _Float64Run()
        contexts = lambda watch: (_entries(watch, wide, {*copies, *trained}), _FirstWrite(watch, wide, set(copies)))  # noqa: E731
        self._rerun(double=True, contexts=contexts, may_raise=True)
        by_dtype: dict[str, list[LostAverage]] = defaultdict(list)
        for name, copy in copies.items():
            partners = [n for n, p in trained.items() if p.shape == copy.shape]
            updates = next((u for n in partners if (u := _updates(wide.entries[name], wide.entries[n]))), [])
            if len(updates) >= LEAST_UPDATES and (found := self._average(copy, updates, wide.place)).needed >= 1.0:
                by_dtype[copy.dtype].append(found)
        together = [
            replace(min(found, key=lambda f: f.needed), names=tuple(n for f in found for n in f.names))
            for found in by_dtype.values()
        ]
        return list(filter(None, map(self._staying, together)))

    def _average(self, copy: Parameter, updates: Sequence[_Update], place: str) -> LostAverage:
        weight = max(u.weight for u in updates)
        at = values(copy.start, copy.dtype)[_unchanged(self._record, copy)]
        ulp = spacings(at, copy.dtype)
        needed = ulp / 2 / (weight * at.abs().clamp_min(torch.finfo(torch.float64).tiny))
        largest = max(u.largest for u in updates)
        return LostAverage(
            (copy.name,), copy.dtype, weight, largest, float(ulp.median()), float(needed.median()), place
        )

    def _staying(self, found: LostAverage) -> LostAverage | None:
        """Those of the copies that do not come back from an eighth of the distance at which they begin to move. A copy
        that is overwritten from a better average, kept in float32, does after a few updates."""

        def displaced(watch: Watch) -> None:
            with torch.no_grad():
                for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                    if entry.name in found.names:
                        tensor.div_(1.0 + found.needed / 8)
            watch.table.begin_anew()

        record = self._rerun(
            prepare=displaced,
            count=LONGER * self._plan.count,
            enough=lambda record: record.rounds >= LONGER * FULL_ROUNDS,
        )
        if record.rounds < LONGER * FULL_ROUNDS // 2:
            return None  # too few for it to come back
        resting = {p.name for p in resting_copies(record, {found.dtype})}
        names = tuple(name for name in found.names if name in resting)
        return replace(found, names=names) if names else None


def _updates(copy: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> list[_Update]:
    """The changes of a copy, if each is one weight times its distance to the trained one; else none."""
    found: list[_Update] = []
    for (a, p), (a_next, p_next) in itertools.pairwise(zip(copy, trained, strict=False)):
        change = a_next - a
        if not bool(change.any()):
            continue
        update = next((u for q in (p_next, p) if (u := _update(a, change, q)) is not None), None)
        if update is None:
            return []
        found.append(update)
    return found


def _update(a: torch.Tensor, change: torch.Tensor, p: torch.Tensor) -> _Update | None:
    away = p - a
    length = float(away @ away)
    weight = float(change @ away) / length if length > 0.0 else 0.0
    left = float((change - weight * away).abs().max())
    exact = left <= EXACT * float(change.abs().max()) + 16 * torch.finfo(torch.float64).eps * float(a.abs().max())
    return _Update(weight, float(change.abs().max())) if exact and 0.0 < weight < 1.0 else None


@contextlib.contextmanager
def _entries(watch: Watch, wide: _Float64Run, names: set[str]) -> Iterator[None]:
    def enter(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not watch.full:
            return
        with watch.suspended(), torch.no_grad():
            for entry, tensor in zip(watch.table.entries, watch.table.tensors, strict=True):
                if entry.name in names and readable(tensor) and tensor.dtype is torch.float64:
                    wide.entries[entry.name].append(spaced_by_index(tensor).clone())

    with hooked(before_steps(enter)):
        yield


class _FirstWrite(FunctionMode):
    """Notes the first line that writes to a copy."""

    def __init__(self, watch: Watch, wide: _Float64Run, names: set[str]) -> None:
        super().__init__()
        self._watch, self._wide, self._names = watch, wide, names

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._wide.place and name.endswith("_") and not name.endswith("__") and args:
            target = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
            index = self._watch.table.index(target) if isinstance(target, torch.Tensor) else None
            if index is not None and self._watch.table.entries[index].name in self._names:
                self._wide.place = str(here()[0])
        return passed_on(func, args, kwargs)
