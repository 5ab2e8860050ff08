"""Optimizers and schedulers that are built anew for every step, and so begin anew."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import FEWEST, calls_of, line_of
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.learning_rates import rates
from pytest_trainloop.wording import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Optimizer, Record

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
            shown_by="no weight is changed outside of the steps, so that no inner loop begins anew",
            culprits=(row[0].kind,),
            where=str(step.place),
        )


def _has_moments(optimizer: Optimizer) -> bool:
    momentum = any(s.get("momentum", "0") not in ("0", "0.0") for s in optimizer.settings)
    return optimizer.from_torch and (optimizer.kind not in WITHOUT_STATE or momentum)


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
