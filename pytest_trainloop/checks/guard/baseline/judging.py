"""A trajectory compared with the recorded one, in words."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.guard.baseline.causes import ACCEPT, LINES, found
from pytest_trainloop.checks.guard.baseline.facts import facts
from pytest_trainloop.checks.guard.baseline.first import EPS, ROUNDING, Bounds, Comparison
from pytest_trainloop.checks.guard.baseline.names import Names, begun
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.wording import some, verb
from pytest_trainloop.instruments.baselines.trajectory import distance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.guard.baseline.facts import Fact
    from pytest_trainloop.checks.guard.baseline.first import First
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.instruments.baselines.trajectory import Call, Course, Step, Trajectory
    from pytest_trainloop.runs.evidence import Evidence

AT_HOME = 16.0
"""In place of ``ROUNDING`` on the environment of the baseline, where only the order of the operations may differ; for a
loop that casts to other dtypes than before."""

NOISE = {"float64": 1e-6, "own": 0.1}
"""The relative change of a gradient, for one unit in the last place of the weights, from which it is rounding only: in
float64 ten digits of sixteen are lost, and training follows none of the rest."""

SEEDS = (1, 2)
"""Of the draws that move each weight up or down."""

PLACES = {
    "data": "in the batch",
    "output": "in the output of {}",
    "loss": "in the loss",
    "gradient": "in the gradient of {}",
    "lr": "in the learning rate of {}",
    "update": "in the update of {}",
    "buffer": "in the buffer {}",
}


@dataclass(slots=True)
class Line:
    """The loss and the norm of the gradient of each step of one run."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)


class Reported:
    """The first difference that was reported of one loop, for pictures; empty where training does not differ."""

    def __init__(self, _evidence: Evidence | None = None) -> None:
        self.step = 0
        self.kind = ""
        """The stage of the first difference."""
        self.inside = ""
        """The innermost module around the first output that differs whose own input does not differ."""
        self.old, self.new = Line(), Line()
        self.gap: dict[str, dict[int, float]] = {}
        """By parameter and step how far the gradients differ, relative to their own size; 0 up to rounding and before
        the first step that differs."""

    def note(self, comparison: Comparison, first: First) -> None:
        if self.step:
            return
        self.step, self.kind, self.inside = first.step.number, first.stage, first.inside or ""
        for line, course in ((self.old, comparison.old), (self.new, comparison.new)):
            line.losses = {step.number: sum(step.losses) for step in course.steps if step.losses}
            squares = {s.number: sum(g.squares for g in s.gradients.values()) for s in course.steps if s.gradients}
            line.norms = {number: value**0.5 for number, value in squares.items()}
        self.gap = {
            name: {n: d if d > comparison.bounds.rounding and n >= self.step else 0.0 for n, d in steps.items()}
            for name, steps in comparison.gradients_apart().items()
        }


def compare(old: Trajectory, new: Trajectory, evidence: Evidence | None, reported: Reported) -> Iterator[Finding]:
    """Yield what differs between a recorded trajectory and one of the loop now: faults, advice, and a note on names
    that changed. Without ``evidence`` no further run is made."""
    if old.double is None or new.double is None:
        yield from _Judged(old.own, new.own, new, evidence, reported).findings()
        return
    double = _Judged(old.double, new.double, new, evidence, reported)
    yield from double.findings()
    if double.differs or not _one_environment(old, new):
        return
    before, now = set(old.double.asked), set(new.double.asked)
    own = _Judged(old.own, new.own, new, evidence, reported)
    yield from own.in_own_precision(sorted(now - before), sorted(before - now))


def _one_environment(old: Trajectory, new: Trajectory) -> bool:
    return old.environment == new.environment and old.own.repeatable


def not_comparable(old: Trajectory, new: Trajectory) -> str:
    """Why the two cannot be compared at all, in words; empty where they can."""
    if (old.double is not None and new.double is not None) or _one_environment(old, new):
        return ""
    why = new.why or old.why or "one of the two cannot be made in float64"
    then, now = (
        (f"torch {e.torch}", f"python {e.python}", e.platform, e.device, f"{e.threads} threads", e.cpu)
        for e in (old.environment, new.environment)
    )
    other = [f"{a}, now {b}" for a, b in zip(then, now, strict=True) if a != b]
    place = f"it was recorded on another environment ({'; '.join(other)})" if other else "it does not repeat itself"
    return f"{place}, and there is no course in float64 to compare: {why}"


