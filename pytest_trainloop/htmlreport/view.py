"""What the page shows, from the data of the JSON report: each loop with its failures first, root causes before what
follows from them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop import registry
from pytest_trainloop.finding import Result
from pytest_trainloop.htmlreport.excerpts import Excerpt, Sources
from pytest_trainloop.htmlreport.shown import Shown
from pytest_trainloop.report.entry import Entry, entries_of
from pytest_trainloop.report.lines import Line, Places
from pytest_trainloop.report.roots import root_causes
from pytest_trainloop.report.section import checked_nothing, counts
from pytest_trainloop.report.text import finding_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_trainloop.finding import Finding, UserError

FEW_LOOPS = 3
"""Up to so many loops, cards and pictures are open from the start."""

MOST_PICTURES = 3
"""Pictures of one finding; further ones are among those of the loop."""

_PLACES = ("seen at", "change")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fault, error, piece of advice or note."""

    anchor: str
    check: str
    kind: str
    """"failed", "error", "xfailed", "advice" or "note"."""
    summary: str
    cause: str = ""
    place: str = ""
    """The line to change, or else where the fault was seen."""
    fields: Mapping[str, str]
    excerpts: Sequence[Excerpt] = ()
    pictures: Sequence[Shown] = ()
    traceback: str = ""
    rerun: str = ""
    """The command that runs this check on this loop."""
    follows: Sequence[Block] = ()
    """The failures that follow from this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check that gave nothing to repair, in a table."""

    check: str
    text: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    nodeid: str
    anchor: str
    status: str
    """"failed", "advice", "passed" or "nothing"."""
    counts: str
    at: str
    """File and line of its test; empty where that is not known."""
    card: Sequence[Mapping[str, Any]]
    card_file: str
    card_changes: Sequence[str] | None
    failures: Sequence[Block]
    xfailed: Sequence[Block]
    advice: Sequence[Block]
    notes: Sequence[Block]
    pictures: Sequence[Shown]
    passed: Sequence[Row]
    undecided: Sequence[Row]
    elsewhere: Sequence[Row]
    wide_open: bool
    """Whether its card and its pictures are open from the start."""

    @property
    def marked(self) -> int:
        """Lines of the card that differ from the common."""
        return sum(bool(line["odd"]) for line in self.card)

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]

    @property
    def name(self) -> str:
        return self.nodeid.partition("::")[2] or self.nodeid


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    number: int
    text: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    verdict: str
    status: str
    totals: Sequence[Total]
    cost: str
    environment: Sequence[tuple[str, str]]
    loops: Sequence[Loop]
    rules: Sequence[tuple[str, str]]
    """The rule page of each check that found something."""

    @property
    def by_file(self) -> list[tuple[str, list[Loop]]]:
        """The loops in their order, with the file of those that follow one another."""
        return [(file, list(group)) for file, group in itertools.groupby(self.loops, key=lambda loop: loop.file)]


def view(document: Mapping[str, Any], folders: Sequence[Path]) -> Page:
    """What the page of a JSON report shows; source lines are read in ``folders``."""
    known = registry.registered()
    sources = Sources(Places(*folders))
    anchors = _Anchors()
    few = len(document["loops"]) <= FEW_LOOPS
    loops = [_Reader(loop, anchors, sources, known).loop(few=few) for loop in document["loops"]]
    order = ("failed", "advice", "nothing", "passed")
    loops.sort(key=lambda loop: order.index(loop.status))
    entries = entries_of(document)
    results = [entry.result for entry in entries]
    return Page(
        verdict=_verdict(loops, entries),
        status=next((status for status in ("failed", "nothing") if any(loop.status == status for loop in loops)), "")
        or ("passed" if loops else "nothing"),
        totals=_totals(results),
        cost=f"{sum(r.seconds for r in results):,.1f} s, {sum(r.steps for r in results):,} optimizer steps",
        environment=[(name, str(value)) for name, value in document["environment"].items() if value is not None],
        loops=loops,
        rules=_rules(loops, known),
    )


