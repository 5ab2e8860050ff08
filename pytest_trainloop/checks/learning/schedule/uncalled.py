"""Schedulers that are built and that ``fit`` never calls."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
from functools import cache
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import called_twice, line_of
from pytest_trainloop.errors import BrokenRun, CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record, Scheduler
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.called_functions import CalledFunctions


STEPPED = ("optim", "scaler", "ema", "env", "prof", "bar")
"""What stands before ``.step(`` that is no scheduler."""


def uncalled(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers on an optimizer that steps, and that nothing calls.

    A fault where nobody can have called it later: ``fit`` itself built it and came to its end, ``fit`` made several
    passes, or it calls the scheduler of the same kind on another optimizer; and where no line of ``fit`` that did not
    run may be the call. Nothing is said where ``fit`` raised: the call may come after that.
    """
    record = evidence.run()
    if record.raised is not None:
        return
    for scheduler in record.schedulers:
        if scheduler.calls or scheduler.inner or scheduler.optimizer is None:
            continue
        optimizer = record.optimizers[scheduler.optimizer]
        groups = [r for r in rates(record) if r.optimizer == optimizer.index]
        if optimizer.steps < 2 or any(g.moves for g in groups) or _another_drives(record, scheduler):
            continue
        proof = _proof(evidence, scheduler)
        if not proof and (scheduler.plateau or _still_to_come(evidence, scheduler)):
            continue
        certain = _is_gone(record, scheduler) or (bool(proof) and not evidence.shared(WholeFit.of).may_call)
        twice = _called_in_its_place(record, scheduler)
        made = f"{optimizer.steps} steps"
        rate = groups[0].known[0] if groups and groups[0].known else 0.0
        yield Finding(
            cause="never_called",
            level="fault" if certain else "advice",
            summary=f"{scheduler.kind} is built and fit never calls it: all {made} are made at {rate:g}"
            if certain
            else f"{scheduler.kind} is built, and no call of it was seen: the {made} that were watched are made at "
            f"{rate:g}",
            measured=f"0 calls of {scheduler.kind}.step() in {optimizer.steps} steps of {optimizer.kind}",
            shown_by=proof or "fit may be one epoch of a loop that calls it",
            culprits=(f"{scheduler.kind}.step()",),
            kinds=("missing call",),
            where=twice or record.step_line(),
            change=twice or (record.step_line() if certain and scheduler.gone is None else line_of(scheduler)),
            repair="call the one that is never called on this line: it calls the other a second time"
            if twice
            else _cadence(scheduler),
        )


COUNTED = ("milestones", "step_size", "T_max", "total_steps", "total_iters", "T_0")
"""Settings of torch's schedulers that count calls."""


def _cadence(scheduler: Scheduler) -> str:
    """Where the call belongs: what the settings count, nobody but the project knows."""
    counted = next((name for name in COUNTED if name in scheduler.settings), None)
    if counted is None:
        return ""
    text = scheduler.settings[counted]
    if counted == "milestones" and "{" in text:
        text = "[" + ", ".join(re.findall(r"(\d+):", text)) + "]"
    return (
        f"scheduler.step(): its {counted}={text} counts calls: once a pass if these are epochs, once after each "
        "optimizer.step() if these are steps"
    )


def _called_in_its_place(record: Record, scheduler: Scheduler) -> str:
    """The line that calls a scheduler of the same kind a second time."""
    twice = [f for f in called_twice(record) if f.culprits == (f"{scheduler.kind}.step()",)]
    return twice[0].where if twice else ""


def _another_drives(record: Record, scheduler: Scheduler) -> bool:
    """Whether another scheduler of the same optimizer is called: one of them may wait for its stage."""
    return any(s.calls and s.optimizer == scheduler.optimizer for s in record.schedulers)


def _proof(evidence: Evidence, scheduler: Scheduler) -> str:
    """Why nobody will call it later; empty where somebody may."""
    record = evidence.run()
    if _is_gone(record, scheduler):
        return "nothing holds it any more while the steps are made"
    alike = [s for s in record.schedulers if s.calls and s.kind == scheduler.kind and not s.inner]
    if alike:
        return f"fit calls the {scheduler.kind} of another optimizer, {alike[0].calls} times"
    whole = evidence.shared(WholeFit.of)
    if not whole.ended or any(s.calls for s in whole.schedulers):
        return ""
    if scheduler.at:
        return "fit builds it, and came to its end"
    if whole.passes > 1:
        return f"fit makes {whole.passes} passes over the batches by itself, and came to its end"
    return ""


def _still_to_come(evidence: Evidence, scheduler: Scheduler) -> bool:
    """Whether a longer run calls it, or may: one that was watched once and ended from outside shows no epoch's end."""
    if not evidence.repeatable:
        return evidence.run().cut_short
    return evidence.shared(WholeFit.of).calls(scheduler)


def _is_gone(record: Record, scheduler: Scheduler) -> bool:
    """Whether nothing held the scheduler any more before the last step of its optimizer."""
    steps = [s.at for s in record.innermost_steps() if s.optimizer == scheduler.optimizer]
    return scheduler.gone is not None and scheduler.gone < steps[-1]


class WholeFit:
    """A further run over two batches a pass, which is made to its end, and the functions that it called."""

    def __init__(self) -> None:
        self.ended = False
        """Whether ``fit`` came back by itself, after some steps."""
        self.passes = 0
        self.schedulers: list[Scheduler] = []
        self.record: Record | None = None
        """What it recorded, where ``fit`` came back."""
        self.may_call = True
        """Whether a function that ran holds a call of a scheduler, or of what is named after one, that did not."""

    def calls(self, scheduler: Scheduler) -> bool:
        """Whether the scheduler that is built on the same line is called."""
        return any(s.calls for s in self.schedulers if (s.kind, s.place) == (scheduler.kind, scheduler.place))

    @classmethod
    def of(cls, evidence: Evidence) -> WholeFit:
        from pytest_trainloop.tracing.called_functions import CalledFunctions

        found, called = cls(), CalledFunctions()
        with contextlib.suppress(CannotDecide, BrokenRun):
            if evidence.repeatable:
                record = evidence.rerun(count=2, enough=lambda record: False, read_ahead=None, contexts=called.contexts)
                found.ended = record.ended and not record.cut_short and record.steps > 0
                found.passes = len(record.passes)
                found.schedulers = record.schedulers
                found.record = record if found.ended else None
                found.may_call = _may_call(record, called)
        return found


def _may_call(record: Record, called: CalledFunctions) -> bool:
    """It may stand behind a condition that holds later: every tenth epoch, after a warm-up."""
    if not called.own or any("sched" in name.lower() for name in called.libraries):
        return True
    ran = {at for event in record.events for at in event.site}
    return any((file, line) not in ran for file, first in called.own for line in _calls(file).get(first, ()))


@cache
def _calls(file: str) -> dict[int, tuple[int, ...]]:
    """For the first line of each function of a file the lines in it that may call a scheduler."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", ())
            first = min([node.lineno, *(d.lineno for d in decorators)])
            calls = (c.lineno for c in ast.walk(node) if isinstance(c, ast.Call) and _may_be_one(c.func))
            found[first] = (*found.get(first, ()), *calls)
    return found


def _may_be_one(function: ast.expr) -> bool:
    """Whether a call may be that of a scheduler, by its name."""
    if isinstance(function, ast.Attribute) and function.attr == "step":
        return not any(word in ast.unparse(function.value).lower() for word in STEPPED)
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return any(word in name.lower() for word in ("sched", "adjust", "epoch_end", "lr_step", "step_lr"))
