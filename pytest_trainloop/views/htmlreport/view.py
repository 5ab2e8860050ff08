"""What the page shows, from the data of the JSON report: each loop with its failures first, root causes before what
follows from them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core import registry
from pytest_trainloop.core.finding import Result
from pytest_trainloop.core.report.entry import Entry, entries_of
from pytest_trainloop.core.report.lines import Line, Places
from pytest_trainloop.core.report.roots import root_causes
from pytest_trainloop.core.report.section import checked_nothing, counts
from pytest_trainloop.core.report.text import finding_fields
from pytest_trainloop.views.htmlreport.excerpts import Sources
from pytest_trainloop.views.htmlreport.parts import Block, Loop, Row
from pytest_trainloop.views.htmlreport.repairs import Root, roots
from pytest_trainloop.views.htmlreport.shown import Shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_trainloop.core.finding import Finding, UserError

FEW_LOOPS = 3
"""Up to so many loops, cards and pictures are open from the start."""

MOST_PICTURES = 3
"""Pictures of one finding; further ones are among those of the loop."""

MANY = 4
"""Checks with the same reason that make one row of a table."""

_PLACES = ("seen at", "change")

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
    roots: Sequence[Root]
    """What to repair."""
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
        roots=roots(loops),
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
            undecided=_folded([self._row(r, _why(r)) for r in results if _is_open(r)]),
            elsewhere=_folded([self._row(r, r.reason) for r in results if r.outcome == "skipped" and not r.applies]),
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
        return found + [self._error(r, results) for r in results if r.outcome == "error"]

    def _xfailed(self, result: Result) -> list[Block]:
        blocks = [self._block(result, fault, "xfailed", reason=result.reason) for fault in result.faults]
        return blocks or [self._bare(result, "xfailed", result.reason)]

    def _error(self, result: Result, results: Sequence[Result]) -> Block:
        error: UserError | None = result.error
        summary = f"{error.stage} raised {error.summary}" if error else result.reason
        traceback = _ANSI.sub("", error.traceback.rstrip() if error else result.mistake)
        bare = self._bare(result, "error", _ANSI.sub("", summary) or "an error without a text")
        raised = Line.of_traceback(traceback) if error else None  # lines of this package are no lines of the loop
        return replace(
            bare,
            place=f"{self._sources.name(raised)}:{raised.number}" if raised else "",
            of_the_loop=any(r.reason.endswith(f"(see {self._nodeids[result.check]})") for r in results),
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

    def _row(self, result: Result, detail: str) -> Row:
        known = self._known.get(result.check)
        return Row(checks=(result.check,), text=known.headline if known else "", detail=detail)


def _is_open(result: Result) -> bool:
    return result.outcome == "unreliable" or (result.outcome == "skipped" and result.applies)


def _why(result: Result) -> str:
    """Why a check did not decide, and what it needs: "no padding is known (needs padding=)"."""
    complete = not result.needs or result.needs in result.reason
    return result.reason if complete else f"{result.reason} (needs {result.needs})".lstrip()


def _folded(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of ``MANY`` checks and more that say the same merged into one, at the position of the first."""
    number = Counter(row.detail for row in rows)
    found: dict[object, Row] = {}
    for row in rows:
        key = row.detail if row.detail and number[row.detail] >= MANY else row.checks
        before = found.get(key)
        found[key] = replace(before, checks=(*before.checks, *row.checks), text="") if before else row
    return list(found.values())


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
    from pytest_trainloop.judging import explain

    named = {
        block.check
        for loop in loops
        for blocks in (loop.failures, loop.xfailed, loop.advice, loop.notes)
        for top in blocks
        for block in (top, *top.follows)
    }
    return [(check, explain.page(check)) for check in known if check in named]
