"""Results: what a check yields, with what is known of its causes, and what becomes of one that raised."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import BrokenRun, CannotDecide, DoesNotApply, OwnMistake, UsageError, UserCodeError
from pytest_trainloop.core.finding import Finding, Result, UserError
from pytest_trainloop.core.whose import is_ours, mistake, of_the_project

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_trainloop.core.registry import Cause, Check


def skipped(check: Check, why: CannotDecide) -> Result:
    """The result of a check that could not decide."""
    applies = not isinstance(why, DoesNotApply)
    return Result(check=check.name, outcome="skipped", reason=str(why), applies=applies, needs=why.needs)


def checked(check: Check, finding: Finding, evidence: Any) -> Finding:
    """The finding with what is known of its cause: the repair, the line to change, the explained checks.

    What the finding says itself counts.

    Raises ``ValueError`` for a cause that the check does not declare, and for an explained check that does not exist.
    """
    from pytest_trainloop.core.registry import registered

    cause = check.causes.get(finding.cause)
    if cause is None:
        undeclared = f"{check.name} named the cause {finding.cause!r}, which it does not declare"
        raise of_the_project(ValueError(undeclared))  # who wrote the check
    explains = finding.explains or (cause.explains if finding.level == "fault" else ())
    known = registered()
    unknown = sorted(name for name in explains if not _is_known(name, known))
    if unknown:
        nothing = f"{check.name}:{finding.cause} explains {unknown[0]!r}, which is no check or cause"
        raise of_the_project(ValueError(nothing))
    return replace(
        finding,
        check=check.name,
        kinds=finding.kinds or _kinds(check, finding, evidence),
        change=_of_the_project(finding.change or _line_to_change(cause, finding, evidence)),
        repair=_with_settlement(finding, cause, check),
        do_not=finding.do_not or cause.do_not,
        explains=explains,
    )


def _with_settlement(finding: Finding, cause: Cause, check: Check) -> str:
    """The repair; for advice also how to declare that the code is intended, or that it is not."""
    repair = finding.repair or cause.repair
    if finding.level != "advice":
        return repair
    marker = "trainloop" if check.subject == "loop" else "trainloop_loss"
    keep = f'if it is intended: @pytest.mark.{marker}(skip={{"{check.name}:{finding.cause}": "why"}})'
    return "; ".join(filter(None, (repair, cause.settle, cause.judged, keep)))


def _is_known(name: str, checks: Mapping[str, Check]) -> bool:
    check, colon, cause = name.partition(":")
    return check in checks and (not colon or cause in checks[check].causes)


def _kinds(check: Check, finding: Finding, evidence: Any) -> tuple[str, ...]:
    """What each of the finding's names is, by the record of the loop."""
    if check.subject != "loop" or not finding.culprits:
        return ()
    record = evidence.run()
    known = {p.name: "parameter" for p in record.parameters} | {s.name: "buffer" for s in record.statistics}
    paths = {".".join(p.owner.split(".")[:n]) for p in record.parameters for n in range(1, p.owner.count(".") + 2)}
    modules = dict.fromkeys(paths - {""}, "module")
    inputs = {name: "input" for name in finding.culprits if name.startswith("batch")}
    calls = {name: "call" for name in finding.culprits if name.endswith(")")}
    kinds = {**modules, **calls, **known, **inputs}
    return tuple(kinds.get(name, kinds.get(name.removeprefix("model."), check.names)) for name in finding.culprits)


def _of_the_project(line: str) -> str:
    """The line, where it is none of an installed library: nobody repairs that."""
    if not line:
        return ""
    from pytest_trainloop.recording.source import is_in_a_library

    return "" if is_in_a_library(line) else line


def _line_to_change(cause: Cause, finding: Finding, evidence: Any) -> str:
    """The first line that the cause asks for and that is known; else of a loss function its only statement."""
    from pytest_trainloop.instruments.tracing.made_at import line_of

    for part in cause.change:
        with contextlib.suppress(CannotDecide, UsageError, UserCodeError):  # of a loop that cannot be run
            if line := line_of(part, finding, evidence):
                return line
    if not hasattr(evidence, "contract"):
        return ""
    from pytest_trainloop.instruments.tracing.statements import only_statement

    criterion = evidence.contract.criterion
    return only_statement(getattr(criterion, "forward", criterion), most=3)


def error_of(check: Check, error: UserError) -> Result:
    """The result of a check that met an exception of the project's."""
    reason = f"{error.stage} raised {error.summary}"
    return Result(check=check.name, outcome="error", reason=reason, error=error)


def broken(check: Check, error: Exception) -> OwnMistake | UserError:
    """The verdict of a check that raised: a mistake of this package, or for a project's own check an exception of the
    project's."""
    if isinstance(error, BrokenRun):
        return OwnMistake(str(error))
    if isinstance(error, OwnMistake) or check.module.startswith("pytest_trainloop."):
        return mistake(error).with_traceback(None)
    from pytest_trainloop.runs.user_traceback import user_error

    return mistake(error) if is_ours(error) else user_error(error, f"the check {check.name}")


def mistaken(check: Check, ours: OwnMistake) -> Result:
    """The result of a check that a mistake of this package stopped: whatever it saw before, it is an error."""
    reason = f"{check.name} was stopped by {ours.sentence}"
    return Result(check=check.name, outcome="error", reason=reason, mistake=ours.traceback)
