"""Schedulers that are gone, or are built with another setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.checks.guard.baseline.facts import Fact, equal
from pytest_trainloop.wording import be, count, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.baselines.trajectory import Course, Scheduler
    from pytest_trainloop.checks.guard.baseline.names import Names


def schedulers(old: Course, new: Course, names: Names) -> Iterator[Fact]:
    """The changes; of a scheduler that is built and no longer stepped only the call is gone (``calls.py``)."""
    if len(old.schedulers) > len(new.schedulers) and not new.schedulers:
        kinds = [scheduler.kind for scheduler in old.schedulers]
        if not set(kinds) & set(new.idle):
            yield Fact(
                cause="scheduler_differs",
                culprits=(f"{kinds[0]}()",),
                summary=f"{some(kinds)} {be(kinds)} gone: no scheduler is built",
                measured=f"{count(len(old.schedulers), 'scheduler')} in the baseline, none now",
                kinds=frozenset({"rate"}),
                alone=is_flat(old),  # rates that moved, and still do so, are set by other means
            )
        return
    for a, b in zip(old.schedulers, new.schedulers, strict=False):
        changed: list[str] = []
        if a.kind != b.kind:
            summary = f"the scheduler is {b.kind}; in the baseline it is {a.kind}"
            measured = f"{b.kind}({_settings(b.settings)})"
        elif changed := _changed(a, b, old, new, names):
            name = changed[0]
            now, then = (_short(s.settings[name]) for s in (b, a))
            if now == then:
                now, then = b.settings[name], a.settings[name]
            summary = f"{name} of {b.kind} is {now}; in the baseline it is {then}"
            measured = f"{count(len(changed), 'setting')} of {b.kind} changed: {some(changed, most=4)}"
        else:
            continue
        yield Fact(
            cause="scheduler_differs",
            culprits=(f"{b.kind}()",),
            summary=summary,
            measured=measured,
            kinds=frozenset({"rate"}),
            alone=a.kind == b.kind and not any("lambda" in name for name in changed),
        )


def is_flat(course: Course) -> bool:
    """Whether the rates stay as they are in the recorded steps."""
    return len({rate for step in course.steps for rate in step.rates}) <= len(course.optimizers)


def _changed(a: Scheduler, b: Scheduler, old: Course, new: Course, names: Names) -> list[str]:
    """The settings that are others; a list with an entry for each group is compared parameter by parameter, so that
    other groups with the same options are no change."""
    return [
        name
        for name, was in a.settings.items()
        if name in b.settings
        and not equal(was, b.settings[name])
        and not _same_for_each(_by_parameter(a, was, old), _by_parameter(b, b.settings[name], new), names)
    ]


def _same_for_each(before: Mapping[str, str], now: Mapping[str, str], names: Names) -> bool:
    pairs = [
        (before[a], now[b]) for match in names.matches for a in match.old for b in match.new if a in before and b in now
    ]
    return bool(pairs) and all(equal(one, other) for one, other in pairs)


def _by_parameter(scheduler: Scheduler, setting: str, course: Course) -> dict[str, str]:
    """The entry of each parameter's group; empty for a setting that is no list of one entry a group."""
    entries = _entries(setting)
    if scheduler.optimizer is None or scheduler.optimizer >= len(course.optimizers):
        return {}
    groups = course.optimizers[scheduler.optimizer].groups
    if len(entries) != len(groups):
        return {}
    return {name: entry for group, entry in zip(groups, entries, strict=True) for name in group.parameters}


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


def _short(setting: str) -> str:
    """The setting; one entry where all groups have the same."""
    entries = _entries(setting)
    return entries[0] if len(set(entries)) == 1 else setting


def _settings(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in list(settings.items())[:3])
