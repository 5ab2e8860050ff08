"""Findings, and the result of one check. Standard library only."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Level = Literal["fault", "advice", "note"]
"""A fault fails the test; advice fails it under ``--trainloop-strict``; a note never does."""

_ACCEPTED = re.compile(r" \((?:suppressed|xfail): (?P<reason>.+)\)$")
"""What ``selection.Plan`` puts behind the summary of a finding that the project knows of."""

Outcome = Literal["passed", "failed", "skipped", "xfailed", "unreliable", "error"]


@dataclass(frozen=True, slots=True)
class SmallestBatch:
    """The smallest batch that shows a fault, composed of rows of the example batch."""

    rows: tuple[int, ...]
    parts: tuple[int, ...] = ()
    """The sizes of the micro-batches; none for one batch."""
    change: str = ""
    """What else is changed, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault (or one piece of advice, or a note) that a check found, with its cause."""

    cause: str
    """The stable slug of the fault, declared by the check."""
    summary: str
    """One sentence, with the number that matters."""
    check: str = ""
    """The name of the check that found it."""
    level: Level = "fault"
    """A fault fails the test; advice fails it under ``--trainloop-strict``; a note never does."""
    measured: str = ""
    """What was measured, with the limit."""
    shown_by: str = ""
    """The observation that separates this cause from its neighbours."""
    culprits: tuple[str, ...] = ()
    """The user's own names of parameters, modules or calls."""
    kinds: tuple[str, ...] = ()
    """What each of them is: "parameter", "buffer", "module", "input", "attribute", "operation", "call", or "missing
    call" for one that the loop ought to make."""
    where: str = ""
    """``file:line   source`` of where the fault was seen."""
    smallest: str = ""
    """The smallest example that shows the fault."""
    composition: SmallestBatch | None = None
    """The same as data, where it is composed of rows of the example batch."""
    change: str = ""
    """``file:line   source`` of where the repair goes; empty where that is not known."""
    repair: str = ""
    """What to write there: first one line, of code where that is known, then alternatives."""
    tried: str = ""
    """What the repair did to this loop, where it was made there: "with this change the check passes"."""
    do_not: str = ""
    """A common repair that only silences the check, and why."""
    explains: tuple[str, ...] = ()
    """Checks, or ``check:cause``, whose failure follows from this one."""

    def accounts_for(self, check: str, cause: str) -> bool:
        """Whether a failure of that check by that cause follows from this one."""
        return check in self.explains or f"{check}:{cause}" in self.explains

    @property
    def accepted(self) -> str:
        """The project's reason, where it suppresses the cause or expects it to be found; else empty."""
        found = _ACCEPTED.search(self.summary)
        return found["reason"] if found else ""

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data, fields in the order of the JSON report."""
        order = (
            "check cause level summary measured shown_by culprits kinds where smallest composition change repair tried "
            "do_not explains"
        ).split()
        data = asdict(self)
        return {name: list(value) if isinstance(value := data[name], tuple) else value for name in order}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """The finding that :meth:`to_json` wrote."""
        known = {f.name for f in fields(cls)}
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
        if composed := plain.get("composition"):
            plain["composition"] = SmallestBatch(tuple(composed["rows"]), tuple(composed["parts"]), composed["change"])
        return cls(**plain)


def code_of(line: str) -> str:
    """The source of a ``file:line   source``."""
    return line.partition("   ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserError:
    """An exception that the user's own code raised, as text."""

    stage: str
    """What was under way: "building the loop", "fit"."""
    summary: str
    """The exception in one line."""
    traceback: str = ""
    """The user's frames only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check on one loop."""

    check: str
    """The name of the check."""
    outcome: Outcome
    """What came of it; docs/quickstart.md#results has what each word means."""
    reason: str = ""
    """One sentence, for a skip, an xfail, an unreliable run or an error."""
    findings: tuple[Finding, ...] = ()
    """Faults, advice and notes, in the order in which they were found."""
    seconds: float = 0.0
    """Seconds that the check took, with the evidence that it was the first to need; without the time in which other
    processes of a busy machine ran."""
    steps: int = 0
    """The loop's own optimizer steps that the check caused."""
    error: UserError | None = None
    applies: bool = True
    """False for a skip of a check whose question the loop does not pose."""
    looked_at: bool = True
    """False where the time of all checks was over before this one could decide."""
    needs: str = ""
    """What the user can give to have a skipped check decided: ``padding=``."""
    learning_rates: tuple[dict[str, Any], ...] = ()
    """The learning rates of the watched run, with the first result of a loop that knows them."""
    previews_off: int = 0
    """How many causes of the check were not reported, since they are a preview."""
    mistake: str = ""
    """Of an error that is a mistake of this package, its whole traceback; ``reason`` says in one sentence what it is
    and asks for a report."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that fail the test."""
        return tuple(f for f in self.findings if f.level == "fault")

    @property
    def advice(self) -> tuple[Finding, ...]:
        """The findings on code that may be intentional."""
        return tuple(f for f in self.findings if f.level == "advice")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that never fail a test."""
        return tuple(f for f in self.findings if f.level == "note")

    def to_json(self) -> dict[str, Any]:
        """The result as plain data, as in the JSON report."""
        return {
            "check": self.check,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 4),
            "steps": self.steps,
            "reason": self.reason,
            "applies": self.applies,
            "looked_at": self.looked_at,
            "needs": self.needs,
            "error": asdict(self.error) if self.error else None,
            "findings": [f.to_json() for f in self.findings],
            **({"learning_rates": list(self.learning_rates)} if self.learning_rates else {}),
            **({"previews_off": self.previews_off} if self.previews_off else {}),
            **({"mistake": self.mistake} if self.mistake else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """The result that :meth:`to_json` wrote."""
        error = data.get("error")
        return cls(
            check=data["check"],
            outcome=data["outcome"],
            reason=data["reason"],
            findings=tuple(Finding.from_json(f) for f in data["findings"]),
            seconds=data["seconds"],
            steps=data.get("steps", 0),
            error=UserError(**error) if error else None,
            applies=data.get("applies", True),
            looked_at=data.get("looked_at", True),
            needs=data.get("needs", ""),
            learning_rates=tuple(data.get("learning_rates", ())),
            previews_off=data.get("previews_off", 0),
            mistake=data.get("mistake", ""),
        )

    def with_outcome(self, outcome: Outcome, reason: str = "") -> Result:
        """The same result with another outcome, and with this reason if it is given."""
        return replace(self, outcome=outcome, reason=reason or self.reason)
