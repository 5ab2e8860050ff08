"""Whether an exception that left ``fit`` in a run of this package is the loop's own.

It is not where the watched run came back and a further one raised: what was put around the loop, or what it was given,
made it raise. Such a run shows nothing, and no check may take it for "nothing to judge". The run made once more
without what was put around it distinguishes the two.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch

from pytest_trainloop.core.errors import BrokenRun, Refused, TrainLoopError
from pytest_trainloop.core.whose import is_ours
from pytest_trainloop.recording.hooks import after_steps
from pytest_trainloop.recording.watch import FULL_ROUNDS
from pytest_trainloop.runs.batch_stream import Batches
from pytest_trainloop.runs.build import build
from pytest_trainloop.runs.guard import Guard
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.process_state import preserved, seed_all
from pytest_trainloop.runs.run import RunPlan, run

if TYPE_CHECKING:
    from typing import Any

    from pytest_trainloop.recording.events import Raised
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.build import Make

TRIES = 2
"""Runs without what was put around the loop that must come back, before that is called the reason: a loop may raise at
random."""

_AS_IT_IS = RunPlan()


def require_returned(make: Make, plan: RunPlan, record: Record, seen: Record) -> None:
    """Raise where ``fit`` raised in a run by this plan although it came back in the watched run, ``seen``:
    ``Refused`` where the loop raises for what it was given, ``BrokenRun`` where it is for what was put around it.

    A run that went on for longer than the watched one may end as it likes.
    """
    raised = record.raised
    if raised is None or seen.raised is not None or record.rounds >= max(seen.rounds, 1):
        return
    if plan.varied and plan.varying is None:
        raise Refused(f"fit raised {raised.summary} {_given(plan)}, and not in the watched run")
    around = plan.contexts is not _AS_IT_IS.contexts or plan.before_item is not _AS_IT_IS.before_item
    given = replace(plan, contexts=plan.varying or _AS_IT_IS.contexts, before_item=_AS_IT_IS.before_item)
    if around and all(run(make, given).raised is None for _ in range(TRIES)):
        _blame_the_run(raised, "in a run of this check only")
    raise Refused(f"fit raised {raised.summary} {_given(plan)}, and not in the watched run")


def is_own(make: Make, plan: RunPlan) -> bool:
    """Whether ``fit``, which raised in the watched run, raises where nothing watches it as well."""
    return not all(_comes_back(make, plan) for _ in range(TRIES))


def require_returned_watched(record: Record) -> None:
    """Raise ``BrokenRun`` where ``fit`` raised although it does not unwatched."""
    if record.raised is not None:
        _blame_the_run(record.raised, "only while the run was watched")


def _blame_the_run(raised: Raised, when: str) -> NoReturn:
    at = f" at {raised.place}" if raised.place.file else ""
    raise BrokenRun(f"fit raised {raised.summary}{at} {when}")


def _given(plan: RunPlan) -> str:
    """What the loop was given in place of its own, in words."""
    given = [
        *([plan.varied] if plan.varied else []),
        *(["in float64"] if plan.double else []),
        *(["on batches of this check"] if plan.items is not None or plan.stream is not None else []),
        *(["with moved weights"] if plan.prepare is not _AS_IT_IS.prepare else []),
    ]
    return " ".join(given) or "when it was run again"


def _comes_back(make: Make, plan: RunPlan) -> bool:
    """Whether ``fit`` returns without an exception where nothing of this package watches it but a count of steps."""
    steps: list[Any] = []
    guard = Guard(plan.timeout, plan.left)

    def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        steps.append(optimizer)
        if len(steps) >= max(2 * plan.count, 25):
            guard.stop()

    with preserved(), contextlib.ExitStack() as stack:
        torch.set_grad_enabled(True)
        loop = build(make, plan.knobs, plan.seed)
        batches = Batches(
            loop,
            plan.count,
            spent=lambda: len(steps) >= FULL_ROUNDS,
            stepped=lambda: bool(steps),
            stop=guard.stop,
            out_of_time=guard.out_of_time,
            read_ahead=plan.read_ahead,
        )
        stack.enter_context(contextlib.closing(batches))
        stack.enter_context(hooked(after_steps(count)))
        fit = plan.fit(loop)
        seed_all(plan.seed)
        try:
            error = guard.call(lambda: fit(batches), lambda: len(steps), lambda: batches.at_end)
        except TrainLoopError:
            return False
        if error is not None and is_ours(error):
            raise error
        return error is None
