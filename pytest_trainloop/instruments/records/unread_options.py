"""Keys of parameter groups that name an option of their optimizer, and that nobody reads.

Torch's optimizers take any key in a group and read only their own.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import CannotDecide, UsageError, UserCodeError
from pytest_trainloop.core.finding import Finding
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.records.learning_rates import lrs
from pytest_trainloop.instruments.records.option_names import meaning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.tracing.group_keys import GroupKeys
    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.runs.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Suspect:
    """A key that is no option of its optimizer, and that is named like one or a multiple of one."""

    optimizer: int
    key: str
    option: str
    multiplies: bool
    values: dict[int, str]
    """Its value in each group, as text."""
    own: dict[int, tuple[object, ...]]
    """The values that the option takes in each group, the first step's first."""


@dataclass(frozen=True, slots=True)
class UnreadOptions:
    """The suspects of a run, and what a further run shows of them."""

    suspects: tuple[Suspect, ...] = ()
    keys: GroupKeys | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> UnreadOptions:
        suspects = tuple(_suspects(evidence.run()))
        if not suspects or not evidence.repeatable:
            return cls()
        from pytest_trainloop.instruments.tracing.group_keys import GroupKeys

        keys = GroupKeys({s.key for s in suspects})
        with contextlib.suppress(CannotDecide, UsageError, UserCodeError):
            keys.run(evidence)
            return cls(tuple(s for s in suspects if s.key not in keys.read | keys.lost), keys)
        return cls()

    def findings(self, record: Record, *, decay: bool) -> Iterator[Finding]:
        """One for each key that nobody reads: those of weight decays, or all others."""
        for suspect in self.suspects:
            if (suspect.option == "weight_decay") is decay:
                found = self._multiple(record, suspect) if suspect.multiplies else self._option(record, suspect)
                if found is not None:
                    yield found

    def _option(self, record: Record, suspect: Suspect) -> Finding | None:
        """A group that gives the option too has the key for itself."""
        keys, optimizer = self.keys, record.optimizers[suspect.optimizer]
        given = keys.groups.keys.get(optimizer.index, []) if keys is not None else []
        groups = [g for g in suspect.values if g >= len(given) or suspect.option not in given[g]]
        if keys is None or not groups:
            return None
        by_hand = suspect.option == "lr" and any(
            "hand" in r.movers for r in lrs(record) if r.optimizer == optimizer.index
        )
        first = groups[0]
        value, own = suspect.values[first], _text(suspect.own[first])
        held = _held(record, optimizer, first)
        which = f"group {first}" if len(groups) == 1 else f"groups {', '.join(map(str, groups))}"
        give = "gives" if len(groups) == 1 else "give"
        return Finding(
            cause="option_nobody_reads",
            level="fault" if keys.whole and not by_hand else "advice",
            summary=(
                f"{which} of {optimizer.kind} {give} {suspect.key}={value}, which nothing reads: "
                f"{suspect.option}={own} is in effect"
            ),
            measured=(
                f"group {first} holds {some(held)}, with {suspect.option} {own}; {optimizer.kind} reads "
                f"{some(optimizer.options, 12)}"
            ),
            shown_by=f'torch keeps "{suspect.key}" in the group without an error; {_READ_BY_NOBODY}',
            culprits=tuple(f'param_groups[{g}]["{suspect.key}"]' for g in groups[:8]),
            where=keys.groups.built.get(optimizer.index) or record.step_line(),
            repair=f'"{suspect.option}": {value} in this group',
        )

    def _multiple(self, record: Record, suspect: Suspect) -> Finding | None:
        """A fault where a schedule runs, which would be the one to read it; else one outside fit may."""
        keys, optimizer = self.keys, record.optimizers[suspect.optimizer]
        own = [r for r in lrs(record) if r.optimizer == optimizer.index]
        schedulers = [s for s in record.schedulers if s.optimizer == optimizer.index]
        runs = any(r.moves for r in own) or bool(schedulers)
        known = all(s.from_torch or s.calls for s in schedulers)
        pair = _unmoved(suspect)
        if keys is None or pair is None:
            return None
        values = [suspect.values.get(g, "1") for g in pair]
        what = "learn at" if suspect.option == "lr" else f"have {suspect.option}"
        scheduled = "a schedule runs in fit and does not read it; " if any(r.moves for r in own) else ""
        return Finding(
            cause="option_nobody_reads",
            level="fault" if keys.whole and runs and known and not _moved(suspect) else "advice",
            summary=(
                f"groups {pair[0]} and {pair[1]} of {optimizer.kind} have {suspect.key} {values[0]} and {values[1]}, "
                f"which nothing reads: both {what} {_text(suspect.own[pair[0]])}"
            ),
            measured=(
                f"{some(_held(record, optimizer, pair[0]))} with {suspect.key} {values[0]} and "
                f"{some(_held(record, optimizer, pair[1]))} with {values[1]} have one {suspect.option}, "
                f"{_text(suspect.own[pair[0]])}, at every step"
            ),
            shown_by=f"{scheduled}{_READ_BY_NOBODY}",
            culprits=tuple(f'param_groups[{g}]["{suspect.key}"]' for g in suspect.values)[:8],
            where=keys.groups.built.get(optimizer.index) or record.step_line(),
            repair=(
                f'give each group its own "{suspect.option}", or multiply where it is set: '
                f'group["{suspect.option}"] = {suspect.option} * group["{suspect.key}"]'
            ),
        )


