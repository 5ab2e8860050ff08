"""What drives which rate: the calls of schedulers in the watched run, the optimizers that they move, and what they are
given."""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import math
import re
from functools import cache
from typing import TYPE_CHECKING

from pytest_trainloop.checks.learning.schedule.causes import FALLS, PLAIN, RISES, TURNED, found
from pytest_trainloop.errors import BrokenRun, CannotDecide
from pytest_trainloop.recording.events import Backward, SchedulerStep
from pytest_trainloop.records.learning_rates import called, rates
from pytest_trainloop.wording import module_of, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.finding import Finding
    from pytest_trainloop.recording.events import Place, Step
    from pytest_trainloop.recording.record import Optimizer, Record, Scheduler
    from pytest_trainloop.records.learning_rates import GroupRates
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.called_functions import CalledFunctions

FEWEST = 3
"""Steps, or calls, that make a rule of what is seen."""

STEPPED = ("optim", "scaler", "ema", "env", "prof", "bar")
"""What stands before ``.step(`` that is no scheduler."""

COUNTED = ("milestones", "step_size", "T_max", "total_steps", "total_iters", "T_0")
"""Settings of torch's schedulers that count calls."""


def calls_of(record: Record, scheduler: Scheduler) -> list[SchedulerStep]:
    """The calls of a scheduler that came to their end, in order."""
    return [c for c in record.of(SchedulerStep) if c.number == scheduler.number and c.until]


def steps_of(record: Record, optimizer: int | None) -> list[Step]:
    return [s for s in record.innermost_steps() if s.optimizer == optimizer]


def groups_of(record: Record, optimizer: int | None) -> list[GroupRates]:
    return [r for r in rates(record) if r.optimizer == optimizer]


def numbers(groups: Sequence[GroupRates]) -> str:
    """The rates of groups in a sentence, each once: "0.1, 0.01"."""
    return some(list(dict.fromkeys(f"{value:g}" for group in groups for value in group.known)))


def line_of(scheduler: Scheduler) -> str:
    return str(scheduler.place or "")


def drives_another(record: Record) -> Iterator[Finding]:
    """Schedulers that move the rates of an optimizer which another one has replaced."""
    for scheduler in record.schedulers:
        calls = [c for c in calls_of(record, scheduler) if c.before != c.after]
        if scheduler.optimizer is None or not calls:
            continue
        left = record.optimizers[scheduler.optimizer]
        for other in record.optimizers:
            shared, groups = set(left.parameters) & set(other.parameters), groups_of(record, other.index)
            # a wrapper's optimizer has the same dicts
            if other is left or not shared or not groups or set(left.dicts) & set(other.dicts):
                continue
            since = groups[0].at[0]
            moved = [c for c in calls if c.at > since]
            # what a rate calculator computes is written to the groups that step (odd: optimizer_as_a_rate_calculator)
            held = all(g.constant for g in groups) and len(groups[0].values) >= FEWEST
            if not moved or not held or any(s.at > since for s in steps_of(record, left.index)):
                continue
            yield found(
                "drives_another",
                moved[0],
                (f"{scheduler.kind}.step()",),
                change=line_of(scheduler),
                **{"kind": scheduler.kind, "left": left.steps, "other": other.kind, "rate": numbers(groups)},
                **{"calls": len(moved), "first": moved[0].before[0], "last": moved[-1].after[0]},
                **{"steps": other.steps, "held": some(record.names(shared))},
            )
            break


