"""The closing section: each loop's root causes with what they explain, the advice, what was skipped and why.

No torch, no pytest: lines with a style in, for whoever prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding, Result
    from pytest_trainloop.report import Entry, Report

Style = Literal["plain", "good", "bad", "warn", "loud"]

_UNDECIDED = ("skipped", "unreliable")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the section."""

    text: str
    style: Style = "plain"


def section(report: Report) -> list[Line]:
    """The lines for all loops; entries are expected in causal order."""
    return [line for loop, entries in report.loops() for line in _loop(loop, entries)]


def checked_nothing(report: Report) -> str:
    """Why the run checked nothing, or an empty string if it did check something."""
    undecided = [r for r in report.results if r.outcome in _UNDECIDED]
    if len(undecided) < len(report.entries):
        return ""
    if not undecided:
        return "no selected test carries @pytest.mark.trainloop or trainloop_loss"
    reasons = Counter(r.reason for r in undecided).most_common()
    return f"all checks were skipped: {'; '.join(f'{count} x {reason}' for reason, count in reasons)}"


def _loop(loop: str, entries: Sequence[Entry]) -> Iterator[Line]:
    results = [entry.result for entry in entries]
    ran = [r for r in results if r.outcome not in _UNDECIDED]
    failed = [r for r in ran if r.outcome in ("failed", "error")]
    counts = f"{len(ran)} run, {len(failed)} failed" if ran else "NOTHING WAS CHECKED"
    cost = f"{sum(r.seconds for r in results):.1f} s, {sum(r.steps for r in results)} own steps"
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
    for outcome in _UNDECIDED:
        yield from _undecided(outcome, [r for r in results if r.outcome == outcome])


def _root_causes(failed: Sequence[Result]) -> Iterator[Line]:
    """A failed check that an earlier one explains is a consequence: it stands under its root, not beside it."""
    root: dict[str, tuple[str, int]] = {}
    for result in failed:
        above = root.get(result.check)
        for i, fault in enumerate(result.faults):
            for check in fault.explains:
                if check != result.check and any(r.check == check for r in failed):
                    root.setdefault(check, above or (result.check, i))
        root.setdefault(result.check, (result.check, -1))
    for result in failed:
        if root[result.check][0] != result.check:
            continue
        if result.reason or not result.faults:
            yield Line(f"  {result.check}: {result.reason or 'failed'}", "bad")
        for i, fault in enumerate(result.faults):
            yield _cause(fault, result.check)
            explained = [check for check, origin in root.items() if origin == (result.check, i)]
            if explained:
                yield Line(f"    explains {', '.join(explained)}")


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
