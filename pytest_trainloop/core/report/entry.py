"""One line of a report: the result of one check on one loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.core.finding import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The result of one check on one loop; ``nodeid`` is the test item that ran it."""

    loop: str
    nodeid: str
    result: Result

    def to_json(self) -> dict[str, Any]:
        return {"loop": self.loop, "nodeid": self.nodeid, **self.result.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        return cls(loop=data["loop"], nodeid=data["nodeid"], result=Result.from_json(data))


def entries_of(document: Mapping[str, Any]) -> list[Entry]:
    """The entries in the data of a JSON report."""
    return [
        Entry(loop=loop["nodeid"], nodeid=check["nodeid"], result=Result.from_json(check))
        for loop in document["loops"]
        for check in loop["checks"]
    ]


def by_loop(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """The entries of each loop, loops and entries in the order in which they were given."""
    for loop in dict.fromkeys(entry.loop for entry in entries):
        yield loop, [entry for entry in entries if entry.loop == loop]