def two_on_one(record: Record) -> Iterator[Finding]:
    """Two schedulers of one kind on one optimizer, while an optimizer that steps has none."""

    def whose(optimizer: Optimizer) -> str:
        names = record.names(set(optimizer.parameters))
        return f"the {optimizer.kind} of {module_of(names) or some(names)}"

    def settings(scheduler: Scheduler) -> dict[str, str]:
        """All but the rates that the optimizer had, which an earlier scheduler may have moved."""
        return {name: text for name, text in scheduler.settings.items() if name != "base_lrs"}

    driven = {s.optimizer for s in record.schedulers if not s.inner}
    without = [o for o in record.optimizers if o.steps and o.index not in driven]
    without = [o for o in without if (own := groups_of(record, o.index)) and not any(g.moves for g in own)]
    outer = [s for s in record.schedulers if s.calls and not s.inner and s.optimizer is not None]
    for one, other in itertools.combinations(outer, 2):
        if one.optimizer != other.optimizer or one.kind != other.kind or not without:
            continue
        first, second = calls_of(record, one), calls_of(record, other)
        # stages that follow each other may have one schedule each: calls of the two alternate
        if not first or not second or first[0].at > second[-1].at or second[0].at > first[-1].at:
            continue
        equal = settings(one) == settings(other)
        # a warm-up times a decay (odd: two_linear_schedules_beside_a_constant_rate)
        if not equal and one.kind in ("LinearLR", "ConstantLR"):
            continue
        left = without[0]
        yield found(
            "two_on_one",
            second[0],
            (f"{one.kind}.step()",),
            level="fault" if equal else "advice",
            change=line_of(other),
            repair=f"build the second {one.kind} on {whose(left)}",
            **{"kind": one.kind, "driven": whose(record.optimizers[one.optimizer or 0]), "without": whose(left)},
            **{"equal": equal, "steps": left.steps, "rate": numbers(groups_of(record, left.index))},
            **{"one": called(one), "other": called(other), "one_calls": one.calls, "other_calls": other.calls},
        )
        return


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers on an optimizer that steps, and that nothing calls; and those that are called in their place.

    A fault where nobody can have called it later: ``fit`` itself built it and came to its end, ``fit`` made several
    passes, or it calls the scheduler of the same kind on another optimizer; and where no line of ``fit`` that did not
    run may be the call. Nothing is said where ``fit`` raised: the call may come after that.
    """
    record = evidence.run()
    twice, said = list(_called_twice(record)), set()
    for scheduler in record.schedulers if record.raised is None else ():
        if scheduler.calls or scheduler.inner or scheduler.optimizer is None:
            continue
        optimizer, groups = record.optimizers[scheduler.optimizer], groups_of(record, scheduler.optimizer)
        another = any(s.calls and s.optimizer == scheduler.optimizer for s in record.schedulers)
        # a second scheduler may wait for its stage (odd: averaging_schedule_that_waits)
        if optimizer.steps < 2 or any(g.moves for g in groups) or another:
            continue
        gone = scheduler.gone is not None and scheduler.gone < steps_of(record, scheduler.optimizer)[-1].at
        why = (
            "nothing holds it any more while the steps are made" if gone else _nobody_will_call_it(evidence, scheduler)
        )
        if not why and (scheduler.plateau or _still_to_come(evidence, scheduler)):
            continue
        certain = gone or (bool(why) and not evidence.shared(WholeFit.of).may_call)
        instead = next((f.where for f in twice if f.culprits == (f"{scheduler.kind}.step()",)), "")
        said.add(instead or record.step_line())
        yield found(
            "never_called",
            instead or record.step_line(),
            (f"{scheduler.kind}.step()",),
            "" if certain else "may come",
            level="fault" if certain else "advice",
            kinds=("missing call",),
            shown_by=why or "fit may be one epoch of a loop that calls it",
            change=instead or (record.step_line() if certain and scheduler.gone is None else line_of(scheduler)),
            repair="call the one that is never called on this line: it calls the other a second time"
            if instead
            else _cadence(scheduler),
            **{"kind": scheduler.kind, "steps": optimizer.steps, "optimizer": optimizer.kind, "why": why},
            rate=groups[0].known[0] if groups and groups[0].known else 0.0,
        )
    yield from (f for f in twice if f.where not in said)


def _called_twice(record: Record) -> Iterator[Finding]:
    """One scheduler that two lines call for each optimizer step."""
    for scheduler in record.schedulers:
        calls, steps = calls_of(record, scheduler), [s.at for s in steps_of(record, scheduler.optimizer)]
        windows = [[c for c in calls if a < c.at < b] for a, b in itertools.pairwise(steps)]
        lines = {tuple(dict.fromkeys(c.place for c in window)) for window in windows}
        if scheduler.plateau or len(windows) < FEWEST or any(len(window) != 2 for window in windows):
            continue
        if len(lines) == 1 and len(both := next(iter(lines))) == 2:
            first, second = (f"{place.file}:{place.line}" for place in both)
            made = scheduler.place
            yield found(
                "called_twice",
                both[1],
                (f"{scheduler.kind}.step()",),
                **{"kind": scheduler.kind, "steps": len(steps), "calls": len(calls), "first": first, "second": second},
                built="" if made is None else f"{made.file}:{made.line}",
            )


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


def _nobody_will_call_it(evidence: Evidence, scheduler: Scheduler) -> str:
    """Why nobody will call it later; empty where somebody may."""
    alike = [s for s in evidence.run().schedulers if s.calls and s.kind == scheduler.kind and not s.inner]
    if alike:
        return f"fit calls the {scheduler.kind} of another optimizer, {alike[0].calls} times"
    whole = evidence.shared(WholeFit.of)
    if whole.record is None or any(s.calls for s in whole.schedulers):
        return ""
    if scheduler.at:
        return "fit builds it, and came to its end"
    passes = len(whole.record.passes)
    return f"fit makes {passes} passes over the batches by itself, and came to its end" if passes > 1 else ""


def _still_to_come(evidence: Evidence, scheduler: Scheduler) -> bool:
    """Whether a longer run calls it, or may: one that was watched once and ended from outside shows no epoch's end."""
    if not evidence.repeatable:
        return evidence.run().cut_short
    same = (
        s for s in evidence.shared(WholeFit.of).schedulers if (s.kind, s.place) == (scheduler.kind, scheduler.place)
    )
    return any(s.calls for s in same)


