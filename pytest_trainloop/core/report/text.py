"""The text of one failed check, as the terminal shows it. No torch, no pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.wording import some, verb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.core.finding import Finding, Result

_LABEL = 11


def failure_texts(results: Sequence[Result], proofs: Mapping[str, Mapping[str, str]]) -> str:
    """The texts of several failed checks of one loop: each root cause, with what fails for it in one line; then the
    errors. ``proofs`` has the texts of the causes by check."""
    texts = []
    for cause in root_causes([r for r in results if r.outcome == "failed"]):
        followed = list(dict.fromkeys(check for checks in cause.followed for check in checks))
        text = failure_text(cause.result, proofs[cause.result.check])
        if followed:
            text += "\n" + _field("also", f"{', '.join(followed)} {verb(followed, 'fail')} for it")
        texts.append(text)
    errors = [r for r in results if r.outcome == "error"]
    return "\n\n".join([*texts, *(failure_text(r, proofs[r.check]) for r in errors)])


def failure_text(result: Result, causes: Mapping[str, str]) -> str:
    """One block for each fault, or the user's own traceback under one sentence; ``causes`` are the check's texts."""
    if result.outcome == "error":
        return error_text(result)
    blocks = [finding_text(fault, causes) for fault in result.faults]
    if result.reason or not blocks:
        blocks.insert(0, result.reason or f"{result.check} failed")
    return "\n\n".join(blocks) + "\n" + _field("more", f"pytest --trainloop-explain {result.check}")


def finding_text(finding: Finding, causes: Mapping[str, str]) -> str:
    """One fault or piece of advice: what was found, what shows it, and what to write where."""
    fields = finding_fields(finding, causes)
    return "\n".join([finding.summary, *(_field(label, text) for label, text in fields.items())])


def finding_fields(finding: Finding, causes: Mapping[str, str]) -> dict[str, str]:
    """What is said of a finding below its summary, by label, in the order in which it is shown."""
    proof = causes.get(finding.cause, "")
    fields = {
        "measured": finding.measured,
        "cause": f"{finding.cause}: {proof}" if proof else finding.cause,
        "shown by": finding.shown_by.removeprefix(proof).removeprefix("; "),
        **_names(finding),
        "seen at": finding.where if finding.where != finding.change else "",
        "smallest": finding.smallest,
        "change": finding.change,
        "repair": finding.repair,
        "tried": finding.tried,
        "do not": finding.do_not,
    }
    return {label: text for label, text in fields.items() if text}


def _names(finding: Finding) -> dict[str, str]:
    """The user's names by what they are, where there are more than a summary has room for, or of several kinds."""
    kinds = finding.kinds or ("name",) * len(finding.culprits)
    if len(finding.culprits) <= 2 and len(set(kinds)) == 1:
        return {}
    sorted_out: dict[str, list[str]] = {}
    for name, kind in zip(finding.culprits, kinds, strict=True):
        sorted_out.setdefault(kind, []).append(name)
    return {kind if len(own) == 1 else f"{kind}s": some(own, most=12) for kind, own in sorted_out.items()}


def _field(label: str, text: str) -> str:
    first, *rest = text.splitlines()
    return "\n".join([label.ljust(_LABEL) + first, *(" " * _LABEL + line for line in rest)])


def error_text(result: Result) -> str:
    """An error in one sentence, and below it the user's own frames; a mistake of ours in one sentence alone."""
    if result.error is None:
        return result.reason or f"{result.check} met an error"
    sentence = f"{result.error.stage} raised {result.error.summary}"
    return f"{sentence}\n\n{result.error.traceback.rstrip()}" if result.error.traceback else sentence
