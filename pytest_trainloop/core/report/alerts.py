"""What a session found, one entry a fault: for those who show it next to the user's line. No torch, no pytest.

A check that fails because of another one's fault makes no entry of its own, and one fault of several loops that share
its line is one entry, as is one sentence about several loops that has no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_trainloop.core.finding import Finding, Result
from pytest_trainloop.core.report.lines import At, Line, Places
from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.report.text import error_text, finding_text

Level = Literal["error", "warning", "note"]

Proofs = Mapping[str, Mapping[str, str]]
"""By check and cause: the observation that proves it."""

_LEVELS: Mapping[str, Level] = {"fault": "error", "advice": "warning", "note": "note"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One fault, piece of advice, note or error, with the loops that have it."""

    check: str = ""
    """Empty for an error of the user's code and for a loop that is refused."""
    cause: str = ""
    """Empty also for a check that failed without a finding."""
    level: Level
    summary: str
    text: str
    """As the terminal shows it."""
    loops: tuple[str, ...]
    at: At | None
    """The line to change; else where the fault was seen; else the test. One outside of the repository comes last."""
    has_line: bool = False
    """Whether ``at`` is a line of its own; where it is only the test, equal sentences of several loops are one."""
    other: At | None = None
    """Where the fault was seen, or the line to change, if that is another line."""
    finding: Finding | None = None
    also: tuple[str, ...] = ()
    """The checks that fail for it."""
    name: str = ""
    """What an error is called that no check found."""
    accepted: str = ""
    """The project's reason, where it expects or suppresses the fault."""

    @property
    def title(self) -> str:
        """``check:cause``, as in ``skip=``; the check alone where it gave no cause."""
        return f"{self.check}:{self.cause}" if self.cause else self.check or self.name or "loop not judged"

    @property
    def culprits(self) -> tuple[str, ...]:
        return self.finding.culprits if self.finding else ()


def alerts(document: Mapping[str, Any], places: Places, proofs: Proofs) -> list[Alert]:
    """The alerts in the data of a JSON report: errors first, then advice, then notes; of each what is accepted last.

    ``proofs`` has the texts of the causes.
    """
    found = [alert for loop in document["loops"] for alert in _Loop(loop, places, proofs).alerts()]
    merged: dict[object, Alert] = {}
    for alert in found:
        sentence = "" if alert.cause and alert.has_line else alert.summary
        place = (alert.at.file, alert.at.number) if alert.at and alert.has_line else None
        key = (alert.title, alert.level, alert.accepted, place, alert.culprits, sentence)
        first = merged.setdefault(key, alert)
        merged[key] = replace(
            first,
            loops=tuple(dict.fromkeys((*first.loops, *alert.loops))),
            also=tuple(dict.fromkeys((*first.also, *alert.also))),
        )
    order = list(_LEVELS.values())
    return sorted(merged.values(), key=lambda alert: (order.index(alert.level), bool(alert.accepted)))


@dataclass(frozen=True, slots=True)
class _Loop:
    """What is said of one loop."""

    data: Mapping[str, Any]
    places: Places
    proofs: Proofs

    def alerts(self) -> Iterator[Alert]:
        results = [Result.from_json(check) for check in self.data["checks"]]
        for cause in root_causes([r for r in results if r.outcome == "failed"]):
            if cause.result.reason or not cause.result.faults:
                summary = cause.result.reason or f"{cause.result.check} failed"
                yield self._plain(cause.result, summary, summary, check=cause.result.check)
            for fault, followed in zip(cause.result.faults, cause.followed, strict=True):
                yield self._found(cause.result, fault, also=followed)
        for result in results:
            if result.outcome == "error":
                text = error_text(result)
                yield self._plain(result, text.partition("\n")[0], text)
            if result.outcome == "xfailed":
                yield from (self._found(result, fault, accepted=result.reason) for fault in result.faults)
            for finding in (*result.advice, *result.notes):
                yield self._found(result, finding)

    def _found(self, result: Result, finding: Finding, also: Iterable[str] = (), accepted: str = "") -> Alert:
        change, seen = self.places.at(Line.read(finding.change)), self.places.at(Line.read(finding.where))
        inside = (line for line in (change, seen) if line is not None and line.inside)
        at = next(inside, None) or self._test() or change or seen
        return Alert(
            check=result.check,
            cause=finding.cause,
            level=_LEVELS[finding.level],
            summary=finding.summary,
            text=finding_text(finding, self.proofs.get(result.check, {})),
            loops=(self.data["nodeid"],),
            at=at,
            has_line=at in (change, seen),
            other=next((line for line in (seen, change) if line not in (None, at)), None),
            finding=finding,
            also=tuple(also),
            accepted=accepted or finding.accepted,
        )

    def _plain(self, result: Result, summary: str, text: str, check: str = "") -> Alert:
        line = self.places.at(Line.of_traceback(result.error.traceback)) if result.error else None
        return Alert(
            check=check,
            level="error",
            summary=summary,
            text=text,
            loops=(self.data["nodeid"],),
            at=line or self._test(),
            has_line=line is not None,
        )

    def _test(self) -> At | None:
        file = self.data["nodeid"].partition("::")[0]
        return self.places.definition(Line.read(self.data.get("at", "")) or Line(file, 1))
