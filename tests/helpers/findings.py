"""What the tests of the corpora say about findings."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from pytest_trainloop.core.finding import Finding, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.core.report import Report


STOPPING_WORDS = re.compile(
    r"in the end\b|given values in|before it:|passed through at|left out at that line|declared frozen"
    r"|differs? by [\d.e+-]+(?![\d.e+-]| ?%)"
    r"|cosine (of|-?\d|\{|$)|\bconsum(e|ed|es)\b|\bresiduals?\b(?![.\[])|\bspacings?\b|mend that|\bthe culprit",
    re.IGNORECASE,
)
"""Words at which readers who could not see the code stopped: each has a plain counterpart (docs/contributing)."""


def described(report: Report) -> str:
    """A line for each check that did not simply pass."""
    return "\n".join(
        f"{r.check}: {r.outcome} {r.reason} {[(f.level, f.cause, f.summary, f.smallest) for f in r.findings]}"
        for r in report.results
        if r.outcome in ("failed", "error", "unreliable") or r.findings
    )


def named(report: Report, check: str, cause: str, level: str) -> list[Finding]:
    """The findings of this cause; none at all is a failure."""
    found = [f for r in report.results for f in r.findings if (f.check, f.cause, f.level) == (check, cause, level)]
    assert found, described(report)
    return found


MOST_ROWS = 3
"""Different rows of the smallest batch that shows a planted fault, at most."""


def assert_complete(findings: Sequence[Finding]) -> None:
    """Every finding says what was measured, what shows it (advice may leave that out) and what repairs it."""
    for finding in findings:
        assert finding.summary
        assert finding.measured
        assert finding.shown_by or finding.level == "advice"
        assert finding.repair
        assert finding.culprits
        assert "\n" not in finding.summary
        if finding.composition is not None:
            assert finding.smallest
            if finding.cause != "rows_left_out":  # a loop that takes the first eight shows it with nine
                assert len(set(finding.composition.rows)) <= MOST_ROWS
        assert_readable(finding)
        assert_headline_is_measured(finding)
        assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding


def assert_readable(finding: Finding) -> None:
    """No word at which a reader stops."""
    text = "\n".join((finding.summary, finding.measured, finding.shown_by, finding.repair, finding.do_not))
    assert not (found := STOPPING_WORDS.search(text)), f"{found[0]!r} in: {text}"


NUMBER = re.compile(r"(?<![\w.=(\[])(?<!= )(\d+(?:\.\d+)?(?:e[+-]?\d+)?)( ?%| times)?")


def assert_headline_is_measured(finding: Finding) -> None:
    """Shares, factors and decimals of the summary stand in the evidence, or follow from two numbers there."""
    evidence = " ".join((finding.measured, finding.shown_by, finding.smallest))
    known = [float(n) for n, _ in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?(?:e[+-]?\d+)?)()", evidence)]
    for written, unit in NUMBER.findall(re.sub(r"[\w.]*\[[^]]*\]|\b[\w]+\.[\w.]+", "", finding.summary)):
        if not unit and "." not in written and "e" not in written:
            continue
        value = float(written) / (100.0 if "%" in unit else 1.0)
        rounding = 10 ** -len(written.partition(".")[2]) / (100.0 if "%" in unit else 1.0)
        quotients = [a / b for a in known for b in known if b]
        derived = [*known, *(k / 100 for k in known), *quotients, *(1 - q for q in quotients)]
        close = any(abs(d - value) <= max(rounding, 0.02 * abs(value)) for d in derived)
        assert close, f"{written}{unit} of the headline is not in: {evidence}"


def assert_survives_json(report: Report) -> None:
    for result in report.results:
        assert Result.from_json(json.loads(json.dumps(result.to_json()))).findings == result.findings
