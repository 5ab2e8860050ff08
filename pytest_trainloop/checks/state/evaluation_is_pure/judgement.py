"""What ``evaluate()`` does to training: the experiments in their order, and what each of them shows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.evaluation_is_pure import causes
from pytest_trainloop.checks.state.evaluation_is_pure.called_again import called_again
from pytest_trainloop.checks.state.evaluation_is_pure.causes import found
from pytest_trainloop.checks.state.evaluation_is_pure.interposed import OPTIONS, WANTED, Cut, EvaluateRaised
from pytest_trainloop.checks.state.evaluation_is_pure.naming import (
    Group,
    acting,
    holder_of,
    in_words,
    largest_change,
    modules_by_path,
    names_of,
)
from pytest_trainloop.checks.state.evaluation_is_pure.seeds import seeded_between
from pytest_trainloop.checks.state.two_runs import RunComparison, compare_runs
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.wording import filled, some
from pytest_trainloop.instruments.tracing.dropout_in_evaluation import DropoutInEvaluation
from pytest_trainloop.instruments.tracing.statements import inference_mode_of
from pytest_trainloop.recording.events import ModeCall, Step
from pytest_trainloop.recording.torch_internals import NORM_MODULES
from pytest_trainloop.runs.reachable_state.leaves import same_value
from pytest_trainloop.runs.reachable_state.stored import value_of
from pytest_trainloop.runs.split_run import halves, no_halves

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Moment, Run
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.reachable_state.snapshot import Difference

UNRESOLVED = (
    "training differs after evaluate(), and putting back all that could be reached does not restore it: evaluate and "
    "fit draw on one stream or environment; give evaluate one of its own, or leave evaluate out"
)

MOST_GROUPS, MOST_CULPRITS = 8, 6
"""Groups that are put back one by one, else those of one kind together; attributes among the culprits (the summary says
how many there are)."""

WITHIN_FIT = frozenset({"mode", "gradient", "requires_grad", "switch"})
"""Kinds that ``fit`` may set again as it begins, so that evaluation between two calls of it is no test of them."""

KINDS = {
    "weight": ("weights", "weights_left"),
    "gradient": ("gradients", "gradients_left"),
    "mode": ("modes", "mode_left"),
    "requires_grad": ("requires_grad", "state_left"),
    "buffer": ("buffers", "buffers_moved_by_evaluation"),
    "hooks": ("hooks", "state_left"),
    "optimizer_state": ("optimizer's state", "state_left"),
    "group_value": ("options of the optimizer", "feedback"),
    "scheduler": ("options of the optimizer", "feedback"),
    "switch": ("", "switch_left"),
}
"""By kind of leaf, what all leaves of the kind are called where one statement changes them together, and the cause."""

WHEN: dict[Moment, str] = {
    "between": "between two calls of fit",
    "first": "before the first step",
    "inside": "between two steps of one fit",
    "later": "between two calls of fit",
}


def _together(group: Group) -> str:
    return KINDS.get(group.kind, ("", ""))[0]


class Judgement:
    """What was found of one loop's ``evaluate``."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._named: set[str] = set()
        """Paths of what was found."""
        self.findings: list[Finding] = []
        self.unresolved = ""
        """Why the cause of a difference is not known."""
        self.courses: RunComparison | None = None
        """Training with ``evaluate()`` and training without it, where the two differ."""

    @classmethod
    def of(cls, evidence: Evidence) -> Judgement:
        """Raises ``CannotDecide`` where ``fit`` cannot be run twice, nor on the batches of two halves, and where
        ``evaluate`` wants a file."""
        made = cls(evidence)
        try:
            made._judge()
        except EvaluateRaised as error:
            if issubclass(error.kind, WANTED):
                raise CannotDecide(f"evaluate() needs what is not there: {error.error.summary}") from None
            made.findings = [_raised("raises_before_first_step" if error.steps == 0 else "evaluation_raised", error)]
            made.unresolved = ""
        return made

    def _note(self, *given: Any, **facts: Any) -> None:
        self.findings.append(found(*given, **facts))

    def _judge(self) -> None:
        evidence, dropout = self._evidence, DropoutInEvaluation()
        cut, run = self._first_run(dropout)
        differs = self._attribute(cut, run)
        if not differs and cut.moment == "between":
            self._look_inside(cut, run)
            self._look_later(cut, run)
        if not differs or cut.moment == "inside":
            self._other_looks(cut, run)
        if self.findings:
            self.unresolved = ""
        if cut.moment == "between":
            first, early = Cut(evidence, "first", cut.without), None
            try:
                early = first.run(again=True)
            except EvaluateRaised as error:
                if not issubclass(error.kind, WANTED):
                    self.findings.append(_raised("raises_before_first_step", error))
            if early is not None and not differs and not self.findings:
                self._attribute(first, early)
                self.findings += called_again(first, run, early)
            self.findings += seeded_between(cut, run, early)
        for active in dropout.between(run.began, run.ended):
            facts = {"dropout": active.summary, "measured": active.measured, "level": active.level}
            facts |= {"shown_by": active.shown_by, "repair": active.repair}
            self._note("dropout_stays_on", active.place, (active.module,), **facts)

    def _first_run(self, dropout: DropoutInEvaluation) -> tuple[Cut, Run]:
        """The run with ``evaluate()`` between two calls of ``fit``, in a precision in which it acts as in the loop's
        own; between two steps where ``fit`` can be called once."""
        evidence = self._evidence
        try:
            cut = Cut(evidence, "between", evidence.shared(no_halves))
        except CannotDecide as reason:
            for double in (True, False):
                without = halves(evidence, double=double, inside=True)
                if without.record.raised is None:
                    break
            if without.record.raised is not None or not all(without.steps):
                raise
            cut = Cut(evidence, "inside", without)
            run = cut.run(contexts=dropout.contexts)
            if not run.halves.between_was_called:
                raise reason from None
            return cut, run
        try:
            run = cut.run(contexts=dropout.contexts)
            undone = any(d.leaf.kind == "switch" for d in run.differences) and not cut.differs(run)
            if not cut.without.double or not (run.casts or undone):
                return cut, run
        except EvaluateRaised:
            if not cut.without.double:
                raise
        # the wider precision made it raise, or undid what it does, or what it casts has another dtype by now
        cut = Cut(evidence, "between", halves(evidence, double=False))
        dropout.calls.clear()
        return cut, cut.run(contexts=dropout.contexts)

    def _attribute(self, cut: Cut, run: Run) -> bool:
        """Find what makes training differ; False where nothing does."""
        drawn_from = any(
            d.leaf.kind in ("tensor", "array", "scalar", "length") and "batches" in d.leaf.reached_from
            for d in run.differences
        )
        if cut.moment == "between" and drawn_from and not cut.differs(run):
            late = halves(self._evidence, double=cut.without.double, drawn_late=True)
            cut = Cut(self._evidence, "between", late, drawn_late=True)
            run = cut.run()
        if run.rounded and not cut.differs(run):
            bitwise = replace(cut, bitwise=True)  # holds where putting it back restores every bit
            cut = cut if bitwise.differs(cut.run(lambda _: True)) else bitwise
        if not cut.differs(run):
            return False
        courses = compare_runs(run.halves, cut.without, both_begin=True)
        self.courses = replace(courses, cut=sum(cut.without.steps[: _halves_before(cut)]))
        raised = run.halves.record.raised
        if run.inference and raised and "nference tensor" in raised.message:
            what, line = raised.summary.partition(". ")[0], self._line(cut, run.inference)
            switch = inference_mode_of(self._evidence.fresh_loop().evaluate)
            self._note("inference_tensor_kept", line, run.inference[:4], raised=what, change=switch or line)
            return True
        if run.inference_mode:
            switch = "torch.is_inference_mode_enabled()"
            measured = self._measured(cut, run, switch, "False", "True")
            self._note("switch_left", "", (switch,), "inference mode", what=switch, now="True", measured=measured)
            return True
        groups = _groups(run.differences)
        if not groups or cut.differs(cut.run(lambda _: True)):
            if cut.moment in ("between", "inside"):
                self.unresolved = UNRESOLVED + (f" ({run.cut_short})" if run.cut_short else "")
            return True
        guilty = self._guilty(cut, groups)
        if run.stepped and (weights := [group for group in guilty if group.kind == "weight"]):
            guilty = weights  # the gradients and moments of steps inside evaluate() are a part of that
        self._describe(cut, run, guilty)
        return True

    def _guilty(self, cut: Cut, groups: Sequence[Group]) -> list[Group]:
        """The groups that make training differ when they alone are left as evaluation leaves them."""
        if len(groups) == 1:
            return self._narrowed(cut, groups[0])

        def heals(group: Group) -> bool:
            chosen = set(group.paths)
            return not cut.differs(cut.run(lambda d: d.leaf.kind == "generator" or d.leaf.path in chosen))

        if guilty := [group for group in groups if self._harms(cut, group)]:
            return [part for group in guilty for part in self._narrowed(cut, group)]
        return [next(filter(heals, groups), groups[0])]  # two that are harmful together only: the first that heals both

    def _narrowed(self, cut: Cut, group: Group) -> list[Group]:
        """The components of a group that do it alone: trainers keep much that training does not depend on."""
        buffers = group.kind == "buffer"
        parts: dict[str, Group] = {}
        for d in group.differences:
            component = group.component if buffers else d.leaf.component
            parts.setdefault(d.leaf.path if buffers else component, Group(group.kind, component)).differences.append(d)
        listed, middle = list(parts.values()), len(parts) // 2
        if not middle or (_together(group) and not buffers):
            return [group]
        two = [_merged(listed[:middle]), _merged(listed[middle:])]
        guilty = [half for half in two if self._harms(cut, half)]
        named = [part for half in guilty for part in self._narrowed(cut, half)] or [group]
        return [_merged(named)] if buffers else named  # one update of statistics, one fault

    @staticmethod
    def _harms(cut: Cut, group: Group) -> bool:
        """Whether training differs with everything put back but this."""
        left = set(group.paths)
        return cut.differs(cut.run(lambda d: d.leaf.path not in left))

    def _look_inside(self, cut: Cut, run: Run) -> None:
        """Whether it matters where evaluation is called between two steps of one ``fit``, where it changes what ``fit``
        may set again as it begins: the mode of a module that acts by it, gradients, switches."""
        modes = {f"{path}.training" for path in acting(self._evidence.fresh_loop())}
        set_again = (d.leaf for d in run.differences if d.leaf.kind in WITHIN_FIT)
        if not any(leaf.kind != "mode" or leaf.path in modes for leaf in set_again):
            return
        without = halves(self._evidence, double=cut.without.double, inside=True)
        if without.record.raised is not None or not all(without.steps):
            return
        inside = Cut(self._evidence, "inside", without)
        try:
            there = inside.run()
        except EvaluateRaised:
            return
        if not there.halves.between_was_called or not inside.differs(there):
            return
        chosen = [group for group in _groups(there.differences) if group.kind in WITHIN_FIT]
        paths = {path for group in chosen for path in group.paths}
        if chosen and not inside.differs(inside.run(lambda d: d.leaf.path in paths)):
            self._describe(inside, there, self._guilty(inside, chosen))

    def _look_later(self, cut: Cut, run: Run) -> None:
        """Whether a buffer that evaluation changes matters after more steps: a load is balanced by its sign."""
        modules = dict(modules_by_path(self._evidence.fresh_loop()))
        counted = (d.leaf.path for d in run.differences if d.leaf.kind == "buffer")
        if all(isinstance(modules.get(path.rpartition(".")[0]), NORM_MODULES) for path in counted):
            return
        without = halves(self._evidence, double=cut.without.double, **OPTIONS["later"])
        if without.record.raised is None and without.end:
            later = Cut(self._evidence, "later", without)
            self._attribute(later, later.run())

    def _other_looks(self, cut: Cut, run: Run) -> None:
        """What evaluation changes although training is as it was."""
        modules = dict(modules_by_path(self._evidence.fresh_loop()))
        moved, statistics = [], ("running_mean", "running_var", "num_batches_tracked")
        for d in run.differences:
            owner, _, name = d.leaf.path.rpartition(".")
            if d.leaf.kind == "buffer" and name in statistics and isinstance(modules.get(owner), NORM_MODULES):
                moved.append(d.leaf.path)
        if moved and run.tested and self._named.isdisjoint(moved):
            facts = {"what": some(moved), "moved": len(moved), "level": "advice"}
            self._note("norm_statistics_moved", self._line(cut, moved), moved[:MOST_CULPRITS], **facts)
        hooks = [d for d in run.differences if d.leaf.kind == "hooks" and (d.before or 0) < (d.after or 0)]
        if hooks and self._named.isdisjoint(d.leaf.path for d in hooks):
            again = cut.run(to_cut=True, times=2).differences
            twice = {d.leaf.path: d.after or 0 for d in again if d.leaf.kind == "hooks"}
            for d in [d for d in hooks if twice.get(d.leaf.path, 0) > (d.after or 0)][:1]:
                path, owner = d.leaf.path, d.leaf.component.removeprefix("hooks of ")
                facts = {"hooks": path, "was": d.before or 0, "now": d.after, "twice": twice[path], "level": "advice"}
                self._note("hooks_left", self._line(cut, (path,)), (owner,), **facts)

    def _describe(self, cut: Cut, run: Run, guilty: Sequence[Group]) -> None:
        """Note the findings of these groups; none of a mode that ``fit`` sets again after steps, as at the start of
        each epoch: then evaluation belongs between epochs."""
        loop, record = self._evidence.fresh_loop(), cut.without.record
        began = next((step.at for step in record.of(Step)), math.inf)
        set_again = any(call.on and call.at > began for call in record.of(ModeCall))
        # a trainer of another library evaluates in the middle of its fit; a fit of the project's may set these again
        by_us = cut.moment == "inside" and not getattr(loop.evaluate, "within_fit", False)
        for group in guilty:
            first, within = group.differences[0], by_us and group.kind in WITHIN_FIT
            if within and group.kind == "mode" and set_again:
                continue
            cause, where = _cause_of(group, run), next(filter(None, run.stepped), "")
            if cause != "evaluation_trains" or not where:
                where = self._line(cut, group.paths)
            stopped = _stopped(cut, run) if cause == "state_left" and any(map(_is_kept, group.differences)) else []
            if cause == "state_left" and cut.moment == "between" and not stopped and self._steers(cut, group):
                cause = "feedback"
            cause = "matters_inside_fit" if within else cause
            variant = "frozen parts" if cause == "mode_left" and first.after else "kept" if stopped else ""
            variant = "attack" if cause == "gradients_left" and "backward(" in where else variant
            was, now = (in_words(value, first.leaf.kind) for value in (first.before, first.after))
            names = names_of(group, loop)
            self._named |= set(names)
            several = group.component == _together(group) != group.kind
            facts = {
                "evaluation": "evaluate()",
                "level": "advice" if cause in ("feedback", "matters_inside_fit") else "fault",
                "what": some(names),
                "now": now,
                "mode": group.kind == "mode",
                "stopped": some(stopped),
                "several": len(stopped) > 1,
                "steps": len(run.stepped),
                "holder": holder_of(run.holders) if cause == "weights_left" else "",
                "measured": self._measured(cut, run, names[0], was, now),
                "when": WHEN[cut.moment],
                "raised": run.halves.record.raised is not None,
                "component": f"the {group.component}" if several else group.component,
            }
            if cause.endswith("_left"):
                facts["tried"] = f"with {facts['component']} restored after evaluate() training ends as without it"
            self._note(cause, where, names[:MOST_CULPRITS], variant, **facts)

    def _steers(self, between: Cut, group: Group) -> bool:
        """Whether ``fit`` itself never changes this, and what evaluation sets it to depends on the model, or moves on
        with each evaluation: a curriculum, a threshold, the weight of a term.

        An option that is left as evaluation needs it (a rate of dropout at zero) is the same whatever the model is, and
        after a second call. A counter, or a state that is carried on, is moved by training as well.
        """
        if group.kind not in ("scalar", "tensor", "array") or any(d.how != "changed" for d in group.differences):
            return False
        try:
            first = Cut(self._evidence, "first", between.without).run(watched=group.paths, to_cut=True)
            if any(not same_value(value_of(first.values.get(d.leaf.path)), d.before) for d in group.differences):
                return False
            others = (between.run(to_cut=True, times=2), between.run(to_cut=True, displaced=True))
        except EvaluateRaised:
            return False
        known = [{d.leaf.path: d for d in seen.differences} for seen in others]
        pairs = ((by_path.get(d.leaf.path), d) for by_path in known for d in group.differences)
        return any(not same_value(d.before if other is None else other.after, d.after) for other, d in pairs)

    @staticmethod
    def _line(cut: Cut, paths: Sequence[str]) -> str:
        return cut.run(to_cut=True, watched=paths).where

    @staticmethod
    def _measured(cut: Cut, run: Run, first: str, was: str, now: str) -> str:
        """What was left, and what training made of it: the weight that differs by most at the end, relative to its
        largest entry."""
        raised = run.halves.record.raised
        facts: dict[str, Any] = {"first": first, "was": was, "now": now, "evaluation": "evaluate()"}
        facts["rounds"] = sum(run.halves.steps[_halves_before(cut) :])
        texts = [causes.CHANGED] if was and now else []
        if raised is not None:
            texts.append(causes.RAISES)
            facts["raised"] = raised.summary.partition(". ")[0]
        elif largest := largest_change(run.halves.end, cut.end, cut.trained, cut.same):
            facts |= largest
            texts.append(causes.ENDS)
        return "; ".join(filled(text, facts) for text in texts)