def changes(old: Trajectory, new: Trajectory) -> tuple[str, ...]:
    """What the old baseline would have said of the loop now, a sentence a finding. With another environment, or made in
    another way, the two are not compared: the bounds of rounding there would take further runs."""
    a, b = old.environment, new.environment
    rows = (
        ("seed", old.made.seed, new.made.seed),
        ("batches of one pass", old.made.count, new.made.count),
        ("torch", a.torch, b.torch),
        ("device", a.device, b.device),
        ("threads", a.threads, b.threads),
        ("instructions of the CPU", a.cpu, b.cpu),
    )
    if changed := tuple(f"{what}: {now}, {then} before" for what, then, now in rows if then != now):
        return changed
    if not_comparable(old, new):
        return ()
    try:
        said = [finding.summary for finding in compare(old, new, None, Reported())]
    except CannotDecide:
        return ()
    words = (("in the baseline it is", "it was"), ("; in the baseline", "; it was"), ("in the baseline", "before"))
    for then, now in words:
        said = [summary.replace(then, now) for summary in said]
    return tuple(dict.fromkeys(said))


class _Judged:
    """Two courses in one precision."""

    def __init__(
        self, old: Course, new: Course, now: Trajectory, evidence: Evidence | None, reported: Reported
    ) -> None:
        self.old, self.new, self._now = old, new, now
        self._evidence, self._reported = evidence, reported
        double = new.precision == "float64"
        dtypes = {t.dtype for t in new.tensors.values()} | {c.dtype for s in new.steps for c in s.calls or ()}
        seen = " ".join((*old.lower, *new.lower) if double else dtypes)
        order = ("bfloat16", "float16", "float32", "float64")
        self.precision = next((dtype for dtype in order if dtype in seen), "float64" if double else "float32")
        self.eps = EPS.get(self.precision, 2.0**-8)
        self.names = Names(old, new, ROUNDING * self.eps)
        self.differs = False

    def findings(self) -> Iterator[Finding]:
        said = list(self._said())
        self.differs = any(finding.level == "fault" for finding in said)
        yield from said
        if texts := self.names.renames():
            own = tuple(name for match in self.names.moved for name in match.new)
            yield found("renamed", "", own, texts=some(texts, most=6), tensors=len(own), level="note")

    def _said(self) -> Iterator[Finding]:
        own = facts(self.old, self.new, self.names)
        if (start := begun(self.old, self.new, self.names)) is not None:
            others = [fact for fact in own if fact.alone]
            if start.scaled or not any(fact.kind == "parameters" for fact in others):
                if start.scaled:  # else other random numbers follow from other parameters
                    drawn = f"{some(start.drawn)} {verb(start.drawn, 'begin')} with other random numbers only"
                    rest = drawn if start.drawn else "all other weights begin as in the baseline"
                    finding = found("initial_weights_differ", "", start.scaled, text=start.text, rest=rest)
                else:
                    names, details = start.drawn, {"tensors": len(start.drawn), "first": start.drawn[0]}
                    finding = found("initial_weights_differ", "", names, "other draws", **details)
                yield self._with_line("start", finding)
            yield from (self._of_fact(fact, compared=False) for fact in others)
            return
        compared = self._compared(ROUNDING)
        first = compared.first()
        if first is None and compared.decides_nothing():
            raise CannotDecide("rounding alone changes every gradient of the first step: no place can be compared")
        explaining = [fact for fact in own if first is not None and fact.accounts_for(first)]
        later = [fact for fact in own if fact.alone and fact not in explaining]
        if first is not None:
            self._reported.note(compared, first)
            # a parameter that is gone is in no optimizer either
            roots = [fact for fact in explaining if fact.kind in ("parameters", "frozen")] or explaining
            yield from (self._of_fact(fact, first) for fact in roots)
            if not explaining:
                finding = self._of_first(first)
                kind = "some gradients" if first.stage == "gradient" and first.agree else first.stage
                yield self._with_line("clip" if finding.summary.startswith("clip_") else kind, finding)
                yield from (self._of_fact(fact) for fact in later)
            return
        yield from (self._of_fact(fact) for fact in later)
        if not later:
            yield from (self._unseen(fact) for fact in own if fact.unseen)
            if (loss := compared.loss_alone()) is not None:
                shown = "gradients and updates of all recorded steps are those of the baseline; the value differs"
                yield replace(self._of_first(loss), level="advice", shown_by=shown)

    def in_own_precision(self, came: Sequence[str], gone: Sequence[str]) -> Iterator[Finding]:
        """What differs in the loop's own precision, where float64 shows no difference; ``came`` and ``gone`` are dtypes
        to which one of the two loops casts and the other does not."""
        old, new = self.old, self.new
        dtypes = [(b, old.tensors[a].dtype, new.tensors[b].dtype) for a, b in self.names.pairs]
        for before, step in old.paired(new):
            known = {call.path: call.dtype for call in before.calls or ()}
            dtypes += [(call.path, known.get(call.path, ""), call.dtype) for call in step.calls or ()]
        for name, then, now in dtypes:
            if then and now and then != now:
                yield self._with_line("precision", found("precision_differs", "", (name,), then=then, now=now))
                return
        if self.precision not in EPS:
            return  # rounding of bfloat16 hides what it would show
        compared = self._compared(AT_HOME if came or gone else ROUNDING)
        first = compared.first_gradient()
        if first is not None:
            self._reported.note(compared, first)
            finding = self._of_first(first)
            cast = [f"the loop casts to {some(came)}, which it does not in the baseline"] if came else []
            cast += [f"the loop no longer casts to {some(gone)}"] if gone else []
            why = "" if cast else ": another order of operations loses digits, or a cast moved"
            summary = "; ".join((*cast, f"in {self.precision} {finding.summary}"))
            shown = f"in float64 both loops make the same steps, and the environment is that of the baseline{why}"
            finding = replace(finding, cause="precision_differs", summary=summary, shown_by=shown, repair="")
            yield self._with_line("precision", finding)

    def _compared(self, times: float) -> Comparison:
        return Comparison(self.old, self.new, self.names, Bounds(self.new, self._nudged, self.eps, times))

    def _nudged(self) -> list[tuple[Course, int]]:
        """Two courses with each weight moved by one unit in the last place. Where some gradients are rounding only, as
        that of a bias before a batch norm, a third with their weights moved as far as a step moves them: another
        machine moves them so."""
        from pytest_trainloop.instruments.baselines.capture import course

        if self._evidence is None:
            return []
        evidence, made, double = self._evidence, self._now.made, self.new.precision == "float64"
        sizes: dict[str, float] = {}
        try:
            moved = [course(evidence, made, double=double, nudge=seed) for seed in SEEDS]
            for mine, theirs in (pair for other in moved for pair in list(self.new.paired(other))[:1]):
                for name, digest in mine.gradients.items():
                    noise = NOISE[self.new.precision]
                    if name in theirs.gradients and distance(digest, theirs.gradients[name]) > noise:
                        count = self.new.tensors[name].size if name in self.new.tensors else 1
                        sizes[name] = mine.updates.get(name, 0.0) / math.sqrt(max(count, 1))
            sizes = {name: size for name, size in sizes.items() if size > 0}
            thrown = [course(evidence, made, double=double, nudge=sizes)] if sizes else []
        except CannotDecide as reason:
            raise CannotDecide(f"the bounds of rounding cannot be derived: {reason}") from None
        return [*((one, 0) for one in moved), *((one, 1) for one in thrown)]

    def _of_fact(self, fact: Fact, first: First | None = None, *, compared: bool = True) -> Finding:
        """A fact, with the place at which it shows; not ``compared``: the numbers of the steps were not."""
        shown = fact.shown or "no recorded step shows it yet: their numbers are those of the baseline"
        measured, where = fact.measured, fact.where
        if first is not None:
            place = PLACES[first.stage].format(some(first.names))
            shown = f"the numbers differ first at step {first.step.number}, {place}"
            numbers = f"relative difference {first.gap:.2g} in {self.precision}, bound {first.bound:.1g}"
            numbers = f"step {first.step.number}" if first.stage == "data" and not first.gap else numbers
            measured = f"{fact.measured}; {numbers}"
            where = where or ("" if fact.kind == "parameters" else first.step.where)
        elif not compared:
            shown = "it shows before the first step; from other weights the steps cannot be compared"
        details: dict[str, Any] = {"summary": fact.summary, "measured": measured, "shown": shown}
        details |= {"repair": f"{fact.repair}; or {ACCEPT}"} if fact.repair else {}
        return self._with_line(fact.kind, found("setup_differs", where, fact.culprits, fact.kind, **details))

    def _unseen(self, fact: Fact) -> Finding:
        """A note on what no recorded step can show."""
        details = {"summary": f"{fact.summary}: {fact.unseen}", "measured": fact.measured}
        shown = "the recorded steps do not need it: gradients, learning rates and updates are those of the baseline"
        details |= {"shown": shown, "level": "note", "repair": f"call it again, or {ACCEPT}"}
        return self._with_line(fact.kind, found("setup_differs", fact.where, fact.culprits, fact.kind, **details))

    def _of_first(self, first: First) -> Finding:
        """The first place that differs, where no fact explains it."""
        step, details = first.step, dict[str, Any]()
        where, names, variant = step.where, first.names, str(first.stage)
        details = {"step": step.number, "old": first.old, "new": first.new, "precision": self.precision}
        details |= {"gap": first.gap, "bound": first.bound, "parameters": len(names)}
        details["ratio"] = "" if first.ratio is None else f", factor {first.ratio:.6g}"
        if first.stage == "data":
            names, where = names[:1], ""
            details |= {"text": first.text, "rows": first.rows, "earlier": step.number - 1}
        elif first.calls is not None:
            names = (names[0] or "the model",)
            variant, where = _of_output(first, first.calls, names[0], details)
        elif first.stage == "loss":
            was, now = _losses(first.before), _losses(step)
            called = now.partition("(")[0] if now and ", " not in now else ""
            functions = f"; called are {now or 'none of torch'}, in the baseline {was or 'none of torch'}"
            details |= {"called": called, "factor": _factor(first.ratio), "silent": first.gone}
            details |= {
                "functions": "" if was == now else functions,
                "again": len(step.losses) != len(first.before.losses),
            }
            details |= {"passes": len(step.losses), "before": len(first.before.losses)}
            names = (*first.gone, "loss")
            where = _line(step, *(now.split(", ") if now else ["backward"])) or where
        elif first.stage == "gradient":
            details |= _of_gradient(first)
            where = _line(step, *(("clip_",) if details["clip"] else ("backward", "autograd"))) or where
        elif first.stage == "update":
            name, was_moved, moved = names[0], first.before.updates, step.updates
            both = name in was_moved and name in moved
            sizes = f"|update of {name}| {moved[name]:.4g}, {was_moved[name]:.4g} in the baseline; " if both else ""
            details["sizes"] = sizes
        elif first.stage == "buffer":
            models = _models(first.before), _models(step)
            options = _said_options(first, names[0].rpartition(".")[0])
            again = f"the model is called {_times(models[1])} a step, in the baseline {_times(models[0])}"
            again = again if models[0] != models[1] else ""
            details |= {"why": options or again, "first": names[0], "several": len(names) > 1}
            where = _line(step, "forward of") if again and not options else ""
        return found("steps_differ", where, names, variant, **details)

    def _with_line(self, kind: str, finding: Finding) -> Finding:
        """The finding with the line to change. Of an output it is the line that calls the model, the one of ``forward``
        that calls a module with another input, or what a module with others inside returns; else the line that makes
        the module."""
        if self._evidence is None:
            return finding
        from pytest_trainloop.instruments.tracing.made_at import MadeAt, line_of
        from pytest_trainloop.instruments.tracing.statements import use_of

        if kind == "output" and WRITTEN not in finding.shown_by:
            if finding.where:
                return replace(finding, change=finding.where, where="")
            made, path = self._evidence.shared(MadeAt.of), finding.culprits[0]
            if ALREADY in finding.shown_by:
                around = self._reported.inside or path.rpartition(".")[0] or path
                return replace(finding, change=use_of(made.forward([around]), [f"{path}."]))
            calls = (call for step in self._now.own.steps[:1] for call in step.calls or ())
            holds = any(call.path.startswith(f"{path}.") for call in calls)
            return replace(finding, change=use_of(made.forward([path]), ()) if holds else made.module(path))
        lines = (line_of(part, finding, self._evidence) for part in LINES.get(kind, ()))
        return replace(finding, change=next(filter(None, lines), ""))


