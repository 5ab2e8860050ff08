"""The summary of a CI job, in GitHub's Markdown. No torch, no pytest."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from pytest_trainloop.core.report.entry import by_loop
from pytest_trainloop.core.report.section import counts, undecided

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.report.alerts import Alert
    from pytest_trainloop.core.report.entry import Entry
    from pytest_trainloop.core.report.lines import At

LIMIT = 1024 * 1024 - 4096
"""Bytes of all that one step writes; above its limit of 1 MiB GitHub drops the whole summary."""

_HEADINGS = {"error": "To repair", "warning": "Advice"}
_MOST_LOOPS = 5
_MOST_TEXT = 8000
"""Characters of one failure."""


def markdown(entries: Sequence[Entry], alerts: Sequence[Alert], *, nothing: str = "", room: int = LIMIT) -> str:
    """Failures first, then advice, the loops, and what was not decided; at most ``room`` bytes in UTF-8.

    ``nothing`` says why the session checked nothing.
    """
    blocks = [*_head(entries, alerts, nothing), *_alerts(alerts), *_loops(entries), *_undecided(entries)]
    left_out = "\n*Cut here, since GitHub shows no summary of more than 1 MiB: the log of this step has the rest.*\n"
    room -= len(left_out.encode())
    kept: list[str] = []
    for block in blocks:
        room -= len(block.encode())
        if room < 0:
            return "".join([*kept, left_out])
        kept.append(block)
    return "".join(kept)


def _head(entries: Sequence[Entry], alerts: Sequence[Alert], nothing: str) -> Iterator[str]:
    loops = {entry.loop for entry in entries}
    bad = [alert for alert in alerts if alert.level == "error" and not alert.accepted]
    faults = sum(bool(alert.check) for alert in bad)
    parts = [_number(faults, "fault")] if faults else []
    parts += [_number(len(bad) - faults, "error")] if len(bad) > faults else []
    failed = len(loops & {loop for alert in bad for loop in alert.loops})
    if nothing:
        yield f"## Training loops: nothing was checked\n\n{_text(nothing)}\n\n"
    elif parts:
        share = f"{failed} of {_number(len(loops), 'loop')} fail{'s' * (failed == 1)}"
        yield f"## Training loops: {' and '.join(parts)}; {share}\n\n"
    else:
        yield f"## Training loops: no fault in {_number(len(loops), 'loop')}\n\n"


def _alerts(alerts: Sequence[Alert]) -> Iterator[str]:
    for level, heading in _HEADINGS.items():
        own = [alert for alert in alerts if alert.level == level and not alert.accepted]
        if own:
            yield f"### {heading}\n\n"
        for alert in own:
            yield _alert(alert, folded=level == "warning")


def _alert(alert: Alert, *, folded: bool) -> str:
    where = f" at {_link(alert.at)}" if alert.at else ""
    loops = f"{', '.join(_code(loop) for loop in alert.loops[:_MOST_LOOPS])}{_more(alert.loops[_MOST_LOOPS:])}"
    about = f"{loops}{where}".strip()
    if alert.also:
        about += f"; {', '.join(_code(check) for check in alert.also)} fail{'s' * (len(alert.also) == 1)} for it"
    below = alert.text[:_MOST_TEXT].removeprefix(alert.summary).strip("\n")  # the summary is the heading
    body = f"{about}\n\n{_fenced(below)}\n" if below else f"{about}\n\n"
    if folded:
        parts = f"<b>{_html(alert.summary)}</b> (<code>{_html(alert.title)}</code>)"
        return f"<details><summary>{parts}</summary>\n\n{body}</details>\n\n"
    return f"**{_text(alert.summary)}** ({_code(alert.title)})\n\n{body}"


def _loops(entries: Sequence[Entry]) -> Iterator[str]:
    loops = [(loop, [entry.result for entry in own]) for loop, own in by_loop(entries)]
    if not loops:
        return
    bad = {loop for loop, results in loops if any(r.outcome in ("failed", "error") for r in results)}
    loops.sort(key=lambda each: each[0] not in bad)
    yield "### Loops\n\n| loop | checks |\n|---|---|\n"
    for loop, results in loops:
        yield f"| {_code(loop, in_table=True)} | {_text(counts(results)).replace('|', '&#124;')} |\n"
    yield "\n"


def _undecided(entries: Sequence[Entry]) -> Iterator[str]:
    """What a declaration or another batch would settle."""
    open_ones = list(undecided(entries))
    if open_ones:
        yield "<details><summary>Not decided</summary>\n\n"
        for each in open_ones:
            checks = ", ".join(map(_code, each.named)) or f"{len(each.checks)} checks"
            where = _code(each.loops[0]) if len(each.loops) == 1 else f"{len(each.loops)} of {each.all_loops} loops"
            yield f"- {checks}: {_text(each.reason)}{f' ({where})' if each.all_loops > 1 else ''}\n"
        yield "\n</details>\n"


def _link(at: At) -> str:
    """The line on GitHub, at the commit that the job runs on; without one its name alone."""
    server, repository, commit = (os.environ.get(f"GITHUB_{name}") for name in ("SERVER_URL", "REPOSITORY", "SHA"))
    name = _code(f"{at.file}:{at.number}")
    if not (server and repository and commit) or at.file.startswith("/") or ":" in at.file:
        return name
    return f"[{name}]({server}/{repository}/blob/{commit}/{quote(at.file)}#L{at.number})"


def _fenced(text: str) -> str:
    """A block of code; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}\n"


def _code(text: str, *, in_table: bool = False) -> str:
    """A span of code of any text."""
    text = " ".join(text.split())
    if "`" in text:
        return f"<code>{re.sub(r'[`*_|~]|[][]', lambda m: f'&#{ord(m[0])};', _html(text))}</code>"
    return f"`{text}`".replace("|", r"\|") if in_table else f"`{text}`"


def _html(text: str) -> str:
    """One line of text inside of HTML."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(text: str) -> str:
    """One line of text as a paragraph of Markdown shows it."""
    return re.sub(r"([\\`*_\[\]~#])", r"\\\1", _html(text))


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _more(rest: Sequence[str]) -> str:
    return f" and {len(rest)} more" if rest else ""