_READ_BY_NOBODY = "no line of the loop or of a library reads it while the loop is built or in fit"


def _suspects(record: Record) -> Iterator[Suspect]:
    """The keys whose value differs from the option's, or, of multiples, that differ between groups with one option."""
    for optimizer in record.optimizers:
        if not optimizer.from_torch or not optimizer.steps:
            continue
        for key in dict.fromkeys(key for settings in optimizer.settings for key in settings):
            named = meaning(key, optimizer.options)
            if named is None:
                continue
            own = _own(record, optimizer, named.option)
            values = {g: s[key] for g, s in enumerate(optimizer.settings) if key in s and g in own}
            if not named.multiplies:
                values = {g: text for g, text in values.items() if _differ(_value(text), own[g])}
            suspect = Suspect(optimizer.index, key, named.option, named.multiplies, values, own)
            if values and (not named.multiplies or _unmoved(suspect) is not None):
                yield suspect


def _own(record: Record, optimizer: Optimizer, option: str) -> dict[int, tuple[object, ...]]:
    """The option of each group: a rate at every step, and before where it was another."""
    if option != "lr":
        return {g: (_value(settings[option]),) for g, settings in enumerate(optimizer.settings) if option in settings}
    own = {r.group: r.known for r in lrs(record) if r.optimizer == optimizer.index and r.known}
    before = zip(optimizer.first_lrs, optimizer.peak_lrs, strict=False)
    known = {g: [v for v in pair if v == v] for g, pair in enumerate(before)}  # NaN without a scheduler
    return {g: (*values, *known.get(g, ())) for g, values in own.items()}


def _differ(value: object, own: tuple[object, ...]) -> bool:
    """Whether a key has a value of the option's kind, and one that the option never has."""
    known = own[0]
    if isinstance(known, bool) or isinstance(value, bool):
        return type(value) is type(known) and value != known
    if isinstance(known, (int, float)) and isinstance(value, (int, float)):
        return value not in own
    return isinstance(value, (tuple, list)) and isinstance(known, (tuple, list)) and list(value) != list(known)


def _unmoved(suspect: Suspect) -> tuple[int, int] | None:
    """Two groups that differ in the multiple and in nothing that it would change."""
    own = suspect.own
    return next(((a, b) for a, b in _multiplied_otherwise(suspect) if own[a] == own[b] and any(own[a])), None)


def _moved(suspect: Suspect) -> bool:
    """Whether other groups that differ in the multiple differ in the option too: something may have read it before
    the optimizer was built, and held the product of two groups at one bound."""
    return any(suspect.own[a] != suspect.own[b] for a, b in _multiplied_otherwise(suspect))


def _multiplied_otherwise(suspect: Suspect) -> Iterator[tuple[int, int]]:
    multiples = {g: _value(suspect.values.get(g, "1")) for g in suspect.own}
    numbers = {g: v for g, v in multiples.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return ((a, b) for a, b in itertools.combinations(numbers, 2) if numbers[a] != numbers[b])


def _text(own: tuple[object, ...]) -> str:
    """The option of a group in a sentence."""
    first = own[0]
    return f"{first:g}" if isinstance(first, float) else str(first)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return None


def _held(record: Record, optimizer: Optimizer, group: int) -> list[str]:
    return [record.name(i) for i, g in zip(optimizer.parameters, optimizer.groups, strict=True) if g == group]
