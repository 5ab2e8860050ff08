"""The closing section: the loops with a failure first, each by its root causes; what is left open; the totals.

No torch, no pytest: lines with a style in, for whoever prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.core.report.entry import by_loop
from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding, Result
    from pytest_trainloop.core.report.entry import Entry


Style = Literal["plain", "good", "bad", "warn", "loud"]

_UNDECIDED = ("skipped", "unreliable")
_LEFT_OUT = "not looked at"
_MOST_NAMED = 6
"""Checks that one line names; more are counted."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the section."""

    text: str
    style: Style = "plain"


def section(entries: Sequence[Entry], *, name_all: bool = False, fold: bool = False) -> list[Line]:
    """The lines for all loops: those with a failure first, what is left open once for all loops, the totals last.

    A loop's entries are expected in causal order. A check whose question a loop does not pose is counted only.
    ``name_all``: whether undecided checks are named, however many they are. ``fold``: whether what only a declaration
    would add is one line where nothing failed, ``-v`` names it.
    """
    loops = [(loop, [entry.result for entry in own]) for loop, own in by_loop(entries)]
    loops.sort(key=lambda each: not any(_is_bad(r) for r in each[1]))
    lines = [line for loop, results in loops for line in _loop(loop, results)]
    lines.extend(_open_questions(entries, name_all, fold=fold and not any(_is_bad(e.result) for e in entries)))
    lines.extend(_previews_off(entries))
    if len(loops) > 1:
        results = [entry.result for entry in entries]
        lines.append(Line(f"{len(loops)} in all: {counts(results)}", _style(results)))
    return lines


def checked_nothing(entries: Sequence[Entry]) -> str:
    """Why the run checked nothing, or an empty string if it did check something."""
    undecided = [e.result for e in entries if e.result.outcome in _UNDECIDED]
    if len(undecided) < len(entries):
        return ""
    if not undecided:
        return "no selected test carries @pytest.mark.trainloop or trainloop_loss"
    reasons = Counter(r.reason for r in undecided).most_common()
    return f"all checks were skipped: {'; '.join(f'{count} x {reason}' for reason, count in reasons)}"


def half_looked_at(results: Sequence[Result]) -> bool:
    """Whether time was left for at least half of a loop's checks."""
    return 2 * sum(not r.looked_at for r in results) <= len(results)


def _ran(result: Result) -> bool:
    return result.outcome not in _UNDECIDED


def _is_bad(result: Result) -> bool:
    return result.outcome in ("failed", "error")


def _style(results: Sequence[Result]) -> Style:
    if any(map(_is_bad, results)):
        return "bad"
    return "good" if any(map(_ran, results)) and half_looked_at(results) else "loud"


def _loop(loop: str, results: Sequence[Result]) -> Iterator[Line]:
    yield Line(f"{loop}  {counts(results)}", _style(results))
    yield from _root_causes([r for r in results if r.outcome == "failed"])
    yield from _errors([r for r in results if r.outcome == "error"])
    for result in results:
        if result.outcome == "xfailed":
            yield Line(f"  xfailed  {result.check}: {result.reason}")
    faults = [(r.check, fault) for r in results if r.outcome == "failed" for fault in r.faults]
    for result in results:
        for advice in result.advice:
            first = next((check for check, fault in faults if fault.accounts_for(result.check, advice.cause)), "")
            yield Line(
                f"  advice  {result.check}: {advice.summary}{f' (repair {first} first)' if first else ''}", "warn"
            )
            if first:
                continue
            if line := advice.change or advice.where:
                yield Line(f"    {'change' if advice.change else 'seen at'}  {line}")
            if advice.repair and not advice.accepted:
                yield Line("    to fix or silence, one of:" if "; " in advice.repair else "    to fix or silence:")
                yield from (Line(f"      {remedy}") for remedy in advice.repair.split("; "))
    for result in results:
        for note in result.notes:
            yield Line(f"  note  {result.check}: {note.summary}")


