"""What drives which rate: the calls of schedulers in the watched run, the optimizers that they move, and what they are
given."""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.learning.schedule.causes import FALLS, PLAIN, RISES, TURNED, found
from pytest_trainloop.core.errors import BrokenRun, CannotDecide
from pytest_trainloop.core.places import syntax_of
from pytest_trainloop.core.wording import module_of, some
from pytest_trainloop.instruments.records.learning_rates import called, lrs
from pytest_trainloop.instruments.tracing.made_at import MadeAt
from pytest_trainloop.recording.events import Backward, SchedulerStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.learning.schedule.called_functions import CalledFunctions
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.records.learning_rates import GroupLRs
    from pytest_trainloop.recording.events import Place, Step
    from pytest_trainloop.recording.record import Optimizer, Record, Scheduler
    from pytest_trainloop.runs.evidence import Evidence

FEWEST = 3
"""Steps, or calls, that make a rule of what is seen."""


def calls_of(record: Record, scheduler: Scheduler) -> list[SchedulerStep]:
    """The calls of a scheduler that came to their end, in order."""
    return [c for c in record.of(SchedulerStep) if c.number == scheduler.number and c.until]


def steps_of(record: Record, optimizer: int | None) -> list[Step]:
    return [s for s in record.innermost_steps() if s.optimizer == optimizer]


def groups_of(record: Record, optimizer: int | None) -> list[GroupLRs]:
    return [r for r in lrs(record) if r.optimizer == optimizer]


def numbers(groups: Sequence[GroupLRs]) -> str:
    """The rates of groups in a sentence, each once: "0.1, 0.01"."""
    return some(list(dict.fromkeys(f"{value:g}" for group in groups for value in group.known)))


def line_of(scheduler: Scheduler) -> str:
    return str(scheduler.place or "")


def about(
    scheduler: Scheduler, cause: str, at: object, culprits: tuple[str, ...] = (), variant: str = "", /, **facts: Any
) -> Finding:
    """A finding on a scheduler: on the call of its ``step()``, where no other culprit is given."""
    facts = {"kind": scheduler.kind, **facts}
    return found(cause, at, culprits or (f"{scheduler.kind}.step()",), variant, **facts)