class WholeFit:
    """A further run over two batches a pass, which is made to its end, and the functions that it called."""

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []
        self.record: Record | None = None
        """What it recorded, where ``fit`` came back by itself, after some steps."""
        self.may_call = True
        """Whether a function that ran holds a call of a scheduler, or of what is named after one, that did not."""

    @classmethod
    def of(cls, evidence: Evidence) -> WholeFit:
        from pytest_trainloop.tracing.called_functions import CalledFunctions

        whole, functions = cls(), CalledFunctions()
        with contextlib.suppress(CannotDecide, BrokenRun):
            if evidence.repeatable:
                record = evidence.rerun(
                    count=2, enough=lambda record: False, read_ahead=None, contexts=functions.contexts
                )
                whole.record = record if record.ended and not record.cut_short and record.steps > 0 else None
                whole.schedulers = record.schedulers
                whole.may_call = _may_call(record, functions)
        return whole


def _may_call(record: Record, functions: CalledFunctions) -> bool:
    """It may stand behind a condition that holds later: every tenth epoch, after a warm-up."""
    if not functions.own or any("sched" in name.lower() for name in functions.libraries):
        return True
    ran = {at for event in record.events for at in event.site}
    return any((file, line) not in ran for file, first in functions.own for line in _calls_in(file).get(first, ()))


