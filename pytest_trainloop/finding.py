"""What a check has to say: findings, and the result of one check. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Level = Literal["fault", "advice"]
Outcome = Literal["passed", "failed", "skipped", "xfailed", "unreliable", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault (or one piece of advice) that a check found, with its cause.

    ``summary`` is one sentence with the number that matters; ``cause`` is the stable slug of the fault, declared by the
    check; ``shown_by`` is the observation that separates this cause from its neighbours; ``culprits`` are the user's
    own
    names (parameters, modules, calls); ``where`` is ``file:line   source``; ``explains`` names checks whose failure
    follows from this one.
    """

    cause: str
    summary: str
    check: str = ""
    level: Level = "fault"
    measured: str = ""
    shown_by: str = ""
    culprits: tuple[str, ...] = ()
    where: str = ""
    repair: str = ""
    smallest: str = ""
    explains: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data, fields in the order of the JSON report."""
        order = "check cause level summary measured shown_by culprits where repair smallest explains".split()
        data = asdict(self)
        return {name: list(value) if isinstance(value := data[name], tuple) else value for name in order}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """The finding that :meth:`to_json` wrote."""
        known = {f.name for f in fields(cls)}
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in known}
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserError:
    """An exception that the user's own code raised, as text.

    ``stage`` says what was under way ("building the loop", "running fit"), ``summary`` is the exception in one line and
    ``traceback`` holds the user's frames only.
    """

    stage: str
    summary: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one check on one loop.

    ``reason`` is the one sentence behind a skip, an xfail, an unreliable run or an error. ``seconds`` is the time this
    check took, evidence that it was the first to need included; ``steps`` counts the loop's own optimizer steps that it
    caused.
    """

    check: str
    outcome: Outcome
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    steps: int = 0
    error: UserError | None = None

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "fault")

    @property
    def advice(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "advice")

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 4),
            "steps": self.steps,
            "reason": self.reason,
            "error": asdict(self.error) if self.error else None,
            "findings": [f.to_json() for f in self.findings],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        error = data.get("error")
        return cls(
            check=data["check"],
            outcome=data["outcome"],
            reason=data["reason"],
            findings=tuple(Finding.from_json(f) for f in data["findings"]),
            seconds=data["seconds"],
            steps=data.get("steps", 0),
            error=UserError(**error) if error else None,
        )

    def with_outcome(self, outcome: Outcome, reason: str = "") -> Result:
        return replace(self, outcome=outcome, reason=reason or self.reason)
