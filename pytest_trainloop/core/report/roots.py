"""Which of several failed checks are root causes, and which follow from them. No torch, no pytest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_trainloop.core.finding import Finding, Result

    Above = Mapping[str, tuple[str, int] | None]


@dataclass(frozen=True, slots=True)
class RootCause:
    """A failed check that no other one explains."""

    result: Result
    followed: tuple[tuple[str, ...], ...]
    """By fault: the failed checks that follow from it."""


def root_causes(failed: Sequence[Result]) -> list[RootCause]:
    """The root causes among failed checks, in their order."""
    above = {result.check: _above(result, failed) for result in failed}
    found = []
    for result in failed:
        if _root(result.check, above) != result.check:
            continue
        below = [check for check in above if check != result.check and _root(check, above) == result.check]
        steps = {check: _first_step(check, above, result.check) for check in below}
        followed = (tuple(check for check in below if steps[check] == i) for i in range(len(result.faults)))
        found.append(RootCause(result, tuple(followed)))
    return found


def _above(result: Result, failed: Sequence[Result]) -> tuple[str, int] | None:
    """The check that explains this one, and by which of its faults. Where two explain each other, the earlier one is
    the cause."""
    before = True
    for other in failed:
        if other.check == result.check:
            before = False
            continue
        mutual = any(_follows(other, fault) for fault in result.faults)
        for i, fault in enumerate(other.faults):
            if _follows(result, fault) and (before or not mutual):
                return other.check, i
    return None


def _follows(result: Result, fault: Finding) -> bool:
    if result.check in fault.explains or any(fault.accounts_for(result.check, f.cause) for f in result.faults):
        return True
    return fault.check in _WIRING and result.check == "baseline" and _within(result.faults, fault)


_WIRING = frozenset({"optimizer_holds_every_param", "gradient_reaches_every_param", "every_param_moves"})
"""Checks of which parameters train: that some no longer do is reported by the change from a baseline as well."""


def _within(faults: Sequence[Finding], other: Finding) -> bool:
    """Whether all that these faults name is named by the other one."""
    names = {name for fault in faults for name in fault.culprits}
    return bool(names) and names <= set(other.culprits)


def _root(check: str, above: Above) -> str:
    """The root cause of a failed check; of checks that explain one another in a ring the earliest."""
    path = [check]
    while (up := above[path[-1]]) is not None:
        if up[0] in path:
            ring = path[path.index(up[0]) :]
            return min(ring, key=list(above).index)
        path.append(up[0])
    return path[-1]


def _first_step(check: str, above: Above, root: str) -> int:
    """Which of the root's faults leads to a check."""
    for _ in above:
        up = above[check]
        if up is None or up[0] == root:
            return up[1] if up else 0
        check = up[0]
    return 0
