"""Node ids: which check an item runs, on which device, and which loop it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


CARD = "card"
"""In the place of the check's name in the item that takes the card of a loop."""

STEP_TIME = "step_time"
"""In the place of the check's name in the item that times the steps of a loop."""

NO_CHECKS = (CARD, STEP_TIME)
"""Items of a loop that judge nothing."""

ON_CUDA = "-cuda"
"""The suffix of the check's name where loops are on a CUDA device: ``[precision_parity-cuda]``."""


def loop_of(nodeid: str, check: str) -> str:
    """The node id without the part that names the check: the same for all items of one loop on one device."""
    if nodeid.endswith(f"{check}{ON_CUDA}]"):
        nodeid = nodeid.removesuffix(f"{ON_CUDA}]") + "]"
    for part, rest in ((f"[{check}]", ""), (f"-{check}]", "]")):
        if nodeid.endswith(part):
            return nodeid.removesuffix(part) + rest
    for part, rest in ((f"-{check}-", "-"), (f"[{check}-", "[")):  # another plugin put its own part behind ours
        head, found, tail = nodeid.rpartition(part)
        if found:
            return head + rest + tail
    return nodeid


def of_check(nodeid: str, check: str, other: str) -> str:
    """The node id of another check's item of the same loop; the same node id for one that names no check."""
    for part in (f"[{check}", f"-{check}"):
        for end in (f"{ON_CUDA}]", "]", "-"):
            head, found, tail = nodeid.rpartition(part + end)
            if found and (end == "-" or not tail):
                return f"{head}{part[0]}{other}{end}{tail}"
    return nodeid


def check_in(nodeid: str) -> str:
    """The last part of a node id's brackets: the check, if a check's item it is."""
    if not nodeid.endswith("]"):
        return ""
    nodeid = nodeid[:-1].removesuffix(ON_CUDA)
    inside = nodeid[max(nodeid.rfind("["), nodeid.rfind("-")) + 1 :]
    return inside if inside.isidentifier() else ""


def checks_in(nodeids: Sequence[str]) -> list[str]:
    """The registered checks that these node ids end with."""
    from pytest_trainloop.core import registry

    known = registry.registered()
    return [check for nodeid in nodeids if (check := check_in(nodeid)) in known]


def scopes(nodeids: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """The loop of each item of a loop, and each other item's own id.

    A check that the project registered in a deeper conftest is unknown where xdist schedules: it is recognised by items
    that have the same id except for a known check.
    """
    loops = {loop_of(nodeid, check_in(nodeid)) for nodeid in nodeids if check_in(nodeid) in known}
    stripped = {nodeid: loop_of(nodeid, check_in(nodeid)) if check_in(nodeid) else nodeid for nodeid in nodeids}
    return {nodeid: loop if loop in loops else nodeid for nodeid, loop in stripped.items()}