@cache
def _calls_in(file: str) -> dict[int, tuple[int, ...]]:
    """For the first line of each function of a file the lines in it that may call a scheduler, by the name."""

    def may_be_one(function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and function.attr == "step":
            return not any(word in ast.unparse(function.value).lower() for word in STEPPED)
        return any(word in _name(function).lower() for word in ("sched", "adjust", "epoch_end", "lr_step", "step_lr"))

    lines: dict[int, tuple[int, ...]] = {}
    for node in ast.walk(_parsed("".join(linecache.getlines(file)))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            calls = (c.lineno for c in ast.walk(node) if isinstance(c, ast.Call) and may_be_one(c.func))
            lines[first] = (*lines.get(first, ()), *calls)
    return lines


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def _name(value: ast.expr) -> str:
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def counted_in_two_units(evidence: Evidence) -> Iterator[Finding]:
    """One line calls the scheduler after each step, and another one at the end of each pass, in all passes of a whole
    run. A call that is given its epoch sets the position, and adds nothing to it."""

    def lines_of(record: Record, scheduler: Scheduler) -> dict[Place, list[int]]:
        calls = calls_of(record, scheduler)
        if scheduler.inner or scheduler.optimizer is None or any(c.metric for c in calls):
            return {}
        return {place: [c.at for c in calls if c.place == place] for place in dict.fromkeys(c.place for c in calls)}

    if not any(len(lines_of(evidence.run(), s)) == 2 for s in evidence.run().schedulers):
        return
    record = evidence.shared(WholeFit.of).record
    if record is None or len(record.passes) < 2:
        return
    backwards, ends = (
        [b for b in record.of(Backward) if b.kind == "backward"],
        list(itertools.accumulate(record.passes)),
    )
    for scheduler in record.schedulers:
        lines = lines_of(record, scheduler)
        if len(lines) != 2:
            continue
        often, seldom = sorted(lines, key=lambda line: -len(lines[line]))
        each, last = lines[often], lines[seldom]
        steps = [s.at for s in steps_of(record, scheduler.optimizer)]
        items = [max((b.item for b in backwards if b.at < at), default=0) for at in last]
        if items != ends or len(each) != len(steps) or len(steps) < 2 * len(ends):
            continue
        alternate = all(a < b for a, b in itertools.pairwise(at for two in zip(steps, each, strict=True) for at in two))
        follows = all(max(a for a in each if a < at) > max(s for s in steps if s < at) for at in last)
        if alternate and follows:
            yield found(
                "counted_in_two_units",
                often,
                (f"{scheduler.kind}.step()",),
                **{"kind": scheduler.kind, "steps": len(each), "passes": len(last), "called": called(scheduler)},
                **{"first": f"{often.file}:{often.line}", "second": f"{seldom.file}:{seldom.line}"},
            )
            return


def rebuilt(evidence: Evidence) -> Iterator[Finding]:
    """Optimizers and schedulers that are built again for every step, or every pass, and so begin again."""
    record = evidence.run()
    single = [o for o in record.optimizers if o.steps == 1 and not o.declared and _has_moments(o)]
    for _, alike in itertools.groupby(single, key=lambda o: (o.kind, o.parameters, o.settings)):
        row = list(alike)
        held = set(row[0].parameters)
        # an inner loop sets the weights itself, and begins again on purpose (odd: inner_optimizer_of_each_task)
        if (
            FEWEST < len(row) == sum(bool(o.steps) for o in record.optimizers)
            and not record.moved_outside_steps() & held
        ):
            facts = {"kind": row[0].kind, "built": len(row), "held": some(record.names(held))}
            yield found("optimizer_rebuilt", steps_of(record, row[0].index)[0], (row[0].kind,), **facts)
    for optimizer in record.optimizers:
        built = [s for s in record.schedulers if s.optimizer == optimizer.index and s.at and not s.inner]
        built = [s for s in built if s.place is not None and s.place == built[-1].place]
        groups = groups_of(record, optimizer.index)
        if len(built) <= FEWEST or not groups or any(s.calls > 1 for s in built):
            continue
        inside = sum(any(a.at < at < b.at for at in groups[0].at) for a, b in itertools.pairwise(built))
        # a decay that goes on from the rate that it finds (odd: decay_built_for_each_step)
        if inside >= FEWEST and len({c.after for s in built for c in calls_of(record, s)}) == 1:
            yield _rebuilt(built[0], "", built=len(built), steps=len(groups[0].values), rate=groups[0].known[-1])
    if not evidence.repeatable or not any(s.at and s.place and _in_a_loop(s.place) for s in record.schedulers):
        return
    whole = evidence.shared(WholeFit.of)
    built = [s for s in whole.schedulers if s.at and not s.inner]
    built = [s for s in built if (s.place, s.settings) == (built[-1].place, built[-1].settings)]
    made, each = len(built), {s.calls for s in built}
    if whole.record is None or len(each) != 1 or not (made >= FEWEST or made == len(whole.record.passes) > 1):
        return
    # warm restarts, and stages with a schedule each, are sized for what they are called (odd: a_cycle_for_each_pass)
    calls = each.pop()
    for key in ("total_steps", "T_max", "total_iters"):
        if calls and built[0].settings.get(key) == repr(calls * made):
            yield _rebuilt(built[0], "each pass", built=made, key=key, size=calls * made, each=calls)
            return


def _has_moments(optimizer: Optimizer) -> bool:
    """Whether one step of each of many is another training than many steps of one."""
    momentum = any(s.get("momentum", "0") not in ("0", "0.0") for s in optimizer.settings)
    return optimizer.from_torch and (optimizer.kind not in ("SGD", "ASGD", "LBFGS", "Rprop") or momentum)


def _rebuilt(one: Scheduler, variant: str, **facts: object) -> Finding:
    line = line_of(one)
    return found("scheduler_rebuilt", line, (f"{one.kind}.step()",), variant, change=line, kind=one.kind, **facts)


def _in_a_loop(place: Place) -> bool:
    """Whether a loop stands around a line, in its function."""
    loops = (
        n for n in ast.walk(_parsed("".join(linecache.getlines(place.file)))) if isinstance(n, (ast.For, ast.While))
    )
    return any(n.lineno < place.line <= (n.end_lineno or 0) for n in loops)


def given(record: Record) -> Iterator[Finding]:
    """Schedulers whose settings, or whose argument, contradict what they are for."""
    for scheduler in record.schedulers:
        groups = groups_of(record, scheduler.optimizer)
        if scheduler.shares and scheduler.calls:
            name, change = scheduler.shares[0], scheduler.function or line_of(scheduler)
            yield found(
                "lambdas_share_a_variable",
                line_of(scheduler),
                (name,),
                **{"kinds": ("attribute",), "change": change, "repair": f"lambda step, {name}={name}: ..."},
                **{"groups": len(groups), "kind": scheduler.kind},
            )
    calls = {s.number: [c for c in calls_of(record, s) if not math.isnan(c.value)] for s in record.schedulers}
    losses = {number: all(_is_last_loss(record, c) for c in made) for number, made in calls.items()}
    plateaus = [s for s in record.schedulers if s.plateau and calls[s.number]]
    yield from _mode(record, plateaus, calls, losses)
    for scheduler in plateaus:
        made = calls[scheduler.number]
        roots = [_last_losses(record, c) for c in made]
        still = len({c.value for c in made}) == 1 and len({tuple(r) for r in roots}) == len(made) >= FEWEST
        if still and any(_near(made[0].value, v) for v in roots[0]):
            facts = {"value": made[0].value, "calls": len(made), "first": roots[0][-1], "last": roots[-1][-1]}
            yield found("plateau_metric_stands_still", made[1], ("ReduceLROnPlateau.step()",), **facts)
    for scheduler in record.schedulers:
        made = calls[scheduler.number]
        if scheduler.plateau or len(made) < 2 or any(c.value == int(c.value) for c in made if math.isfinite(c.value)):
            continue
        # fractions of an epoch, as documented (odd: restarts_in_fractions_of_an_epoch)
        falls = any(b.value < a.value for a, b in itertools.pairwise(made))
        if losses[scheduler.number] or (falls and scheduler.kind != "CosineAnnealingWarmRestarts"):
            yield found(
                "metric_as_epoch",
                made[0],
                (f"{scheduler.kind}.step()",),
                **{"kind": scheduler.kind, "values": _first(made), "losses": losses[scheduler.number]},
                calls=len(made),
            )
    for scheduler in record.schedulers:
        milestones = re.findall(r"([\d.e+-]+): ", scheduler.settings.get("milestones", ""))
        between = [text for text in milestones if float(text) % 1]
        if scheduler.kind == "MultiStepLR" and scheduler.from_torch and scheduler.calls and between:
            yield found(
                "milestones_not_whole",
                next(iter(calls_of(record, scheduler)), ""),
                ("milestones",),
                **{"kinds": ("attribute",), "change": line_of(scheduler), "kind": scheduler.kind},
                **{"milestones": some(between), "all": ", ".join(milestones), "count": len(between)},
            )
    for scheduler in record.schedulers:
        cosine = scheduler.kind.startswith("CosineAnnealing")
        least = _numbers(scheduler.settings.get("eta_min" if cosine else "min_lrs" if scheduler.plateau else "", ""))
        own = [g.known[0] for g in groups_of(record, scheduler.optimizer) if g.known]
        base = _numbers(scheduler.settings.get("base_lrs", "")) or own
        if scheduler.optimizer is None or not scheduler.calls or not least or not any(base):
            continue
        if all(low > rate for low, rate in zip(least * len(base), base, strict=False)):
            yield found(
                "bound_above_rate",
                next(iter(calls_of(record, scheduler)), ""),
                ("eta_min" if cosine else "min_lr",),
                "" if cosine else "min_lr",
                **{"kinds": ("attribute",), "change": line_of(scheduler), "kind": scheduler.kind},
                **{"least": least[0], "most": max(base), "base": base[0]},
            )


def _mode(
    record: Record, plateaus: list[Scheduler], calls: dict[int, list[SchedulerStep]], losses: dict[int, bool]
) -> Iterator[Finding]:
    """``mode="max"`` with the loss that is minimized as the metric; else a mode that the metric's own name denies."""
    maximizes, shown = any(o.maximizes for o in record.optimizers), False
    for scheduler in plateaus:
        made, change = calls[scheduler.number], line_of(scheduler)
        # (odd: plateau_of_a_gain_that_is_maximized)
        if scheduler.settings.get("mode") == "'max'" and len(made) > 1 and losses[scheduler.number] and not maximizes:
            facts = {"values": _first(made), "calls": len(made), "kinds": ("attribute",), "change": change}
            yield found("plateau_mode", made[0], ("mode",), **facts)
            shown = True
    for scheduler in () if shown else plateaus:
        made, mode = calls[scheduler.number], scheduler.settings.get("mode", "").strip("'")
        # the sign of the metric was turned (odd: plateau_by_negative_accuracy)
        if any(c.value < 0 for c in made) or not any(c.value for c in made):
            continue
        name = argument_of(made[0].place.code)
        better = direction(name)
        if better and better != mode and {argument_of(c.place.code) for c in made} == {name}:
            yield found(
                "plateau_mode",
                made[0],
                ("mode",),
                "by name",
                **{"kinds": ("attribute",), "change": line_of(scheduler)},
                repair=f'ReduceLROnPlateau(optimizer, mode="{better}")',
                **{"mode": mode, "name": name, "rises": better == "max", "calls": len(made)},
                values=", ".join(f"{c.value:.4g}" for c in made[:4]),
            )


def _first(calls: Sequence[SchedulerStep]) -> str:
    shown = ", ".join(f"{c.value:.4g}" for c in calls[:4])
    return f"{shown}, ..." if len(calls) > 4 else shown


def _numbers(text: str) -> list[float]:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return []
    return [float(v) for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]


def _is_last_loss(record: Record, call: SchedulerStep) -> bool:
    return any(_near(call.value, value) for value in _last_losses(record, call))


def _last_losses(record: Record, call: SchedulerStep) -> list[float]:
    last = next((b for b in reversed(record.of(Backward)) if b.at < call.at), None)
    return [] if last is None else [root.value for root in last.roots]


def _near(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= 1e-6 * max(abs(one), abs(other))


def argument_of(code: str) -> str:
    """The name of what ``scheduler.step(...)`` is given, as its last part; empty where it is computed there."""
    calls = [n for n in ast.walk(_parsed(code.strip())) if isinstance(n, ast.Call) and _name(n.func) == "step"]
    handed = [*calls[0].args, *(k.value for k in calls[0].keywords)] if calls else []
    return _metric(handed[0]) if len(handed) == 1 else ""


def _metric(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        if _name(value.func) in ("float", "mean") and len(value.args) == 1:
            return _metric(value.args[0])
        if isinstance(value.func, ast.Attribute) and value.func.attr in PLAIN and not value.args:
            return _metric(value.func.value)
        return value.func.id if isinstance(value.func, ast.Name) else ""  # accuracy(model, held_out)
    if isinstance(value, ast.Subscript):
        key = value.slice
        return str(key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else _metric(value.value)
    if isinstance(value, ast.Attribute) and value.attr in PLAIN:
        return _metric(value.value)
    return _name(value)


def direction(name: str) -> str:
    """ "max" or "min" where the words of a name say so, empty where they say nothing or both."""
    parts = re.findall(r"[A-Za-z0-9]+", name)
    words = {w.lower() for part in parts for w in (part, *re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*", part))}
    if words & TURNED or bool(words & RISES) == bool(words & FALLS):
        return ""
    return "max" if words & RISES else "min"
