"""The results as SARIF 2.1.0, which code scanning reads. No torch, no pytest.

A rule is a cause, by the name that ``skip=`` knows it by. Line numbers and measured values are no part of a
fingerprint: a fault that moves with its line stays the same fault.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_trainloop.core.report.alerts import Alert
    from pytest_trainloop.core.report.lines import At

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

ROOT = "SRCROOT"
"""What paths are relative to: the root of the repository, wherever it is checked out."""

FINGERPRINT = "trainloopFault/v1"

_MOST_DESCRIBED = 1000
"""Characters of a rule's description; code scanning takes 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is said of a cause, whichever loop has it."""

    proof: str
    """The observation that proves it, as a sentence."""
    page: str
    """As text, for a reader of the terminal."""
    markdown: str
    family: str


def document(
    alerts: Sequence[Alert],
    environment: Mapping[str, Any],
    describe: Callable[[str, str], Rule | None],
    *,
    nothing: str = "",
) -> dict[str, Any]:
    """A log of one run. ``describe`` gives what is known of a check's cause; ``nothing`` says why nothing was checked.

    Errors of the project's own code are no results, but notifications: they say nothing about a line of the source.
    """
    found = [alert for alert in alerts if alert.cause]
    rules = {alert.title: alert for alert in found}
    numbers = {rule: number for number, rule in enumerate(sorted(rules))}
    prints = _fingerprints(found)
    stopped = [_notification("error", alert.text, alert.at) for alert in alerts if not alert.cause]
    stopped += [_notification("warning", f"nothing was checked: {nothing}", None)] if nothing else []
    version = environment.get("pytest_trainloop")
    driver = {
        "name": "pytest-trainloop",
        **({"version": version} if version else {}),
        "rules": [_rule(rules[rule], describe) for rule in numbers],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {ROOT: {"description": {"text": "The root of the repository."}}},
                "invocations": [{"executionSuccessful": not stopped, "toolExecutionNotifications": stopped}],
                "results": [
                    _result(alert, numbers[alert.title], print_) for alert, print_ in zip(found, prints, strict=True)
                ],
                "properties": {"environment": dict(environment)},
            }
        ],
    }


def _rule(alert: Alert, describe: Callable[[str, str], Rule | None]) -> dict[str, Any]:
    known = describe(alert.check, alert.cause)
    words = alert.cause.replace("_", " ")
    short = f"{words[0].upper()}{words[1:]} ({alert.check})"
    if known is None:  # a check of the project's own, which the controller of xdist does not load
        return {
            "id": alert.title,
            "shortDescription": {"text": short},
            "fullDescription": {"text": short},
            "help": {"text": f"pytest --trainloop-explain={alert.title}"},
        }
    return {
        "id": alert.title,
        "shortDescription": {"text": short},
        "fullDescription": {"text": known.proof[:_MOST_DESCRIBED]},
        "defaultConfiguration": {"level": "error"},
        "help": {"text": known.page, "markdown": known.markdown},
        "properties": {"tags": ["training", known.family], "precision": "very-high", "problem.severity": "error"},
    }


def _result(alert: Alert, rule: int, fingerprint: str) -> dict[str, Any]:
    finding = alert.finding
    result: dict[str, Any] = {
        "ruleId": alert.title,
        "ruleIndex": rule,
        "level": alert.level,
        "message": {"text": _message(alert)},
        "locations": [_location(alert)],
        "partialFingerprints": {FINGERPRINT: fingerprint},
        "occurrenceCount": len(alert.loops),
    }
    if alert.other is not None:
        seen = {
            "id": 1,
            "physicalLocation": _physical(alert.other),
            "message": {"text": "the other line of this fault"},
        }
        result["relatedLocations"] = [seen]
    if alert.accepted:
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": alert.accepted}]
    evidence = {"measured": finding.measured, "shown_by": finding.shown_by, "repair": finding.repair} if finding else {}
    properties = {"loops": list(alert.loops), "also_fails": list(alert.also), **evidence}
    result["properties"] = {name: value for name, value in properties.items() if value}
    return result


def _message(alert: Alert) -> str:
    """The sentence that a list shows, then what to do; code scanning shows no more than this next to the line."""
    finding = alert.finding
    lines = [f"{alert.summary}."]
    if finding is not None:
        lines += [f"Measured: {finding.measured}."] if finding.measured else []
        lines += [f"Shown by: {finding.shown_by}."] if finding.shown_by else []
        lines += [f"Repair: {finding.repair}"] if finding.repair else []
        lines += [f"Do not: {finding.do_not}"] if finding.do_not else []
    lines += [f"For it also {_fail(alert.also)}."] if alert.also else []
    lines += [f"Found in {', '.join(alert.loops)}."]
    text = re.sub(r"\](?=\(\d+\))", "] ", "\n".join(lines))  # "[name](1)" would be a link to a location
    return f"{text}\nSee also [{_in_link(alert.other)}](1)." if alert.other is not None else text


def _fail(checks: Sequence[str]) -> str:
    return f"{', '.join(checks)} fail{'s' if len(checks) == 1 else ''}"


def _in_link(at: At) -> str:
    return re.sub(r"([\\\[\]])", r"\\\1", f"{at.file}:{at.number}")


def _location(alert: Alert) -> dict[str, Any]:
    names = [{"fullyQualifiedName": loop, "kind": "function"} for loop in alert.loops]
    if alert.finding is not None:
        kinds = alert.finding.kinds or ("member",) * len(alert.culprits)
        names += [{"fullyQualifiedName": name, "kind": kind} for name, kind in zip(alert.culprits, kinds, strict=True)]
    return {"physicalLocation": _physical(alert.at) if alert.at else _file_of(alert), "logicalLocations": names}


def _file_of(alert: Alert) -> dict[str, Any]:
    """The file in a loop's node id: code scanning refuses a whole file for one result without a place."""
    file = alert.loops[0].partition("::")[0]
    return {"artifactLocation": {"uri": quote(file), "uriBaseId": ROOT}, "region": {"startLine": 1}}


def _physical(at: At) -> dict[str, Any]:
    indent = len(at.source) - len(at.source.lstrip())
    code = at.source.strip()
    region = {
        "startLine": at.number,
        "startColumn": indent + 1,
        "endLine": at.number,
        "endColumn": indent + len(code) + 1,
        "snippet": {"text": at.source},
    }
    artifact = {"uri": quote(at.file), "uriBaseId": ROOT} if at.inside else {"uri": at.path.resolve().as_uri()}
    return {"artifactLocation": artifact, "region": region}


def _notification(level: str, text: str, at: At | None) -> dict[str, Any]:
    notification = {"level": level, "message": {"text": text}}
    return {**notification, "locations": [{"physicalLocation": _physical(at)}]} if at is not None else notification


def _fingerprints(alerts: Sequence[Alert]) -> list[str]:
    """A digest of each, from what stays as it is when other lines move: its rule, file, the text of its line, the
    names that it gives, and whether the project knows of it. Of equal ones the second ends in ``:2``."""
    seen: Counter[str] = Counter()
    found = []
    for alert in alerts:
        at = (alert.at.file, alert.at.source.strip()) if alert.at else ("", alert.loops[0])
        digest = hashlib.sha256("\0".join((alert.title, alert.accepted, *at, *alert.culprits)).encode()).hexdigest()[
            :32
        ]
        seen[digest] += 1
        found.append(f"{digest}:{seen[digest]}")
    return found