class _Anchors:
    """Names of places on the page: readable, each once."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def new(self, *names: str) -> str:
        name = ".".join(re.sub(r"[^\w.-]+", "-", each, flags=re.ASCII).strip("-") or "x" for each in names)
        self._given[name] += 1
        return name if self._given[name] == 1 else f"{name}.{self._given[name]}"


class _Reader:
    """One loop of the document."""

    def __init__(
        self, data: Mapping[str, Any], anchors: _Anchors, sources: Sources, known: Mapping[str, registry.Check]
    ) -> None:
        self._data = data
        self._anchors = anchors
        self._sources = sources
        self._known = known
        self._nodeids = {check["check"]: check["nodeid"] for check in data["checks"]}
        self._anchor = anchors.new("loop", data["nodeid"])
        self._pictures = [
            Shown(anchors.new(self._anchor, "picture", picture["key"]), picture) for picture in data.get("pictures", ())
        ]
        self._left = list(self._pictures)

    def loop(self, *, few: bool) -> Loop:
        data = self._data
        results = [Result.from_json(check) for check in data["checks"]]
        failures = self._failures(results)
        advice = [self._block(r, f, "advice") for r in results for f in r.advice]
        card = data.get("card") or {}
        status = "failed" if failures else "advice" if advice else "passed"
        if all(r.outcome in ("skipped", "unreliable") for r in results):
            status = "nothing"
        return Loop(
            nodeid=data["nodeid"],
            anchor=self._anchor,
            status=status,
            counts=counts(results) if results else "",
            at=data.get("at", ""),
            card=card.get("lines", ()),
            card_file=card.get("file", ""),
            card_changes=card.get("changes"),
            failures=failures,
            xfailed=[block for r in results if r.outcome == "xfailed" for block in self._xfailed(r)],
            advice=advice,
            notes=[self._block(r, f, "note") for r in results for f in r.notes],
            pictures=self._left,
            passed=[self._row(r, f"{r.seconds:.2f} s, {r.steps} steps") for r in results if r.outcome == "passed"],
            undecided=[self._row(r, r.reason, r.needs) for r in results if _is_open(r)],
            elsewhere=[self._row(r, r.reason) for r in results if r.outcome == "skipped" and not r.applies],
            wide_open=few or bool(failures),
        )

    def _failures(self, results: Sequence[Result]) -> list[Block]:
        failed = [r for r in results if r.outcome == "failed"]
        by_check = {r.check: r for r in failed}
        found = []
        for root in root_causes(failed):
            result = root.result
            if result.reason or not result.faults:
                found.append(self._bare(result, "failed", result.reason or f"{result.check} failed"))
            for fault, followed in zip(result.faults, root.followed, strict=True):
                own = self._block(result, fault, "failed")
                below = [self._block(by_check[name], f, "failed") for name in followed for f in by_check[name].faults]
                found.append(replace(own, follows=below))
        return found + [self._error(r) for r in results if r.outcome == "error"]

    def _xfailed(self, result: Result) -> list[Block]:
        blocks = [self._block(result, fault, "xfailed", reason=result.reason) for fault in result.faults]
        return blocks or [self._bare(result, "xfailed", result.reason)]

    def _error(self, result: Result) -> Block:
        error: UserError | None = result.error
        summary = f"{error.stage} raised {error.summary}" if error else result.reason
        traceback = _ANSI.sub("", error.traceback.rstrip()) if error else ""
        bare = self._bare(result, "error", _ANSI.sub("", summary) or "an error without a text")
        raised = Line.of_traceback(traceback)
        return replace(
            bare,
            place=f"{raised.file}:{raised.number}" if raised else "",
            excerpts=self._sources.excerpts({"raised": raised}),
            traceback=traceback,
        )

    def _bare(self, result: Result, kind: str, summary: str) -> Block:
        return Block(
            anchor=self._anchors.new(self._anchor, result.check),
            check=result.check,
            kind=kind,
            summary=summary,
            fields={},
            rerun=self._rerun(result.check),
        )

    def _block(self, result: Result, finding: Finding, kind: str, *, reason: str = "") -> Block:
        proofs = self._known[result.check].proofs if result.check in self._known else {}
        fields = finding_fields(finding, proofs)
        named = {label: Line.read(fields[label]) for label in _PLACES if label in fields}
        return Block(
            anchor=self._anchors.new(self._anchor, result.check, finding.cause),
            check=result.check,
            kind=kind,
            summary=finding.summary,
            cause=finding.cause,
            place=(finding.change or finding.where).partition("   ")[0],
            fields={"expected": reason, **fields} if reason else fields,
            excerpts=self._sources.excerpts(named),
            pictures=self._taken(result.check, finding.cause),
            rerun=self._rerun(result.check) if kind in ("failed", "advice") else "",
        )

    def _taken(self, check: str, cause: str) -> list[Shown]:
        """The pictures that show a finding best, the best first; each is on the page once."""
        own = [(rank, p) for p in self._left if (rank := p.rank(check, cause)) is not None]
        own.sort(key=lambda pair: pair[0])
        taken = [picture for _, picture in own[:MOST_PICTURES]]
        self._left = [picture for picture in self._left if picture not in taken]
        return taken

    def _rerun(self, check: str) -> str:
        nodeid = self._nodeids.get(check, "")
        return f"pytest --trainloop {shlex.quote(nodeid)}" if "::" in nodeid else ""  # else a script's

    def _row(self, result: Result, detail: str, needs: str = "") -> Row:
        known = self._known.get(result.check)
        return Row(check=result.check, text=known.headline if known else "", detail=f"{needs} {detail}".strip())


def _is_open(result: Result) -> bool:
    return result.outcome == "unreliable" or (result.outcome == "skipped" and result.applies)


def _verdict(loops: Sequence[Loop], entries: Sequence[Entry]) -> str:
    nothing = checked_nothing(entries)
    if nothing:
        return f"Nothing was checked: {nothing}"
    bad = sum(loop.status == "failed" for loop in loops)
    whole = f"{len(loops)} training loop{'s' * (len(loops) != 1)}"
    if not bad:
        return f"No failure in {whole}"
    return f"{bad} of {whole} {'fails' if bad == 1 else 'fail'}" if len(loops) > 1 else "The training loop fails"


def _totals(results: Sequence[Result]) -> list[Total]:
    of = Counter(r.outcome for r in results)
    found = (
        (of["failed"], "failed", "failed"),
        (of["error"], "errors" if of["error"] > 1 else "error", "failed"),
        (of["xfailed"], "expected to fail", "plain"),
        (sum(len(r.advice) for r in results), "advice", "advice"),
        (of["passed"], "passed", "passed"),
        (sum(map(_is_open, results)), "not decided", "plain"),
        (sum(not r.applies for r in results), "do not apply", "plain"),
    )
    return [Total(number=number, text=text, kind=kind) for number, text, kind in found if number]


def _rules(loops: Iterable[Loop], known: Mapping[str, registry.Check]) -> list[tuple[str, str]]:
    from pytest_trainloop import explain

    named = {
        block.check
        for loop in loops
        for blocks in (loop.failures, loop.xfailed, loop.advice, loop.notes)
        for top in blocks
        for block in (top, *top.follows)
    }
    return [(check, explain.page(check)) for check in known if check in named]
