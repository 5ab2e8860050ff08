"""Which checks run on a loop, and how their results are judged. Standard library only.

The choice comes from several places: the marker on the function, the ini file, the command line. A name or pattern that
matches nothing is an error there, since a typo would otherwise switch a check off, or on, for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.errors import UsageError
from pytest_trainloop.declare.knobs import OF_THE_MARKER, nearest

if TYPE_CHECKING:
    from pytest_trainloop.core.finding import Finding, Result

Known = Mapping[str, Collection[str]]
"""Every registered check with the causes it can name, in causal order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one place asks for; ``where`` names the place in messages."""

    where: str
    project: bool = False
    """Whether it is about all loops of a project, of which some have what ``xfail`` expects."""
    only: Sequence[str] | None = None
    skip: Mapping[str, str] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    knobs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One entry of skip or xfail: a check, a cause of one, or a pattern for either."""

    entry: str
    reason: str
    strict: bool = True
    """Of xfail: whether this one loop fails where it does not have the fault."""

    @property
    def check(self) -> str:
        return self.entry.partition(":")[0]

    @property
    def cause(self) -> str:
        return self.entry.partition(":")[2]

    def covers(self, check: str) -> bool:
        return fnmatchcase(check, self.check)

    def names(self, finding: Finding) -> bool:
        return bool(self.cause) and fnmatchcase(finding.cause, self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choice for one loop or loss function."""

    checks: tuple[str, ...]
    """The checks to run or to report as skipped."""
    skip: Mapping[str, str]
    """The reason by check."""
    options: Mapping[str, Mapping[str, Any]]
    strict: bool
    """Whether advice fails."""
    known: Known
    suppress: tuple[_Rule, ...]
    """The entries of skip that name causes."""
    expect: tuple[_Rule, ...]
    """The entries of xfail."""

    def judge(self, result: Result) -> Result:
        """The result after suppression by cause, ``--trainloop-strict`` and xfail."""
        if result.outcome not in ("passed", "failed"):
            return result  # a crash or an unreliable run is never what an xfail expected
        if result.findings:
            result = replace(result, findings=tuple(self._graded(result.check, f) for f in result.findings))
            result = result.with_outcome("failed" if result.faults else "passed")
        rules = [rule for rule in self.expect if rule.covers(result.check)]
        whole = next((rule for rule in rules if not rule.cause), None)
        if whole is not None and (whole.strict or result.outcome == "failed"):
            return _expected_to_fail(result, whole)
        return self._expected_causes(result, rules)

    def _graded(self, check: str, finding: Finding) -> Finding:
        if finding.level == "note":
            return finding
        for rule in self.suppress:
            if rule.covers(check) and rule.names(finding):
                return replace(finding, level="advice", summary=f"{finding.summary} (suppressed: {rule.reason})")
        return replace(finding, level="fault") if self.strict else finding

    def _expected_causes(self, result: Result, rules: Sequence[_Rule]) -> Result:
        excused: dict[Finding, str] = {}
        missing: list[str] = []
        for rule in rules:
            if not rule.cause or not any(fnmatchcase(cause, rule.cause) for cause in self.known.get(result.check, ())):
                continue  # a pattern over several checks; this one cannot name such a cause
            found = [fault for fault in result.faults if rule.names(fault)]
            excused.update(dict.fromkeys(found, rule.reason))
            if not found and rule.strict:
                missing.append(f"{rule.entry} was not found, but is listed as expected ({rule.reason})")
        reasons = "; ".join(dict.fromkeys(excused.values()))
        if not missing and excused and all(fault in excused for fault in result.faults):
            return result.with_outcome("xfailed", reasons)
        findings = tuple(
            replace(f, summary=f"{f.summary} (xfail: {excused[f]})") if f in excused else f for f in result.findings
        )
        result = replace(result, findings=findings)
        return result.with_outcome("failed", f"xfail(strict): {'; '.join(missing)}") if missing else result


def choose(known: Known, *places: Selection, strict: bool = False, among: Collection[str] | None = None) -> Plan:
    """The plan that the given places agree on; where two give a reason for one name, the first place counts.

    A name may be that of any known check; only those ``among`` which the subject's checks are get into the plan.
    """
    for selection in places:
        validate(selection, known)
    own = known if among is None else {check: causes for check, causes in known.items() if check in among}
    skip = [_Rule(entry, reason) for selection in places for entry, reason in selection.skip.items()]
    options: dict[str, Mapping[str, Any]] = {}
    for selection in reversed(places):
        for check, given in selection.options.items():
            options[check] = {**options.get(check, {}), **given}
    whole = [rule for rule in skip if not rule.cause]
    return Plan(
        checks=tuple(check for check in own if all(_wanted(check, selection) for selection in places)),
        skip={check: rule.reason for check in known for rule in reversed(whole) if rule.covers(check)},
        options=options,
        strict=strict,
        known=known,
        suppress=tuple(rule for rule in skip if rule.cause),
        expect=tuple(
            _Rule(entry, reason, strict=not selection.project)
            for selection in places
            for entry, reason in selection.xfail.items()
        ),
    )


def gone(expected: Mapping[str, str], results: Sequence[Result]) -> dict[str, str]:
    """The entries of a project's ``xfail`` that none of its loops shows any more, with their reasons.

    An entry stays where no result decides it, or where one could not: the loop that was skipped, or that raised, may be
    the one with the fault.
    """
    return {entry: reason for entry, reason in expected.items() if _is_gone(_Rule(entry, reason), results)}


def _is_gone(rule: _Rule, results: Sequence[Result]) -> bool:
    own = [result for result in results if rule.covers(result.check)]
    known_of = [
        finding for result in own for finding in result.findings if finding.level == "fault" or finding.accepted
    ]
    if any(not rule.cause or rule.names(finding) for finding in known_of):
        return False
    open_ones = (
        result.outcome in ("error", "unreliable")
        or (result.outcome == "skipped" and result.applies and not result.needs)
        or (result.outcome == "xfailed" and not result.findings)  # by pytest's own marker, perhaps without a run
        for result in own
    )
    return any(result.outcome in ("passed", "failed", "xfailed") for result in own) and not any(open_ones)


def marker_selection(where: str, args: Sequence[object], kwargs: Mapping[str, Any], known: Known) -> Selection:
    """What a trainloop marker asks for; every keyword that is none of its own must be the name of a check."""
    if args:
        raise UsageError(
            f"{where} got {args[0]!r} by position; keywords are needed: only, skip, xfail, knobs, or a check's name"
        )
    for keyword in kwargs:
        if keyword not in OF_THE_MARKER and keyword not in known:
            raise UsageError(f"{where} has no keyword {keyword!r}; {nearest(keyword, [*OF_THE_MARKER, *known])}")
    own = {keyword: kwargs[keyword] for keyword in OF_THE_MARKER if kwargs.get(keyword) is not None}
    return Selection(where=where, options={k: v for k, v in kwargs.items() if k not in OF_THE_MARKER}, **own)


def _wanted(check: str, selection: Selection) -> bool:
    return selection.only is None or any(fnmatchcase(check, pattern) for pattern in selection.only)


def _expected_to_fail(result: Result, rule: _Rule) -> Result:
    if result.outcome == "failed":
        return result.with_outcome("xfailed", rule.reason)
    return result.with_outcome(
        "failed", f"xfail(strict): {result.check} passed, but is listed as expected to fail ({rule.reason})"
    )


def validate(selection: Selection, known: Known) -> None:
    """Raise ``UsageError`` for the first entry that fits none of these checks."""
    where = selection.where
    if selection.only is not None:
        _validate_only(where, selection.only, known)
    for key in ("skip", "xfail"):
        _validate_reasons(where, key, getattr(selection, key), known)
    for check, given in selection.options.items():
        if check not in known:
            raise UsageError(f"{where} gives options to {check!r}, which is no check; {nearest(check, known)}")
        if not isinstance(given, Mapping) or not all(isinstance(option, str) for option in given):
            raise UsageError(f"{where}: {check}={given!r}; a dict of options is needed, as in {check}={{'steps': 400}}")


def _validate_only(where: str, only: Sequence[str], known: Known) -> None:
    if isinstance(only, str) or not isinstance(only, (list, tuple, set, frozenset)):
        raise UsageError(f"{where}: only={only!r}; a list of check names is needed, as in only=['step_order']")
    if not only:
        raise UsageError(f"{where}: only is empty, so no check would run; name at least one, or leave it out")
    for entry in only:
        if isinstance(entry, str) and ":" in entry:
            raise UsageError(
                f"{where}: only={entry!r} names a cause; only chooses whole checks, skip and xfail know causes"
            )
        _validate_entry(where, "only", entry, known)


def _validate_reasons(where: str, key: str, given: Mapping[str, str], known: Known) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{where}: {key}={given!r}; a dict from name to reason is needed, as in {key}={{'step_order': 'why'}}"
        )
    for entry, reason in given.items():
        _validate_entry(where, key, entry, known)
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(
                f"{where}: {key} of {entry!r} has no reason ({reason!r}); a sentence is needed that says why"
            )


def _validate_entry(where: str, key: str, entry: object, known: Known) -> None:
    if not isinstance(entry, str) or not entry:
        raise UsageError(f"{where}: {key} holds {entry!r}; the name of a check is needed")
    rule = _Rule(entry, "")
    covered = [check for check in known if rule.covers(check)]
    if not covered:
        raise UsageError(f"{where}: {key} names {entry!r}, which matches no check; {_nearest_entry(rule, known)}")
    if ":" in entry and not any(fnmatchcase(cause, rule.cause) for check in covered for cause in known[check]):
        hint = nearest(entry, _causes({check: known[check] for check in covered}))
        raise UsageError(f"{where}: {key} names {entry!r}, which matches no cause; {hint}")


def _nearest_entry(rule: _Rule, known: Known) -> str:
    return nearest(rule.entry, _causes(known)) if rule.cause else nearest(rule.check, known)


def _causes(known: Known) -> Iterator[str]:
    return (f"{check}:{cause}" for check in known for cause in known[check])
