"""Names that are numbered in the order of a Python set. Each process has another one, whatever its seeds are.

The hash of a string differs between processes, so no run of this one shows it. What shows it are the numbers: they
follow the set of the names, which chance does not explain. As another process would, a fresh loop numbers them
otherwise; where ``load`` leaves that so, the checkpoint does not hold them.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.resume_equivalence.causes import found
from pytest_trainloop.checks.state.resume_equivalence.state_calls import SAVES
from pytest_trainloop.checks.state.resume_equivalence.statements import last_call
from pytest_trainloop.core.whose import project_may_raise
from pytest_trainloop.instruments.tracing.made_at import assigned_at
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.reachable_state.snapshot import Reach

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.state.resume_equivalence.runs import Uninterrupted
    from pytest_trainloop.core.finding import Finding

LEAST, ALL_IN_ORDER, LOOKED_AT = 20, 9, 200
"""Names of which one pair in ten may be in another order than in the set: how a set was filled moves a few. Of fewer
all must be in order. So many names are looked at."""

SPECIAL = 4
"""Names before those of the set, at most: padding and the like."""


def numbered_by_a_set(a: Uninterrupted) -> Iterator[Finding]:
    if not sys.flags.hash_randomization:
        return
    loop, left = a.evidence.fresh_loop(), dict[str, Any]()
    places = Reach.of(loop).walked.places.items()
    held = {path: p.value for path, p in places if not path.startswith("len(") and _follows_a_set(p.value)}
    other = {path: dict(zip(names, reversed(names.values()), strict=True)) for path, names in held.items()}
    with project_may_raise(), preserved():
        for path, names in held.items():
            names.update(other[path])
        if held:
            a.checkpoint.give(loop)
            now = Reach.of(loop).walked.places
            left = {path: now[path] for path in held if path in now and now[path].value == other[path]}
    if left:
        path, place = next(iter(left.items()))
        owner = None if place.within is None else place.within.value
        facts: dict[str, Any] = {
            "count": len(held[path]),
            "change": str(assigned_at(owner, path.rpartition(".")[2]) or last_call(a.statements, SAVES)),
        }
        yield found("numbered_by_a_set", a.lines["load"], left, level="advice", **facts)


def _follows_a_set(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) < ALL_IN_ORDER:
        return False
    if {type(key) for key in value} != {str} or {type(number) for number in value.values()} != {int}:
        return False
    if max(value.values()) - min(value.values()) != len(value) - 1 or len(set(value.values())) < len(value):
        return False
    order = sorted(value, key=value.__getitem__)
    return any(_is_order_of_a_set(order[first:]) for first in range(SPECIAL + 1))


def _is_order_of_a_set(names: Sequence[str]) -> bool:
    if len(names) < ALL_IN_ORDER:
        return False
    pairs = list(itertools.combinations(names[:LOOKED_AT], 2))
    most = len(pairs) // 10 if len(names) >= LEAST else 0
    places = ({name: at for at, name in enumerate(set(filled))} for filled in (names, sorted(names)))
    return any(sum(place[x] > place[y] for x, y in pairs) <= most for place in places)