def _raised(cause: str, error: EvaluateRaised) -> Finding:
    """The exception with the user's traceback."""
    facts = {"raised": error.error.summary, "steps": error.steps, "shown_by": error.error.traceback}
    level = "advice" if cause == "raises_before_first_step" else "fault"
    return found(cause, error.where, ("evaluate()",), level=level, **facts)


def _groups(differences: Iterable[Difference]) -> list[Group]:
    """The differences in groups; not where a stream has come to, which is no fault."""
    made: dict[str, Group] = {}
    for difference in differences:
        leaf = difference.leaf
        of_optimizer = leaf.component.endswith(".state") and "optimizer" in leaf.reached_from
        kind = "optimizer_state" if of_optimizer else leaf.kind
        component = KINDS.get(kind, ("", ""))[0] or leaf.component
        if kind != "generator":
            made.setdefault(component, Group(kind, component)).differences.append(difference)
    if len(made) <= MOST_GROUPS:
        return list(made.values())
    by_kind: dict[str, list[Group]] = {}
    for group in made.values():
        by_kind.setdefault(group.kind, []).append(group)
    return [_merged(of_kind) for of_kind in by_kind.values()]


def _merged(parts: Sequence[Group]) -> Group:
    """Groups of one kind as one."""
    return Group(parts[0].kind, parts[0].component, [d for part in parts for d in part.differences])


