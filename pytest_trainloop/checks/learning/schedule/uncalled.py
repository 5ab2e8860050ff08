"""Schedulers that are built and that ``fit`` never calls."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.driven import line_of
from pytest_trainloop.errors import BrokenRun, CannotDecide
from pytest_trainloop.finding import Finding
from pytest_trainloop.recording.events import SchedulerStep
from pytest_trainloop.records.learning_rates import rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.recording.record import Record, Scheduler
    from pytest_trainloop.runs.evidence import Evidence


def uncalled(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers on an optimizer that steps, and that nothing calls.

    A fault where nobody can have called it later: ``fit`` itself built it and came to its end, ``fit`` made several
    passes, or it calls the scheduler of the same kind on another optimizer; and where no line of ``fit`` that did not
    run may be the call.
    """
    record = evidence.run()
    for scheduler in record.schedulers:
        if scheduler.calls or scheduler.inner or scheduler.optimizer is None:
            continue
        optimizer = record.optimizers[scheduler.optimizer]
        groups = [r for r in rates(record) if r.optimizer == optimizer.index]
        if optimizer.steps < 2 or any(g.moves for g in groups) or _another_drives(record, scheduler):
            continue
        proof = _proof(evidence, scheduler)
        if not proof and (not scheduler.declared or scheduler.plateau):
            continue
        certain = bool(proof) and not _may_be_called(record)
        rate = groups[0].known[0] if groups and groups[0].known else 0.0
        yield Finding(
            cause="never_called",
            level="fault" if certain else "advice",
            summary=(
                f"{scheduler.kind} is built and fit never calls it: all {optimizer.steps} steps are made at {rate:g}"
            ),
            measured=f"0 calls of {scheduler.kind}.step() in {optimizer.steps} steps of {optimizer.kind}",
            shown_by=proof or "fit may be one epoch of a loop that calls it",
            culprits=(f"{scheduler.kind}.step()",),
            kinds=("missing call",),
            where=record.step_line(),
            change=record.step_line() if certain else line_of(scheduler),
        )


def _another_drives(record: Record, scheduler: Scheduler) -> bool:
    """Whether another scheduler of the same optimizer is called: one of them may wait for its stage."""
    return any(s.calls and s.optimizer == scheduler.optimizer for s in record.schedulers)


def _proof(evidence: Evidence, scheduler: Scheduler) -> str:
    """Why nobody will call it later; empty where somebody may."""
    record = evidence.run()
    alike = [s for s in record.schedulers if s.calls and s.kind == scheduler.kind and not s.inner]
    if alike:
        return f"fit calls the {scheduler.kind} of another optimizer, {alike[0].calls} times"
    whole = evidence.shared(whole_run)
    if whole is None or any(s.calls for s in whole.schedulers):
        return ""
    if scheduler.at:
        return "fit builds it, and came to its end"
    if len(whole.passes) > 1:
        return f"fit makes {len(whole.passes)} passes over the batches by itself, and came to its end"
    return ""


def whole_run(evidence: Evidence) -> Record | None:
    """A further run over two batches a pass, which is made to its end; None where it has none of its own."""
    if not evidence.repeatable:
        return None
    try:
        record = evidence.rerun(count=2, enough=lambda record: False, read_ahead=None)
    except (CannotDecide, BrokenRun):
        return None
    return record if record.ended and not record.cut_short and record.steps else None


def _may_be_called(record: Record) -> bool:
    """Whether a function of the loop holds a ``.step(`` that did not run: it may stand behind a condition that holds
    later (every tenth epoch)."""
    ran = {(file, line) for event in record.events for file, line in event.site}
    files = {file for file, _ in ran}
    steps = {(file, line) for event in record.of(SchedulerStep) for file, line in event.site} | ran
    for file in files:
        for first, last, calls in _functions(file):
            runs = any(f == file and first <= line <= last for f, line in ran)
            own = [line for line in calls if _is_innermost(file, line, first)]
            if runs and any((file, line) not in steps for line in own):
                return True
    return False


def _is_innermost(file: str, line: int, first: int) -> bool:
    """Whether the function that begins on line ``first`` is the innermost one around a line."""
    around = [start for start, last, _ in _functions(file) if start <= line <= last]
    return max(around, default=0) == first


@cache
def _functions(file: str) -> list[tuple[int, int, tuple[int, ...]]]:
    """Each function of a file: its first and last line, and the lines that call a ``step`` or what is named after a
    schedule in it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            calls = tuple(c.lineno for c in ast.walk(node) if isinstance(c, ast.Call) and _is_a_step(c.func))
            found.append((node.lineno, node.end_lineno or node.lineno, calls))
    return found


def _is_a_step(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "step" and isinstance(function, ast.Attribute):
        return "optim" not in ast.unparse(function.value).lower()
    return any(word in name.lower() for word in ("sched", "adjust", "epoch_end", "lr_step", "step_lr"))
