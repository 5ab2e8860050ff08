"""Whether ``evaluate()`` is the same when it was called before: what it returns, and whether it evaluates at all.

One run calls it before the first step and after the last, another one after as many steps for the first time. The
weights are the same there, and so are the seeds.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.state.evaluation_is_pure.causes import found
from pytest_trainloop.checks.state.evaluation_is_pure.interposed import WANTED, used_up
from pytest_trainloop.checks.state.two_runs import line_of
from pytest_trainloop.core.whose import present
from pytest_trainloop.core.wording import some
from pytest_trainloop.instruments.tracing.statements import loop_of
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.reachable_state.snapshot import Reach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Cut, Result, Run
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.reachable_state.snapshot import Difference

MOST_PARTS = 6
"""Components that are left one by one."""

GATHERS = ("update", "compute")
"""What a metric has in addition to ``reset``."""


def called_again(cut: Cut, first_time: Run, early: Run) -> Iterator[Finding]:
    """``cut`` is that of ``early``, which called ``evaluate()`` before the first step and at its end."""
    again, plain = early.again, first_time.result
    if again is None or cut.differs(early):
        return
    ended = list(again.used_up) if plain.forwards and not plain.used_up else []
    if ended:  # a trainer may keep the generator of parameters that its optimizer was built from
        with preserved():
            before = set(used_up(cut.evidence.fresh_loop()))
        ended = [path for path in ended if path not in before]
    if ended:
        names = [p for p in ended if not any(p.startswith(f"{other}.") for other in ended)]
        facts: dict[str, Any] = {"what": some(names), "forwards": plain.forwards, "left": again.forwards, "raised": ""}
        facts |= {"raised": again.raised.error.summary} if again.raised else {}
        begun = line_of(cut.evidence.fresh_loop().evaluate)
        variant = "used up by two" if again.forwards else "used up"
        yield found("state_left", begun, names, variant, change=loop_of(begun) or begun, **facts)
    elif again.raised and not issubclass(again.raised.kind, WANTED):
        error = again.raised.error
        facts = {"raised": error.summary, "steps": again.raised.steps, "shown_by": error.traceback, "level": "advice"}
        yield found("evaluation_raised", again.raised.where, ("evaluate()",), "again", **facts)
    elif _changed(plain, again) and not _changed(plain, cut.run(lambda _: True, again=True).again):
        yield from itertools.islice(_gathered(cut, plain, early), 1)


def _gathered(cut: Cut, plain: Result, early: Run) -> Iterator[Finding]:
    """A number that is the sum or the mean of two evaluations, or that of a metric, by what holds their values.

    A best score and a smoothed one are no such numbers, and a list that gets one entry each time is a history.
    """
    owners = _resettable(cut.evidence.fresh_loop())
    parts: dict[str, list[Difference]] = {}
    for d in early.differences:
        owner = next((path for path in owners if _is_within(d.leaf.path, path)), "")
        if d.leaf.kind != "generator":
            parts.setdefault(owner or d.leaf.component, []).append(d)
    for name, part in list(parts.items())[:MOST_PARTS]:
        if any(d.leaf.kind == "length" and (d.after or 0) - (d.before or 0) == 1 for d in part):
            continue
        paths = {d.leaf.path for d in part}
        left = cut.run(lambda d, paths=paths: d.leaf.path not in paths, again=True).again  # type: ignore[misc]
        for i in _changed(plain, left):
            was, before, now = (result.numbers[i] for result in (plain, early.result, present(left, "its numbers")))
            how = "sum" if _close(now, was + before) else "mean" if _close(2 * now, was + before) else ""
            if owners.get(name) or (how and before and not _close(was, before)):
                facts = {"what": name, "how": how, "resets": name in owners}
                facts |= {"was": f"{was:.6g}", "now": f"{now:.6g}", "before": f"{before:.6g}"}
                line = cut.run(to_cut=True, watched=tuple(paths)).where
                facts["change"] = line_of(cut.evidence.fresh_loop().evaluate)
                yield found("state_left", line, (name,), "gathered", **facts)


def _changed(plain: Result, other: Result | None) -> list[int]:
    """The numbers that are others, by their positions."""
    if other is None or len(plain.numbers) != len(other.numbers):
        return []
    return [i for i, (a, b) in enumerate(zip(plain.numbers, other.numbers, strict=True)) if not _close(a, b)]


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))


def _resettable(loop: TrainLoop) -> dict[str, bool]:
    """The paths of objects with a function ``reset``, and whether it is a metric; the innermost first."""

    def offers(thing: Any, *names: str) -> bool:
        return all(callable(getattr(type(thing), name, None)) for name in names)

    places = Reach.of(loop).walked.places.items()
    known = {path: offers(place.value, *GATHERS) for path, place in places if offers(place.value, "reset")}
    return {path: known[path] for path in sorted(known, key=len, reverse=True)}


def _is_within(path: str, owner: str) -> bool:
    return path.removeprefix("len(").startswith((f"{owner}.", f"{owner}["))
