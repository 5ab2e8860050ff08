"""The line "ranks": what each of several processes did, where the loop has a knob for their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.cards.page import Line
from pytest_trainloop.cards.words import marked
from pytest_trainloop.checks.scale.distributed_equivalence.findings import over_own_batches
from pytest_trainloop.checks.scale.distributed_equivalence.rank_work import Did
from pytest_trainloop.ranks.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.cards.facts import Facts
    from pytest_trainloop.ranks.facts import Launch
    from pytest_trainloop.ranks.table import Row

CHECK = "distributed_equivalence"


def ranks(facts: Facts) -> Iterator[Line]:
    if "ranks" not in facts.evidence.knobs:
        return
    result = facts.results.get(CHECK)
    if result is None:
        yield Line(label="ranks", text=f"not looked at: {CHECK} was not run", seen=False)
        return
    launched = None if result.outcome == "skipped" else facts.ask(over_own_batches)
    if launched is None:
        yield Line(label="ranks", text=f"not looked at: {result.reason or facts.why}", seen=False)
        return
    table = Table.of(launched, _known(launched))
    label = "ranks"
    for row in table.rows:
        yield Line(label=label, text=f"{row.label}: {_text(row)}", odd=not row.same and row.label in ALIKE)
        label = ""


ALIKE = ("optimizer steps", "weights", "when built", "each step")
"""What is commonly the same on all ranks."""


def _text(row: Row) -> str:
    if row.same:
        return f"{row.cells[0]} on each of {len(row.cells)}"
    each = ", ".join(f"{cell} (rank {number})" for number, cell in enumerate(row.cells))
    return marked(each, row.label in ALIKE)


def _known(launched: Launch) -> dict[str, list[str]]:
    """What the records of the ranks say besides their calls."""
    dids = [rank.value for rank in launched]
    if not all(isinstance(did, Did) and did.record is not None for did in dids):
        return {}
    logs = [did.seen.digests for did in dids]
    known = {"batches": [str(did.record.items) for did in dids]}
    if all(logs):
        ends = [log[-1] for log in logs]
        known["weights"] = ["as on rank 0" if end == ends[0] else "other than on rank 0" for end in ends]
    drawn = [{place: tuple(found) for place, found in did.seen.draws.items()} for did in dids]
    if any(drawn):
        known["draws"] = ["as on rank 0" if one == drawn[0] else "other than on rank 0" for one in drawn]
    return known