WRITTEN = "or something writes to its weights between two steps"
ALREADY = "already has another input"


def _of_output(first: First, calls: tuple[Call, Call], path: str, details: dict[str, Any]) -> tuple[str, str]:
    """The variant and the line of an output that differs; its facts are added."""
    (old, new), step, agree = calls, first.step, first.agree
    details |= {"path": path, "new": new.gave.norm, "old": old.gave.norm}
    if first.times[0] != first.times[1]:  # each call gets other rows
        models = _models(first.before), _models(step)
        what, (then, now) = ("the model", models) if models[0] != models[1] else (path, first.times)
        why = "what it computes of all rows together, or draws at random, differs"
        if new.training and "Dropout" in new.kind:
            why = f"{path} draws other random numbers"
        elif new.training and "BatchNorm" in new.kind:
            why = f"{path} takes the statistics of other rows"
        details |= {"what": what, "now": _times(now), "then": _times(then), "why": why}
        details |= {"calls": first.times[1], "before": first.times[0]}
        return "called again", _line(step, "forward of") or step.where
    before = f"; before it {some(agree, most=4)} {verb(agree, 'give')} the output of the baseline" if agree else ""
    by_loop, where = first.given_too and first.inside is None, ""
    headline = f"{path} has {'another input' if first.given_too else 'another output'}"
    if options := _said_options(first, path):
        headline = f"{options}: {headline}"
    if by_loop:
        headline = f"the model is called with other values: {path} has another input"
        shown = f"what the loop passes to the model differs{before or f'; {path} is the first module that is called'}"
    else:
        before = before or "; it is the first module that is called"
        shown = f"{path} has the input of the baseline and another output{before}"
        if first.given_too:
            shown = f"{path} {ALREADY}{before}: the change is between {'them' if agree else 'the batch and it'}"
        elif step.number > 1:
            shown += (
                f"; after step {step.number - 1} its weights were those of the baseline: what it computes changed, "
            )
            shown += WRITTEN
    other = f" ({new.kind}; in the baseline {old.kind})" if old.kind != new.kind else ""
    if new.training != old.training:
        modes = ("training", "evaluation") if new.training else ("evaluation", "training")
        other += f" (in {modes[0]} mode; in the baseline in {modes[1]} mode)"
        where = _line(step, "train()" if new.training else "eval()", ends=True)
    elif by_loop:
        where = _line(step, "forward of")
    details |= {"headline": headline, "other": other, "shown": shown}
    return "output", where


