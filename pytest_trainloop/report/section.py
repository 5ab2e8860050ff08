"""The closing section: each loop's root causes with what they explain, the advice, notes, what was skipped and why.

No torch, no pytest: lines with a style in, for whoever prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.report.entry import by_loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_trainloop.finding import Finding, Result
    from pytest_trainloop.report.entry import Entry

    Above = Mapping[str, tuple[str, int] | None]

Style = Literal["plain", "good", "bad", "warn", "loud"]

_UNDECIDED = ("skipped", "unreliable")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the section."""

    text: str
    style: Style = "plain"


def section(entries: Sequence[Entry]) -> list[Line]:
    """The lines for all loops, in the order of their first entries; a loop's entries are expected in causal order."""
    return [line for loop, own in by_loop(entries) for line in _loop(loop, [entry.result for entry in own])]


def checked_nothing(entries: Sequence[Entry]) -> str:
    """Why the run checked nothing, or an empty string if it did check something."""
    undecided = [e.result for e in entries if e.result.outcome in _UNDECIDED]
    if len(undecided) < len(entries):
        return ""
    if not undecided:
        return "no selected test carries @pytest.mark.trainloop or trainloop_loss"
    reasons = Counter(r.reason for r in undecided).most_common()
    return f"all checks were skipped: {'; '.join(f'{count} x {reason}' for reason, count in reasons)}"


def _loop(loop: str, results: Sequence[Result]) -> Iterator[Line]:
    ran = [r for r in results if r.outcome not in _UNDECIDED]
    failed = [r for r in ran if r.outcome in ("failed", "error")]
    counts = f"{len(ran)} run, {len(failed)} failed" if ran else "NOTHING WAS CHECKED"
    cost = f"{sum(r.seconds for r in results):.1f} s, {sum(r.steps for r in results)} optimizer steps"
    style: Style = "bad" if failed else "good" if ran else "loud"
    yield Line(f"{loop}  {counts}, {cost}", style)
    yield from _root_causes([r for r in results if r.outcome == "failed"])
    yield from _errors([r for r in results if r.outcome == "error"])
    for result in results:
        if result.outcome == "xfailed":
            yield Line(f"  xfailed  {result.check}: {result.reason}")
    for result in results:
        for advice in result.advice:
            yield Line(f"  advice  {result.check}: {advice.summary}", "warn")
    for result in results:
        for note in result.notes:
            yield Line(f"  note  {result.check}: {note.summary}")
    for outcome in _UNDECIDED:
        yield from _undecided(outcome, [r for r in results if r.outcome == outcome])


def _root_causes(failed: Sequence[Result]) -> Iterator[Line]:
    """A failed check that another one explains is a consequence, listed under its root cause."""
    above = {result.check: _above(result, failed) for result in failed}
    for result in failed:
        if _root(result.check, above) != result.check:
            continue
        if result.reason or not result.faults:
            yield Line(f"  {result.check}: {result.reason or 'failed'}", "bad")
        below = [check for check in above if check != result.check and _root(check, above) == result.check]
        for i, fault in enumerate(result.faults):
            yield _cause(fault, result.check)
            explained = [check for check in below if _first_step(check, above, result.check) == i]
            if explained:
                yield Line(f"    also fails for it: {', '.join(explained)}")


def _above(result: Result, failed: Sequence[Result]) -> tuple[str, int] | None:
    """The check that explains this one, and by which of its faults. Where two explain each other, the earlier one is
    the cause."""
    before = True
    for other in failed:
        if other.check == result.check:
            before = False
            continue
        mutual = any(other.check in fault.explains for fault in result.faults)
        for i, fault in enumerate(other.faults):
            if result.check in fault.explains and (before or not mutual):
                return other.check, i
    return None


def _root(check: str, above: Above) -> str:
    """The root cause of a failed check; of checks that explain one another in a ring the earliest."""
    path = [check]
    while (up := above[path[-1]]) is not None:
        if up[0] in path:
            ring = path[path.index(up[0]) :]
            return min(ring, key=list(above).index)
        path.append(up[0])
    return path[-1]


def _first_step(check: str, above: Above, root: str) -> int:
    """Which of the root's faults leads to a check."""
    for _ in above:
        up = above[check]
        if up is None or up[0] == root:
            return up[1] if up else 0
        check = up[0]
    return 0


def _cause(fault: Finding, check: str) -> Line:
    return Line(f"  {check}: {fault.summary} [{fault.cause}]", "bad")


def _errors(results: Sequence[Result]) -> Iterator[Line]:
    for result in results:
        text = f"{result.error.stage} raised {result.error.summary}" if result.error else result.reason
        yield Line(f"  error  {result.check}: {text}", "bad")


def _undecided(outcome: str, results: Sequence[Result]) -> Iterator[Line]:
    for reason in dict.fromkeys(r.reason for r in results):
        checks = [r.check for r in results if r.reason == reason]
        yield Line(f"  {outcome}  {reason}: {', '.join(checks)}")
