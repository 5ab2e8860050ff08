"""Which line draws from python's or numpy's global generator: no mode of torch sees these draws."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from pytest_trainloop.recording.changed_at import ChangedAt

if TYPE_CHECKING:
    from pytest_trainloop.runs.evidence import Evidence


def outside_draw(evidence: Evidence) -> str:
    """The first such line of the project's, as ``numpy, train.py:12   noise = ...``; empty where none was seen. To be
    asked for by ``evidence.shared`` where a check is skipped for such draws: it takes one step, at a tenth of its
    speed."""
    states, which = _states(), [""]

    def moved() -> bool:
        nonlocal states
        before, states = states, _states()
        which[0] = next((name for name in states if states[name] != before.get(name)), "")
        return bool(which[0])

    line = ChangedAt(moved)
    evidence.rerun(contexts=lambda _watch: (line.watching(),), enough=lambda r: r.rounds >= 1, may_raise=True)
    return f"{which[0]}, {line.where}" if line.where else ""


def rng_line(evidence: Evidence) -> str:
    """The line in parentheses, to follow the words of a reason; empty where none was seen."""
    line = evidence.shared(outside_draw)
    return f" ({line})" if line else ""


def _states() -> dict[str, tuple[int, ...]]:
    """How far each generator is: its place in its numbers, and the first of them."""
    python = random.getstate()[1]
    found: dict[str, tuple[int, ...]] = {"python": (python[-1], python[0])}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state: Any = numpy.random.get_state()
        found["numpy"] = (int(state[2]), int(state[1][0]), int(state[3]))
    return found