def _of_gradient(first: First) -> dict[str, Any]:
    own, step, clip = first.names, first.step, ""
    if first.new == 0.0 or first.old == 0.0:
        has = "no gradient" if first.new == 0.0 else "a gradient"
        text = f"{some(own)} {verb(own, 'get')} {has} at step {step.number}"
        text += "" if first.new == 0.0 else ", and none in the baseline"
    else:
        of = "every parameter" if not first.agree and len(own) > 1 else some(own)
        text = f"the gradient of {of} differs from the baseline at step {step.number}{_factor(first.ratio)}"
    was, now = first.before.clips, step.clips
    if first.ratio is not None and not first.agree and len(was) == len(now) == 1:
        before_it = was[0] and math.isclose(now[0] / was[0], first.ratio, rel_tol=1e-6)
        if not before_it and not math.isclose(was[0], now[0], rel_tol=1e-9):
            clip = f"clip_grad_norm_() finds a norm of {now[0]:.4g} where it found {was[0]:.4g}"
    rest = f"the gradients of {some(first.agree, most=4)} are equal" if first.agree else "no gradient is equal"
    repair = f"pass the clip the parameters that it gets in the baseline; or {ACCEPT}"
    return {"clip": clip, "text": text, "rest": rest, **({"repair": repair} if clip else {})}


