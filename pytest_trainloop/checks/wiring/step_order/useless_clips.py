"""Clips that find no gradient, or none that a step uses, while what trains goes unclipped. Plain data, no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.wiring.step_order.call_order import late_clips
from pytest_trainloop.recording.events import ClipCall, GradWrite, Site
from pytest_trainloop.records.clip_coverage import by_line, clip_windows, limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.records.clip_coverage import Window

Why = Literal["early", "wiped", "stand_ins", "used_up"]
"""Before a gradient is there; zeroed between the clip and the step; what was handed over has no gradient by itself; an
iterator that was at its end."""


@dataclass(frozen=True, slots=True)
class ClipOfNothing:
    """A line whose every clip clips nothing that a step uses, where no other clip covers what trains."""

    first: ClipCall
    why: Why
    calls: int
    steps: int
    """Steps that used a gradient no clip had covered."""
    tensors: tuple[str, ...]
    """What trains unclipped."""
    after_zeroing: bool = False
    """Whether gradients had been zeroed just before the first of these calls."""


@dataclass(frozen=True, slots=True)
class ClipOfAnother:
    """A line that clips tensors of another optimizer than the one that steps next, which is clipped nowhere."""

    first: ClipCall
    calls: int
    steps: int
    clipped: tuple[str, ...]
    """What the line is handed, in words where it is nothing that was watched."""
    unclipped: tuple[str, ...]
    """What the next step uses."""
    kind: str
    """The class of the optimizer that steps next."""
    group: int
    optimizer: int
    twin: bool
    """Whether what is clipped gets no gradient at all and has the shapes of what trains: a copy of it."""
    same_line: bool
    """Whether the line also clips what it is handed where that is of use: a function that several updates share."""


_Moment = tuple[int, Literal["kept", "cleared", "used"]]


class _Fates:
    """What becomes of the gradient of a tensor after some moment."""

    def __init__(self, record: Record, windows: list[Window]) -> None:
        self._moments: dict[int, list[_Moment]] = defaultdict(list)
        for backward in record.backwards():
            for index, arrivals in backward.arrivals.items():
                for arrival in arrivals:
                    emptied = arrival.residual is None or arrival.residual.zero
                    self._moments[index].append((arrival.at, "cleared" if emptied else "kept"))
        for window in windows:
            for index, grad in window.step.reads[-1].grads.items():
                empty = grad is None or grad.zero
                self._moments[index].append((window.step.reads[-1].at, "cleared" if empty else "used"))
        for write in record.of(GradWrite):
            if write.how != "clipped":
                for index in write.parameters:
                    fate: Literal["cleared", "used"] = "cleared" if write.how in ("none", "zero") else "used"
                    self._moments[index].append((write.at, fate))
        for moments in self._moments.values():
            moments.sort(key=itemgetter(0))

    def known(self, index: int) -> bool:
        """Whether the tensor has a gradient at any time."""
        return bool(self._moments[index])

    def after(self, index: int, at: int) -> Literal["kept", "cleared", "used", "open"]:
        return next((fate for when, fate in self._moments[index] if when > at), "open")


@dataclass(slots=True)
class _Seen:
    """What all lines are judged by."""

    windows: list[Window]
    fates: _Fates
    trained: frozenset[int]
    """Tensors that two steps or more used a gradient of."""
    covered: frozenset[int]
    """Those of them that some clip covered, of any line, or that the loop treated by hand."""
    by_hand: frozenset[int]
    """Tensors that the loop moves or whose gradient it writes itself."""
    late: frozenset[Site]
    """Sites of clips that come after the step that used the gradients."""


def useless_clips(record: Record) -> Iterator[ClipOfNothing | ClipOfAnother]:
    """The lines of which no call, of at least two, does anything."""
    lines = [calls for calls in by_line(record) if len(calls) >= 2 and all(map(limits, calls))]
    if not lines:
        return
    windows = clip_windows(record)
    fates = _Fates(record, windows)
    steps: dict[int, int] = defaultdict(int)
    for window in windows:
        for index in window.stepped:
            steps[index] += 1
    seen = _Seen(
        windows=windows,
        fates=fates,
        trained=frozenset(i for i, n in steps.items() if n >= 2),
        covered=_covered_to_use(windows, fates),
        by_hand=frozenset(record.moved_outside_steps())
        | {i for w in record.of(GradWrite) if w.how in ("assigned", "altered") for i in w.parameters},
        late=frozenset(clips.first.site for clips in late_clips(record)),
    )
    for calls in lines:
        if (found := _judged(record, calls, seen)) is not None:
            yield found


def _covered_to_use(windows: list[Window], fates: _Fates) -> frozenset[int]:
    """Tensors that a clip covered in such a way that a step used what it left."""
    covered: set[int] = set()
    for window in windows:
        by_torch = {i for c in window.clips for i in c.found}
        covered |= window.covered - by_torch
        covered |= {i for c in window.clips for i in c.found & window.stepped if fates.after(i, c.at) != "cleared"}
    return frozenset(covered)


def _judged(record: Record, calls: list[ClipCall], seen: _Seen) -> ClipOfNothing | ClipOfAnother | None:
    iterators = {call.iterator for call in calls}
    if iterators != {None} and len(iterators) == 1 and not any(c.given or c.others or c.idle for c in calls[1:]):
        return _of_nothing(record, calls[1:] if calls[0].given else calls, seen, "used_up", _unclipped_by(calls, seen))
    if any(call.others for call in calls) or not all(_is_useless(call, seen) for call in calls):
        return None
    given = {i for call in calls for i in call.given}
    if not given:
        strange = all(call.idle for call in calls)
        return _of_another(record, calls, given, seen) if strange else _of_no_tensors(record, calls, seen)
    if any(seen.fates.known(i) for i in given & seen.by_hand):  # an average never has a gradient, however it moves
        return None
    if (another := _of_another(record, calls, given, seen)) is not None:
        return another
    mine = given & seen.trained
    if not mine or mine & seen.covered or calls[0].site in seen.late:
        return None
    found = any(call.found for call in calls)
    return _of_nothing(record, calls, seen, "wiped" if found else "early", frozenset(mine))


def _is_useless(call: ClipCall, seen: _Seen) -> bool:
    """Whether it found no gradient, or none that anything uses before it is zeroed. What stands at the end of a run
    is taken as the rest is."""
    return all(seen.fates.after(i, call.at) in ("cleared", "open") for i in call.found)


def _unclipped_by(calls: list[ClipCall], seen: _Seen) -> frozenset[int]:
    """What trains unclipped, these calls left out."""
    mine = {id(call) for call in calls}
    others = {i for w in seen.windows for c in w.clips if id(c) not in mine for i in c.found}
    return seen.trained - others - seen.by_hand


def _of_no_tensors(record: Record, calls: list[ClipCall], seen: _Seen) -> ClipOfNothing | None:
    """Handed gradients or views of weights; or a list that is empty since no tensor has a gradient yet."""
    stand_ins = {i for call in calls for i in call.stand_ins}
    if stand_ins:
        mine = stand_ins & seen.trained
        unclipped = bool(mine) and not mine & (seen.covered | seen.by_hand)
        return _of_nothing(record, calls, seen, "stand_ins", frozenset(mine)) if unclipped else None
    no_gradient = all(not any(call.norms.values()) for call in calls)
    if no_gradient and seen.trained and not seen.trained & (seen.covered | seen.by_hand):
        return _of_nothing(record, calls, seen, "early", seen.trained)
    return None


def _of_nothing(
    record: Record, calls: list[ClipCall], seen: _Seen, why: Why, unclipped: frozenset[int]
) -> ClipOfNothing | None:
    if not unclipped:
        return None
    first = calls[0]
    before = [e for e in record.events if e.at < first.at and not isinstance(e, ClipCall)]
    zeroed = bool(before) and isinstance(before[-1], GradWrite) and before[-1].how in ("none", "zero")
    return ClipOfNothing(
        first=first,
        why=why,
        calls=len(calls),
        steps=sum(bool(w.stepped & unclipped) for w in seen.windows),
        tensors=record.names(unclipped),
        after_zeroing=zeroed and any(b.at < first.at for b in record.backwards()),
    )


def _of_another(record: Record, calls: list[ClipCall], given: set[int], seen: _Seen) -> ClipOfAnother | None:
    """Each call is followed by the step of an optimizer that holds none of the tensors, has its gradients at that
    moment, and is covered by no clip of the run."""
    following = [_next_window(call, seen.windows) for call in calls]
    stepping = {w.step.optimizer for w in following if w is not None}
    if len(stepping) != 1 or None in following[:-1] or sum(w is not None for w in following) < 2:
        return None
    optimizer = record.optimizers[stepping.pop()]
    mine = {i for w in seen.windows if w.step.optimizer == optimizer.index for i in w.stepped}
    held = set(optimizer.parameters)
    if given & held or mine & (seen.covered | seen.by_hand) or not mine <= seen.trained:
        return None
    for call, window in zip(calls, following, strict=True):
        if window is not None and not _ready(record, call, window):
            return None
    twin = not given & seen.trained
    if twin and (len(mine) < 2 or sorted([*_shapes(record, given), *calls[0].idle]) != _shapes(record, mine)):
        return None
    lines = {c.site[:1] for w in seen.windows for c in w.clips if not _is_useless(c, seen) and c.found & given}
    group_of = dict(zip(optimizer.parameters, optimizer.groups, strict=False))
    return ClipOfAnother(
        first=calls[0],
        calls=len(calls),
        steps=sum(w.step.optimizer == optimizer.index for w in seen.windows),
        clipped=record.names(given) or ("copies of the weights",),
        unclipped=record.names(mine),
        kind=optimizer.kind,
        group=min(group_of.get(i, 0) for i in mine),
        optimizer=optimizer.index,
        twin=twin,
        same_line=calls[0].site[:1] in lines,
    )


def _next_window(call: ClipCall, windows: list[Window]) -> Window | None:
    return next((w for w in windows if w.step.reads[-1].at > call.at and w.stepped), None)


def _ready(record: Record, call: ClipCall, window: Window) -> bool:
    """Whether the step's gradients stood there at the call, and none was added after it."""
    there = all(call.norms.get(i, 0.0) != 0.0 for i in window.stepped)
    until = window.step.reads[-1].at
    return there and not any(call.at < a.at < until for i in window.stepped for a in record.arrivals(i))


def _shapes(record: Record, indices: set[int]) -> list[tuple[int, ...]]:
    return sorted(record.parameters[i].shape for i in indices)


def limit_of(call: ClipCall) -> str:
    """The limit in words."""
    return "unknown" if math.isnan(call.limit) else f"{call.limit:g}"