def drives_another(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers that move the rates of an optimizer which another one has replaced."""
    record = evidence.run()
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
            facts: dict[str, Any] = {
                "left": left.steps,
                "other": other.kind,
                "lr": numbers(groups),
                "change": (evidence.shared(MadeAt.of).optimizer(other.index) if left.steps else "")
                or line_of(scheduler),
            }
            facts |= {"calls": len(moved), "first": moved[0].before[0], "last": moved[-1].after[0]}
            facts |= {"steps": other.steps, "held": some(record.names(shared))}
            yield about(scheduler, "drives_another", moved[0], **facts)
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
        facts: dict[str, Any] = {"repair": f"build the second {one.kind} on {whose(left)}", "without": whose(left)}
        facts |= {"driven": whose(record.optimizers[one.optimizer or 0]), "equal": equal, "steps": left.steps}
        facts |= {"level": "fault" if equal else "advice", "lr": numbers(groups_of(record, left.index))}
        facts |= {"one": called(one), "other": called(other), "one_calls": one.calls, "other_calls": other.calls}
        yield about(one, "two_on_one", second[0], change=line_of(other), **facts)
        return


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """Schedulers on an optimizer that steps, and that nothing calls; and those that are called in their place.

    A fault where no line of ``fit`` that did not run may be the call. Nothing is said where ``fit`` raised before it.
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
        why = "nothing holds it any more while the steps are made" if gone else _why_not(evidence, scheduler)
        if not why and (scheduler.plateau or _still_to_come(evidence, scheduler)):
            continue
        certain = gone or (bool(why) and not evidence.shared(WholeFit.of).may_call)
        instead = next((f.where for f in twice if f.culprits == (f"{scheduler.kind}.step()",)), "")
        said.add(instead or record.step_line())
        change = instead or (record.step_line() if certain and scheduler.gone is None else line_of(scheduler))
        repair = "call the one that is never called on this line: it calls the other a second time"
        facts: dict[str, Any] = {"level": "fault" if certain else "advice", "kinds": ("missing call",)}
        facts |= {"why": why or "fit may be one epoch of a loop that calls it", "change": change}
        facts |= {"steps": optimizer.steps, "optimizer": optimizer.kind}
        facts |= {"lr": groups[0].known[0] if groups and groups[0].known else 0.0}
        facts |= {"repair": repair if instead else _cadence(scheduler)}
        at, variant = instead or record.step_line(), "" if certain else "may come"
        yield about(scheduler, "never_called", at, (), variant, **facts)
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
            facts: dict[str, Any] = {"steps": len(steps), "calls": len(calls), "first": first, "second": second}
            yield about(scheduler, "called_twice", both[1], called=called(scheduler), **facts)


def _cadence(scheduler: Scheduler) -> str:
    """Where the call belongs: what the settings count, nobody but the project knows."""
    names = ("milestones", "step_size", "T_max", "total_steps", "total_iters", "T_0")
    counted = next((name for name in names if name in scheduler.settings), None)
    if counted is None:
        return ""
    text = scheduler.settings[counted]
    if counted == "milestones" and "{" in text:
        text = "[" + ", ".join(re.findall(r"(\d+):", text)) + "]"
    return (
        f"scheduler.step(): its {counted}={text} counts calls: once per epoch if these are epochs, once after each "
        "optimizer.step() if these are steps"
    )


def _why_not(evidence: Evidence, scheduler: Scheduler) -> str:
    """Why nobody will call it later; empty where somebody may."""
    same_kind = [s for s in evidence.run().schedulers if s.calls and s.kind == scheduler.kind and not s.inner]
    if same_kind:
        return f"fit calls the {scheduler.kind} of another optimizer, {same_kind[0].calls} times"
    whole = evidence.shared(WholeFit.of)
    if whole.record is None or any(s.calls for s in whole.schedulers):
        return ""
    if scheduler.at:
        return "fit builds it, and came to its end"
    passes = len(whole.record.passes)
    return f"fit makes {passes} epochs by itself, and came to its end" if passes > 1 else ""


def _still_to_come(evidence: Evidence, scheduler: Scheduler) -> bool:
    """Whether a longer run calls it, or may: one that was watched once and ended from outside shows no epoch's end."""
    if not evidence.repeatable:
        return evidence.run().cut_short
    built = scheduler.kind, scheduler.place
    return any(s.calls for s in evidence.shared(WholeFit.of).schedulers if (s.kind, s.place) == built)


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
        from pytest_trainloop.checks.learning.schedule.called_functions import CalledFunctions

        whole, functions = cls(), CalledFunctions()
        with contextlib.suppress(CannotDecide, BrokenRun):
            if evidence.repeatable:
                to_its_end: dict[str, Any] = {"count": 2, "enough": lambda record: False, "read_ahead": None}
                record = evidence.rerun(**to_its_end, contexts=functions.contexts)
                whole.record = record if record.ended and not record.cut_short and record.steps > 0 else None
                whole.schedulers = record.schedulers
                whole.may_call = _may_call(record, functions)
        return whole


def _may_call(record: Record, functions: CalledFunctions) -> bool:
    """It may be behind a condition that holds later: every tenth epoch, after a warm-up."""
    if not functions.own or any("sched" in name.lower() for name in functions.libraries):
        return True
    ran = {at for event in record.events for at in event.site}
    return any((file, line) not in ran for file, first in functions.own for line in _calls_in(file).get(first, ()))


@cache
def _calls_in(file: str) -> dict[int, tuple[int, ...]]:
    """For the first line of each function of a file the lines in it that may call a scheduler, by the name."""

    def may_be_one(function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and function.attr == "step":
            others = ("optim", "scaler", "ema", "env", "prof", "bar")
            return not any(word in ast.unparse(function.value).lower() for word in others)
        return any(word in _name(function).lower() for word in ("sched", "adjust", "epoch_end", "lr_step", "step_lr"))

    lines: dict[int, tuple[int, ...]] = {}
    for node in ast.walk(syntax_of(file)):
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


def called_each_pass_too(evidence: Evidence) -> Iterator[Finding]:
    """One line calls the scheduler after each step, another at the end of each pass, neither with a position."""

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
            facts: dict[str, Any] = {"steps": len(each), "calls": len(last), "called": called(scheduler)}
            facts |= {"first": f"{often.file}:{often.line}", "second": f"{seldom.file}:{seldom.line}"}
            yield about(scheduler, "called_twice", often, (), "each pass", **facts)
            return


def rebuilt(evidence: Evidence) -> Iterator[Finding]:
    """Optimizers and schedulers that are built again for every step, or every pass, and so begin again."""
    record = evidence.run()
    # without moments one step of each of many is no other training than many steps of one
    plain = ("SGD", "ASGD", "LBFGS", "Rprop")
    single = [o for o in record.optimizers if o.steps == 1 and not o.declared and o.from_torch]
    momenta = {o.index: {s.get("momentum", "0") for s in o.settings} - {"0", "0.0"} for o in single}
    single = [o for o in single if o.kind not in plain or momenta[o.index]]
    for _, same_kind in itertools.groupby(single, key=lambda o: (o.kind, o.parameters, o.settings)):
        row = list(same_kind)
        held, stepped = set(row[0].parameters), sum(bool(o.steps) for o in record.optimizers)
        # an inner loop sets the weights itself, and begins again on purpose (odd: inner_optimizer_of_each_task)
        if FEWEST < len(row) == stepped and not record.moved_outside_steps() & held:
            facts: dict[str, Any] = {"kind": row[0].kind, "built": len(row), "held": some(record.names(held))}
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
            line, facts = line_of(built[0]), {"steps": len(groups[0].values), "lr": groups[0].known[-1]}
            yield about(built[0], "scheduler_rebuilt", line, change=line, built=len(built), **facts)
    if not evidence.repeatable or not any(s.at and s.place and loop_around(s.place) for s in record.schedulers):
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
            line, facts = line_of(built[0]), {"built": made, "key": key, "size": calls * made, "each": calls}
            yield about(built[0], "scheduler_rebuilt", line, (), "each pass", change=line, **facts)
            return


def loop_around(place: Place) -> str:
    """What the innermost loop around a line goes over, or asks; empty where the line is in none."""
    nodes = ast.walk(syntax_of(place.file))
    loops = [n for n in nodes if isinstance(n, ast.For | ast.While) and n.lineno < place.line <= (n.end_lineno or 0)]
    innermost = max(loops, key=lambda n: n.lineno, default=None)
    if innermost is None:
        return ""
    return ast.unparse(innermost.iter if isinstance(innermost, ast.For) else innermost.test)


def given(record: Record) -> Iterator[Finding]:
    """Schedulers whose settings, or whose argument, contradict what they are for."""
    calls = {s.number: [c for c in calls_of(record, s) if not math.isnan(c.value)] for s in record.schedulers}
    losses = {s: all(_near(c.value, *_last_losses(record, c)) for c in made) for s, made in calls.items()}
    mode = [f for s in record.schedulers for f in _mode_of_the_loss(record, s, calls[s.number], losses[s.number])]
    yield from mode or [f for s in record.schedulers for f in _mode_by_name(s, calls[s.number])]
    for scheduler in record.schedulers:
        made, first = calls[scheduler.number], next(iter(calls_of(record, scheduler)), "")
        facts: dict[str, Any] = {"change": line_of(scheduler), "kinds": ("attribute",)}
        if scheduler.shares and scheduler.calls:
            name, change = scheduler.shares[0], scheduler.function or line_of(scheduler)
            facts |= {
                "groups": len(groups_of(record, scheduler.optimizer)),
                "repair": f"lambda step, {name}={name}: ...",
            }
            yield about(
                scheduler, "lambdas_share_a_variable", line_of(scheduler), (name,), **{**facts, "change": change}
            )
        milestones = re.findall(r"([\d.e+-]+): ", scheduler.settings.get("milestones", ""))
        between = [text for text in milestones if float(text) % 1]
        if scheduler.kind == "MultiStepLR" and scheduler.from_torch and scheduler.calls and between:
            facts |= {"milestones": some(between), "all": ", ".join(milestones), "count": len(between)}
            yield about(scheduler, "milestones_not_whole", first, ("milestones",), **facts)
        size, gamma = (_numbers(scheduler.settings.get(name, "")) for name in ("step_size", "gamma"))
        # by epochs that are given, in fractions, it computes another way
        if (
            scheduler.kind == "StepLR"
            and scheduler.from_torch
            and scheduler.calls
            and size
            and size[0] % 1
            and not made
        ):
            swapped = bool(gamma) and gamma[0] >= 1 and not gamma[0] % 1
            facts |= {"size": size[0], "gamma": gamma[0] if gamma else math.nan}
            if swapped:
                facts["repair"] = f"step_size={gamma[0]:g}, gamma={size[0]:g}: the two are swapped"
            yield about(scheduler, "milestones_not_whole", first, ("step_size",), "step size", **facts)
        yield from _bound(record, scheduler, first, facts)
        roots = [_last_losses(record, c) for c in made]
        still = len({c.value for c in made}) == 1 and len({tuple(r) for r in roots}) == len(made) >= FEWEST
        if scheduler.plateau and still and _near(made[0].value, *roots[0]):
            facts = {"value": made[0].value, "calls": len(made), "first": roots[0][-1], "last": roots[-1][-1]}
            yield about(scheduler, "plateau_metric_stands_still", made[1], **facts)
        if scheduler.plateau or len(made) < 2 or any(c.value == int(c.value) for c in made if math.isfinite(c.value)):
            continue
        # fractions of an epoch, as documented (odd: restarts_in_fractions_of_an_epoch)
        falls = any(b.value < a.value for a, b in itertools.pairwise(made))
        if losses[scheduler.number] or (falls and scheduler.kind != "CosineAnnealingWarmRestarts"):
            facts = {"values": _first(made), "losses": losses[scheduler.number], "calls": len(made)}
            yield about(scheduler, "metric_as_epoch", made[0], **facts)


def _bound(record: Record, scheduler: Scheduler, first: object, facts: dict[str, Any]) -> Iterator[Finding]:
    cosine = scheduler.kind.startswith("CosineAnnealing")
    least = _numbers(scheduler.settings.get("eta_min" if cosine else "min_lrs" if scheduler.plateau else "", ""))
    own = [g.known[0] for g in groups_of(record, scheduler.optimizer) if g.known]
    base = _numbers(scheduler.settings.get("base_lrs", "")) or own
    if scheduler.optimizer is None or not scheduler.calls or not least or not any(base):
        return
    if all(low > lr for low, lr in zip(least * len(base), base, strict=False)):
        facts = {**facts, "least": least[0], "most": max(base), "base": base[0]}
        names, variant = (("eta_min",), "") if cosine else (("min_lr",), "min_lr")
        yield about(scheduler, "bound_above_lr", first, names, variant, **facts)


def _mode_of_the_loss(
    record: Record, scheduler: Scheduler, made: Sequence[SchedulerStep], losses: bool
) -> Iterator[Finding]:
    """``mode="max"`` with the loss that is minimized as the metric."""
    highest = scheduler.plateau and scheduler.settings.get("mode") == "'max'" and len(made) > 1 and losses
    # (odd: plateau_of_a_gain_that_is_maximized)
    if highest and not any(o.maximizes for o in record.optimizers):
        facts: dict[str, Any] = {
            "values": _first(made),
            "calls": len(made),
            "kinds": ("attribute",),
            "change": line_of(scheduler),
        }
        yield about(scheduler, "plateau_mode", made[0], ("mode",), **facts)


def _mode_by_name(scheduler: Scheduler, made: Sequence[SchedulerStep]) -> Iterator[Finding]:
    """A mode that the metric's own name denies."""
    mode = scheduler.settings.get("mode", "").strip("'")
    # the sign of the metric was turned (odd: plateau_by_negative_accuracy)
    if not scheduler.plateau or any(c.value < 0 for c in made) or not any(c.value for c in made):
        return
    name = argument_of(made[0].place.code)
    better = direction(name)
    if better and better != mode and {argument_of(c.place.code) for c in made} == {name}:
        facts: dict[str, Any] = {
            "repair": f'ReduceLROnPlateau(optimizer, mode="{better}")',
            "change": line_of(scheduler),
        }
        facts |= {"mode": mode, "name": name, "rises": better == "max", "calls": len(made), "values": _first(made)}
        yield about(scheduler, "plateau_mode", made[0], ("mode",), "by name", kinds=("attribute",), **facts)


def _first(calls: Sequence[SchedulerStep]) -> str:
    shown = ", ".join(f"{c.value:.4g}" for c in calls[:4])
    return f"{shown}, ..." if len(calls) > 4 else shown


def _numbers(text: str) -> list[float]:
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return []
    return [float(v) for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]


def _last_losses(record: Record, call: SchedulerStep) -> list[float]:
    last = next((b for b in reversed(record.of(Backward)) if b.at < call.at), None)
    return [] if last is None else [root.value for root in last.roots]


def _near(one: float, *others: float) -> bool:
    """Whether a number is one of these, to 1e-6."""
    return any(math.isclose(one, other, rel_tol=1e-6) for other in others if math.isfinite(other))


def argument_of(code: str) -> str:
    """The name of what ``scheduler.step(...)`` is given, as its last part; empty where it is computed there."""
    calls = [n for n in ast.walk(_parsed(code.strip())) if isinstance(n, ast.Call) and _name(n.func) == "step"]
    arguments = [*calls[0].args, *(k.value for k in calls[0].keywords)] if calls else []
    return _metric(arguments[0]) if len(arguments) == 1 else ""


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