def _said_options(first: First, path: str) -> str:
    """``p of drop is 0.2; in the baseline 0.1``."""
    return ", ".join(f"{name} of {path} is {now}; in the baseline {was}" for name, was, now in first.options)


def _models(step: Step) -> int:
    """The calls of models from outside any module."""
    whats = [event.what for event in step.events or () if event.what.startswith("forward of")]
    return sum(int(times[1]) if (times := re.search(r" x (\d+)$", what)) else 1 for what in whats)


def _losses(step: Step) -> str:
    names = [event.what for event in step.events or () if "(" in event.what and "_" in event.what]
    known = [what for what in names if not what.startswith(("clip_", "forward", "zero_", "scaler"))]
    return ", ".join(dict.fromkeys(what for what in known if ".step" not in what and ".train" not in what))


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _factor(ratio: float | None) -> str:
    """``, 8 times as large`` where the factor is a whole number or its inverse."""
    for value, text in ((ratio or 0.0, "times as large"), (1 / ratio if ratio else 0.0, "times smaller")):
        if value > 1.5 and abs(value - round(value)) < 1e-6 * value:
            return f", {round(value)} {text}"
    return ""


def _line(step: Step, *parts: str, ends: bool = False) -> str:
    """The line of the last event of a step that begins so, or ends so."""
    matches = str.endswith if ends else str.startswith
    return next((e.where for e in reversed(step.events or ()) if e.where and matches(e.what, parts)), "")
