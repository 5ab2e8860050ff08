"""Optimizers and schedulers that are built anew for every step, and so begin anew."""

from __future__ import annotations

import ast
import itertools
import linecache
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, line_of
from pytest_trainloop.checks.learning.schedule.uncalled import WholeFit
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.learning_rates import rates
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.events import Place
    from pytest_trainloop.recording.record import Optimizer, Record
    from pytest_trainloop.runs.evidence import Evidence

SIZES = ("total_steps", "T_max", "total_iters")
"""Settings of torch's schedulers that are a number of calls."""

WITHOUT_STATE = ("SGD", "ASGD", "LBFGS", "Rprop")
"""Kinds that one step of each makes no other than many: with momentum SGD is judged too."""


def rebuilt_optimizers(record: Record) -> Iterator[Finding]:
    """Optimizers that make one step each, in a row: their moments are those of a first step, always.

    Weights that the loop sets itself between the steps are those of an inner loop (a new task, a copy), which begins
    anew on purpose.
    """
    single = [o for o in record.optimizers if o.steps == 1 and not o.declared and _has_moments(o)]
    for _, alike in itertools.groupby(single, key=lambda o: (o.kind, o.parameters, o.settings)):
        row = list(alike)
        if len(row) <= FEWEST or len(row) != len([o for o in record.optimizers if o.steps]):
            continue
        if record.moved_outside_steps() & set(row[0].parameters):
            continue
        step = next(s for s in record.innermost_steps() if s.optimizer == row[0].index)
        held = some(record.names(set(row[0].parameters)))
        yield Finding(
            cause="optimizer_rebuilt",
            summary=(
                f"{row[0].kind} is built anew for every step: its moments are lost each time, and every step is a "
                "first step"
            ),
            measured=f"{len(row)} {row[0].kind} with equal settings make one step each, on the same parameters: {held}",
            shown_by="no weight is changed outside of the steps (so this is no inner loop of meta-learning)",
            culprits=(row[0].kind,),
            where=str(step.place),
        )


def _has_moments(optimizer: Optimizer) -> bool:
    momentum = any(s.get("momentum", "0") not in ("0", "0.0") for s in optimizer.settings)
    return optimizer.from_torch and (optimizer.kind not in WITHOUT_STATE or momentum)


def rebuilt_each_pass(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers that are built for every pass and sized for all of them: none gets beyond its first part.

    Warm restarts, and stages with a schedule each, are sized for what they are called.
    """
    record = evidence.run()
    if not evidence.repeatable or not any(s.at and _in_a_loop(s.place) for s in record.schedulers):
        return
    whole = evidence.shared(WholeFit.of)
    built = [s for s in whole.schedulers if s.at and not s.inner]
    last = built[-1] if built else None
    alike = [s for s in built if last is not None and (s.place, s.settings) == (last.place, last.settings)]
    calls = {s.calls for s in alike}
    if not whole.ended or len(calls) != 1 or not (len(alike) >= FEWEST or len(alike) == whole.passes > 1):
        return
    sized = [(key, text) for key in SIZES if (text := alike[0].settings.get(key)) is not None]
    each = next(iter(calls))
    for key, text in sized:
        if not each or text != repr(each * len(alike)):
            continue
        kind, line = alike[0].kind, line_of(alike[0])
        yield Finding(
            cause="scheduler_rebuilt",
            summary=f"{kind} is built anew for each pass and is sized for all {len(alike)}: it begins again each time",
            measured=f"{key} = {text}, and each of {len(alike)} is called {each} times",
            shown_by=f"{key} equals the calls of all passes: {len(alike)} times {each}",
            culprits=(f"{kind}.step()",),
            where=line,
            change=line,
        )
        return


def _in_a_loop(place: Place | None) -> bool:
    """Whether a loop stands around a line, in its function."""
    if place is None:
        return False
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except SyntaxError:
        return False
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))]
    return any(n.lineno < place.line <= (n.end_lineno or 0) for n in loops)


def rebuilt_schedulers(record: Record) -> Iterator[Finding]:
    """Schedulers that are built anew for every step: each begins at its first rate."""
    for optimizer in record.optimizers:
        built = [s for s in record.schedulers if s.optimizer == optimizer.index and s.at and not s.inner]
        last = built[-1].place if built else None
        built = [s for s in built if s.place == last and last is not None]
        groups = [r for r in rates(record) if r.optimizer == optimizer.index]
        if len(built) <= FEWEST or not groups or any(s.calls > 1 for s in built):
            continue
        inside = [a for a, b in itertools.pairwise(built) if any(a.at < at < b.at for at in groups[0].at)]
        left = {c.after for s in built for c in calls_of(record, s.number)}
        if len(inside) < FEWEST or len(left) != 1:
            continue
        kind, line = built[0].kind, line_of(built[0])
        yield Finding(
            cause="scheduler_rebuilt",
            summary=f"{kind} is built anew for every step, so the rate stays at {groups[0].known[-1]:g}",
            measured=f"{len(built)} {kind} are built in {len(groups[0].values)} steps, each called once or not at all",
            shown_by="every call leaves the same rates: it is the first one of its scheduler",
            culprits=(f"{kind}.step()",),
            where=line,
            change=line,
        )