def counts(results: Sequence[Result]) -> str:
    """How many checks came to which end, and what they cost."""
    of = Counter(r.outcome for r in results)
    skipped = [r for r in results if r.outcome == "skipped"]
    needs = [r.needs for r in skipped if r.needs]
    elsewhere = sum(not r.applies for r in skipped)
    left_out = sum(not r.looked_at for r in skipped)
    counted = {
        "failed": of["failed"],
        "errors" if of["error"] > 1 else "error": of["error"],
        "passed": of["passed"],
        "xfailed": of["xfailed"],
        "advice": sum(len(r.advice) for r in results),
        "unreliable": of["unreliable"],
        "skipped": len(skipped) - len(needs) - elsewhere - left_out,
        "not looked at": left_out,
        "do not apply" if elsewhere > 1 else "does not apply": elsewhere,
        f"need{'s' * (len(needs) == 1)} more ({', '.join(dict.fromkeys(needs))})": len(needs),
    }
    counted_in_words = ", ".join(f"{count} {what}" for what, count in counted.items() if count)
    nothing = "" if any(map(_ran, results)) else "NOTHING WAS CHECKED, "
    if not nothing and not half_looked_at(results):
        nothing = "MORE THAN HALF WAS NOT LOOKED AT, "
    cost = f"{sum(r.seconds for r in results):.1f} s, {sum(r.steps for r in results)} optimizer steps"
    return f"{nothing}{counted_in_words}; {cost}"


@dataclass(frozen=True, slots=True)
class Undecided:
    """What was not decided in one or more loops, for one reason."""

    label: str
    """What is needed, or the outcome."""
    checks: tuple[str, ...]
    reason: str
    loops: tuple[str, ...]
    all_loops: int

    @property
    def named(self) -> tuple[str, ...]:
        """The checks by name; none where they are too many to read, but for those that only time kept from deciding."""
        return self.checks if len(self.checks) <= _MOST_NAMED or self.label == _LEFT_OUT else ()


def _label(result: Result) -> str:
    return result.outcome if result.looked_at else _LEFT_OUT


def undecided(entries: Sequence[Entry]) -> Iterator[Undecided]:
    """What was not decided, once for all loops: first what a declaration or another batch would settle."""
    loops = [(loop, [entry.result for entry in own]) for loop, own in by_loop(entries)]
    groups: dict[tuple[str, str], list[tuple[str, Result]]] = {}
    for loop, results in loops:
        for r in results:
            if not _ran(r) and r.applies:
                key = (f"needs {r.needs}", r.check) if r.needs else (_label(r), r.reason)
                groups.setdefault(key, []).append((loop, r))
    for (label, _), found in sorted(groups.items(), key=lambda group: group[0][0] in (*_UNDECIDED, _LEFT_OUT)):
        checks = tuple(dict.fromkeys(r.check for _, r in found))
        reason = Counter(r.reason for _, r in found).most_common(1)[0][0]
        where = tuple(dict.fromkeys(loop for loop, _ in found))
        yield Undecided(label, checks, reason, where, len(loops))


def _open_questions(entries: Sequence[Entry], name_all: bool, *, fold: bool) -> Iterator[Line]:
    if fold and (more := {e.result.check for e in entries if e.result.needs}):
        yield Line(f"  {count(len(more), 'more check')} possible: -v says what is needed")
    for each in undecided(entries):
        if fold and each.label not in (*_UNDECIDED, _LEFT_OUT):
            continue
        checks = ", ".join(each.checks if name_all else each.named) or f"{len(each.checks)} checks"
        where = each.loops[0] if len(each.loops) == 1 else f"{len(each.loops)} of {each.all_loops}"
        yield Line(f"  {each.label}  {checks}: {each.reason}{f' ({where})' if each.all_loops > 1 else ''}")


def _previews_off(entries: Sequence[Entry]) -> Iterator[Line]:
    """How many causes were not reported: those of each check once, in however many loops."""
    off = sum({entry.result.check: entry.result.previews_off for entry in entries}.values())
    if off:
        yield Line(f"  preview  {count(off, 'cause')} not reported: --trainloop-preview reports them too")


def _root_causes(failed: Sequence[Result]) -> Iterator[Line]:
    """A failed check that another one explains is a consequence, listed under its root cause."""
    for cause in root_causes(failed):
        result = cause.result
        if result.reason or not result.faults:
            yield Line(f"  {result.check}: {result.reason or 'failed'}", "bad")
        for fault, followed in zip(result.faults, cause.followed, strict=True):
            yield _cause(fault, result.check)
            if followed:
                yield Line(f"    also fails for it: {', '.join(followed)}")


def _cause(fault: Finding, check: str) -> Line:
    return Line(f"  {check}: {fault.summary} [{fault.cause}]", "bad")


def _errors(results: Sequence[Result]) -> Iterator[Line]:
    """The errors; a mistake of ours that stopped several checks once, with all of them."""
    stopped: dict[str, list[str]] = {}
    for result in results:
        text = (
            f"{result.error.stage} raised {result.error.summary}" if result.error else result.reason.partition("\n")[0]
        )
        stopped.setdefault(text.removeprefix(f"{result.check} "), []).append(result.check)
    for text, checks in stopped.items():
        yield Line(f"  error  {', '.join(checks)}: {text}", "bad")
