"""What to repair: the faults of all loops, equal ones once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.views.htmlreport.parts import Block, Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the page has a fault of one loop."""

    loop: str
    """The anchor of the loop."""
    nodeid: str
    anchor: str
    """The anchor of the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """One fault, with each loop that has the identical fault."""

    block: Block
    """That of the first loop."""
    places: Sequence[Place]

    @property
    def repair(self) -> str:
        """The first line of the repair; empty where there is none."""
        return self.block.fields.get("repair", "").partition("\n")[0]


def roots(loops: Iterable[Loop]) -> list[Root]:
    """The faults in the order of their loops, those that have neither cause nor place (an expectation that is not met)
    last."""
    found: dict[tuple[object, ...], tuple[Block, list[Place]]] = {}
    for loop in loops:
        for block in loop.failures:
            follows = tuple(sorted(each.check for each in block.follows))
            repair = block.fields.get("repair", "")
            key = (block.check, block.kind, block.cause, block.summary, block.place, repair, follows)
            _, places = found.setdefault(key, (block, []))
            places.append(Place(loop=loop.anchor, nodeid=loop.nodeid, anchor=block.anchor))
    every = [Root(block=block, places=places) for block, places in found.values()]
    return sorted(every, key=lambda root: not (root.block.cause or root.block.place))