def _cause_of(group: Group, run: Run) -> str:
    """What it would be called, if training depends on it."""
    if group.kind == "weight":
        return "evaluation_trains" if run.stepped else "weights_left"
    if group.kind in ("tensor", "array") and all(map(_is_data, group.differences)):
        return "data_changed"
    return KINDS.get(group.kind, ("", "state_left"))[1]


def _is_kept(difference: Difference) -> bool:
    """Whether it is a tensor where there was nothing."""
    return difference.before is None and isinstance(difference.after, torch.Tensor)


def _stopped(cut: Cut, run: Run) -> list[str]:
    """The weights that training moves without ``evaluate()`` and leaves with it; none where it leaves all of them."""
    left = cut.trained - run.halves.trained()
    return sorted(left) if left != cut.trained else []


def _is_data(difference: Difference) -> bool:
    """Whether it is data rather than state: the batches are drawn from it, or it is written in place and belongs to
    nothing that trains."""
    if "batches" in difference.leaf.reached_from:
        return True
    of_training = difference.leaf.reached_from & {"model", "optimizer", "scheduler", "scaler"}
    before, after = difference.before, difference.after
    in_place = difference.how == "changed" and getattr(before, "shape", None) == getattr(after, "shape", None)
    return not of_training and in_place and getattr(before, "ndim", 0) > 1 and len(before) > 1


def _halves_before(cut: Cut) -> int:
    return len(OPTIONS[cut.moment].get("before", (0,)))
