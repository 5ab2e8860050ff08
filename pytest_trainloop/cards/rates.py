"""The lines "schedule" and "clip"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.cards.facts import none_seen
from pytest_trainloop.cards.page import Line
from pytest_trainloop.cards.words import marked, numbered, percent, two
from pytest_trainloop.recording.events import GradWrite, SchedulerStep, Site, TensorSample
from pytest_trainloop.records.clips import LOGGED_NORM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.cards.facts import Facts


def schedule(facts: Facts) -> Iterator[Line]:
    record = facts.record
    calls: dict[tuple[str, int | None], list[SchedulerStep]] = {}
    for call in record.of(SchedulerStep):
        calls.setdefault((call.scheduler, call.optimizer), []).append(call)
    if not calls:
        rates = {rate for s in record.innermost_steps() for rate in s.lrs}
        moving = any(len({s.lrs for s in record.innermost_steps() if s.optimizer == o}) > 1 for o in facts.stepping)
        how = "are written by hand" if moving else "are constant"
        text = f"no scheduler was called; rates {how}" if rates else "none seen: give scheduler="
        yield Line(label="schedule", text=text)
        return
    for (kind, optimizer), made in calls.items():
        steps = sum(s.optimizer == optimizer for s in record.innermost_steps())
        name = facts.optimizer(optimizer)
        each = f"{numbered(len(made), 'call')} in {numbered(steps, 'step')}"
        often = len(made) == steps
        text = f"{kind}{f' of {name}' if name else ''}, {marked(each, not often)}"
        yield Line(label="schedule", text=text, where=facts.where(made[0].place), odd=not often)


def clip(facts: Facts) -> Iterator[Line]:
    record = facts.record
    by_site: dict[Site, list[GradWrite]] = {}
    for write in record.of(GradWrite):
        if write.how == "clipped":
            by_site.setdefault(write.site, []).append(write)
    if not by_site:
        yield none_seen("clip", "no gradient is clipped")
    for found in by_site.values():
        first = found[0]
        limit = "" if first.limit is None else f" {two(first.limit)}"
        if first.limit is not None and first.limit >= LOGGED_NORM:
            limit = " without limit"
        bites = sum(write.changed for write in found)
        held = {i for o in record.optimizers for i in o.parameters}
        covered = {i for write in found for i in write.parameters}
        left = sorted(_peak(w.after) / _peak(w.before) for w in found if w.changed and _peak(w.before))
        leaves = f", leaves {percent(left[len(left) // 2])}" if left else ""
        some = bool(held) and not held <= covered
        text = (
            f"{first.by}{limit} over {marked(f'{len(covered & held)} of {len(held)} tensors', some)}, "
            f"bites in {marked(f'{bites} of {len(found)} calls', not bites)}{leaves}"
        )
        yield Line(label="clip", text=text, where=facts.where(first.place), odd=some or not bites)


def _peak(samples: Mapping[int, TensorSample]) -> float:
    """The largest absolute entry."""
    return max((sample.peak for sample in samples.values()), default=0.0)
