"""What ``evaluate()`` does to training: the runs, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pytest_trainloop.checks.state.evaluation_is_pure.interposed import EvaluateRaised, Interposed
from pytest_trainloop.checks.state.evaluation_is_pure.left import (
    WITHIN_FIT,
    Group,
    Left,
    cause_of,
    components_of,
    groups,
    holder_of,
    in_words,
    merged,
    named,
    set_anew_by_fit,
    statistics_of_norms,
)
from pytest_trainloop.checks.state.evaluation_is_pure.reseeding import reseeding
from pytest_trainloop.checks.state.evaluation_is_pure.steering import steers
from pytest_trainloop.checks.state.two_courses import TwoCourses, two_courses
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.reach.copies import same_bits
from pytest_trainloop.recording.events import ModeCall, Step
from pytest_trainloop.runs.halves import halves, no_halves, same_tensor
from pytest_trainloop.tracing.dropout_in_evaluation import DropoutInEvaluation
from pytest_trainloop.whose import present

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Raised, Run, Seen
    from pytest_trainloop.checks.state.evaluation_is_pure.reseeding import Reseeding
    from pytest_trainloop.reach.snapshot import Difference
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.halves import Halves
    from pytest_trainloop.tracing.dropout_in_evaluation import ActiveDropout

Moment = Literal["between", "first", "inside"]

OPTIONS: dict[Moment, dict[str, Any]] = {
    "between": {},
    "first": {"before": (), "after": (0,)},
    "inside": {"inside": True},
}
"""How a run is cut: between two calls of ``fit``, before the first step, between two steps of one ``fit``."""

WANTED = (OSError, ImportError)
"""What an evaluation raises that wants something which is not there: a file that training writes, a package."""

UNRESOLVED = (
    "training differs after evaluate(), and putting back all that could be reached does not restore it: evaluate and "
    "fit draw on one stream or environment; give evaluate one of its own, or leave evaluate out"
)


@dataclass(slots=True)
class Judgement:
    """What was found of one loop's ``evaluate``."""

    left: list[Left] = field(default_factory=list)
    reseeding: Reseeding | None = None
    dropout: list[ActiveDropout] = field(default_factory=list)
    raised: Raised | None = None
    raised_early: Raised | None = None
    skip: str = ""
    courses: TwoCourses | None = None
    """Training with ``evaluate()`` beside training without it, where the two differ."""

    @classmethod
    def of(cls, evidence: Evidence) -> Judgement:
        """Raises ``CannotDecide`` where ``fit`` cannot be run twice, nor on the batches of two halves, and where
        ``evaluate`` wants a file."""
        made = cls()
        try:
            _Judging(evidence, made).judge()
        except EvaluateRaised as error:
            if issubclass(error.what.kind, WANTED):
                raise CannotDecide(f"evaluate() needs what is not there: {error.what.error.summary}") from None
            made.raised = error.what
        return made


@dataclass(slots=True)
class _Cut:
    """One moment at which ``evaluate()`` is called, and what training is there without it."""

    moment: Moment
    interposed: Interposed
    end: Mapping[str, torch.Tensor]
    trained: frozenset[str]
    without: Halves
    """The run without ``evaluate()``."""
    same: Callable[[torch.Tensor | None, torch.Tensor | None], bool] = same_tensor

    def differs(self, run: Run) -> bool:
        end = run.halves.end
        return run.halves.record.raised is not None or any(
            not self.same(end.get(name), self.end.get(name)) for name in self.trained
        )


class _Judging:
    def __init__(self, evidence: Evidence, made: Judgement) -> None:
        self._evidence = evidence
        self._made = made
        self._reference: Halves | None = None

    def judge(self) -> None:
        try:
            self._reference = reference = self._evidence.shared(no_halves)
        except CannotDecide as reason:
            self._judge_once_only(reason)
            return
        dropout = DropoutInEvaluation()
        cut = self._cut("between", reference)
        run: Run | None = None
        try:
            run = cut.interposed.run(contexts=dropout.contexts)
        except EvaluateRaised:
            if not reference.double:
                raise
        undone = run is not None and any(d.leaf.kind == "switch" for d in run.seen.differences)
        if run is None or (reference.double and (run.seen.casts or (undone and not cut.differs(run)))):
            # the wider precision made it raise, or undid what it does, or what it casts has another dtype by now
            cut, run = self._in_own_precision(dropout)
        self._made.dropout = dropout.between(run.seen.began, run.seen.ended)
        found = self._find(cut, run)
        if not found:
            self._look_further(cut, run)
        early = self._before_first_step(cut, found)
        self._made.reseeding = reseeding(self._evidence, cut.interposed, self._known(), run.seen, early)

    def _known(self) -> Halves:
        return present(self._reference, "the run to compare with")

    def _cut(self, moment: Moment, reference: Halves) -> _Cut:
        interposed = Interposed(self._evidence, double=reference.double, **OPTIONS[moment])
        end = reference.cut if moment == "first" else reference.end
        return _Cut(moment, interposed, end, reference.trained(), reference)

    def _in_own_precision(self, dropout: DropoutInEvaluation) -> tuple[_Cut, Run]:
        self._reference = halves(self._evidence, double=False)
        cut = self._cut("between", self._reference)
        dropout.calls.clear()
        return cut, cut.interposed.run(contexts=dropout.contexts)

    def _judge_once_only(self, reason: CannotDecide) -> None:
        """A ``fit`` that can be called once: evaluation is put between two of its steps."""
        reference = halves(self._evidence, double=True, inside=True)
        if reference.record.raised is not None:
            reference = halves(self._evidence, double=False, inside=True)
        if reference.record.raised is not None or not all(reference.steps):
            raise reason
        self._reference = reference
        cut = self._cut("inside", reference)
        dropout = DropoutInEvaluation()
        run = cut.interposed.run(contexts=dropout.contexts)
        if not run.halves.between_was_called:
            raise reason
        self._made.dropout = dropout.between(run.seen.began, run.seen.ended)
        self._find(cut, run)
        self._other_looks(cut, run)

    def _find(self, cut: _Cut, run: Run) -> bool:
        """Attribute what makes training differ; False where nothing does."""
        if cut.moment == "between" and self._changes_batches(run.seen) and not cut.differs(run):
            cut = replace(cut, interposed=cut.interposed.also(drawn_late=True))
            cut.without = halves(self._evidence, double=cut.interposed.double, drawn_late=True)
            cut.end = cut.without.end
            run = cut.interposed.run()
        if run.seen.rounded and not cut.differs(run):
            bitwise = replace(cut, same=_same_bits)  # holds where putting it back restores every bit
            cut = cut if bitwise.differs(cut.interposed.run(lambda difference: True)) else bitwise
        if not cut.differs(run):
            return False
        self._made.courses = two_courses(run.halves, cut.without, both_begin=True)
        if cut.moment == "first":
            self._made.courses = replace(self._made.courses, cut=0)
        if run.seen.inference and run.halves.record.raised and "nference tensor" in run.halves.record.raised.message:
            self._made.left.append(self._kept_inference_tensor(cut, run))
            return True
        if run.seen.inference_mode:
            self._made.left.append(_inference_mode_left(run))
            return True
        all_groups = [group for group in groups(run.seen.differences) if group.ours]
        healed = cut.interposed.run(lambda difference: True)
        if not all_groups or cut.differs(healed):
            if cut.moment != "first":
                self._made.skip = UNRESOLVED + (f" ({run.seen.cut})" if run.seen.cut else "")
            return True
        guilty = self._guilty(cut, all_groups)
        causes = {cause_of(group, len(run.seen.stepped)) for group in guilty}
        if "evaluation_trains" in causes:  # its gradients and moments are a part of that
            guilty = [group for group in guilty if group.kind == "weight"]
        self._made.left += [self._described(cut, run, group) for group in guilty if not self._set_again(cut, group)]
        return True

    def _guilty(self, cut: _Cut, found: Sequence[Group]) -> list[Group]:
        """The groups that make training differ when they alone are left as evaluation leaves them."""
        if len(found) == 1:
            return self._narrowed(cut, found[0])

        def only(group: Group) -> Callable[[Difference], bool]:
            chosen = set(group.paths)
            return lambda difference: difference.leaf.kind == "generator" or difference.leaf.path in chosen

        guilty = [group for group in found if self._differs_without(cut, group)]
        if guilty:
            return [part for group in guilty for part in self._narrowed(cut, group)]
        healing = (group for group in found if not cut.differs(cut.interposed.run(only(group))))
        return [next(healing, found[0])]  # two that are harmful together only: the first that heals both

    def _narrowed(self, cut: _Cut, group: Group) -> list[Group]:
        """The components of a group that do it alone: trainers keep much that training does not depend on."""
        parts = components_of(group)
        if len(parts) == 1:
            return parts
        middle = len(parts) // 2
        halves_of_it = [merged(parts[:middle]), merged(parts[middle:])]
        guilty = [half for half in halves_of_it if self._differs_without(cut, half)]
        found = [part for half in guilty for part in self._narrowed(cut, half)] or [group]
        return [merged(found)] if group.kind == "buffer" else found  # one update of statistics, one fault

    @staticmethod
    def _differs_without(cut: _Cut, group: Group) -> bool:
        """Whether training differs with everything put back but this."""
        left = set(group.paths)
        return cut.differs(cut.interposed.run(lambda difference: difference.leaf.path not in left))

    @staticmethod
    def _changes_batches(seen: Seen) -> bool:
        """Whether something differs that the batches are drawn from."""
        return any(
            d.leaf.kind in ("tensor", "array", "scalar", "length") and "batches" in d.leaf.reached_from
            for d in seen.differences
        )

    def _look_further(self, cut: _Cut, run: Run) -> None:
        """What evaluation changes although training is as it was."""
        if set_anew_by_fit(run.seen.differences, self._evidence.fresh_loop()):
            self._look_inside(cut, run)
        self._other_looks(cut, run)

    def _other_looks(self, cut: _Cut, run: Run) -> None:
        loop = self._evidence.fresh_loop()
        moved = statistics_of_norms(run.seen.differences, loop)
        if moved and run.seen.tested and not self._named(moved):
            self._made.left.append(
                Left(
                    "norm_statistics_moved",
                    level="advice",
                    component="buffers",
                    paths=moved,
                    measured=f"{len(moved)} running statistics differ after evaluate()",
                    shown_by="they differ right after evaluate(), and the weights that train end as without it",
                    where=self._line(cut, moved),
                )
            )
        hooks = [d for d in run.seen.differences if d.leaf.kind == "hooks" and (d.before or 0) < (d.after or 0)]
        if hooks and not self._named([d.leaf.path for d in hooks]):
            self._look_at_hooks(cut, hooks)

    def _named(self, paths: Sequence[str]) -> bool:
        return any(set(paths) & set(left.paths) for left in self._made.left)

    def _look_at_hooks(self, cut: _Cut, once: Sequence[Difference]) -> None:
        twice = cut.interposed.up_to_cut().run(times=2).seen.differences
        counts = {d.leaf.path: d.after or 0 for d in twice if d.leaf.kind == "hooks"}
        growing = [d for d in once if counts.get(d.leaf.path, 0) > (d.after or 0)]
        if growing:
            first = growing[0]
            owner = first.leaf.component.removeprefix("hooks of ")
            self._made.left.append(
                Left(
                    "hooks_left",
                    level="advice",
                    component="hooks",
                    paths=(owner,),
                    measured=(
                        f"{first.leaf.path}: {first.before or 0} before evaluate(), {first.after} after it, "
                        f"{counts[first.leaf.path]} after the second call"
                    ),
                    shown_by="the number grows with each call",
                    where=self._line(cut, (first.leaf.path,)),
                )
            )

    def _look_inside(self, cut: _Cut, run: Run) -> None:
        """Whether it matters where evaluation is called between two steps of one ``fit``."""
        reference = halves(self._evidence, double=cut.interposed.double, inside=True)
        if reference.record.raised is not None or not all(reference.steps):
            return
        inside = self._cut("inside", reference)
        try:
            there = inside.interposed.run()
        except EvaluateRaised:
            return
        if not there.halves.between_was_called or not inside.differs(there):
            return
        chosen = [group for group in groups(there.seen.differences) if group.kind in WITHIN_FIT]
        paths = {path for group in chosen for path in group.paths}
        if not chosen or inside.differs(inside.interposed.run(lambda d: d.leaf.path in paths)):
            return
        for group in self._guilty(inside, chosen):
            if not self._set_again(inside, group):
                self._made.left.append(self._described(inside, there, group))

    def _before_first_step(self, cut: _Cut, found: bool) -> Seen | None:
        """Look at evaluation before the first step; what it showed, unless it raises there."""
        first = self._cut("first", self._known())
        try:
            run = first.interposed.run()
        except EvaluateRaised as error:
            self._made.raised_early = None if issubclass(error.what.kind, WANTED) else error.what
            return None
        if not found and not self._made.left:
            self._find(first, run)
        return run.seen

    def _kept_inference_tensor(self, cut: _Cut, run: Run) -> Left:
        raised = run.halves.record.raised
        return Left(
            "inference_tensor_kept",
            paths=run.seen.inference[:4],
            component="inference tensors",
            raised=raised.summary.partition(". ")[0] if raised else "",
            shown_by="without evaluate() the same steps raise nothing",
            where=self._line(cut, run.seen.inference),
        )

    def _described(self, cut: _Cut, run: Run, group: Group) -> Left:
        loop = self._evidence.fresh_loop()
        cause = cause_of(group, len(run.seen.stepped))
        first = group.differences[0]
        raised = run.halves.record.raised
        weight, change = _largest(run.halves.end, cut) if raised is None else ("", 0.0)
        by_step = next((str(place) for place in run.seen.stepped if place.file), "")
        if cause == "state_left" and cut.moment == "between":
            steered = steers(group, self._cut("first", self._known()).interposed, cut.interposed)
            cause = "feedback" if steered else cause
        level: Any = "advice" if cause == "feedback" or self._inside_only(cut, group) else "fault"
        return Left(
            "matters_inside_fit" if self._inside_only(cut, group) else cause,
            level=level,
            component=group.component,
            paths=named(group, loop),
            before=in_words(first.before, first.leaf.kind),
            after=in_words(first.after, first.leaf.kind),
            holder=holder_of(run.seen.holders) if cause == "weights_left" else "",
            steps=len(run.seen.stepped),
            rounds=sum(run.halves.steps[-1:]),
            weight=weight,
            change=change,
            raised=raised.summary if raised is not None else "",
            shown_by=_shown_by(cut, group, raised is not None),
            where=by_step if cause == "evaluation_trains" and by_step else self._line(cut, group.paths),
        )

    def _inside_only(self, cut: _Cut, group: Group) -> bool:
        """A ``fit`` that can be called once may set these anew as it begins; a trainer of another library evaluates in
        the middle of it."""
        called_there = getattr(self._evidence.fresh_loop().evaluate, "within_fit", False)
        return cut.moment == "inside" and group.kind in WITHIN_FIT and not called_there

    def _set_again(self, cut: _Cut, group: Group) -> bool:
        """Whether ``fit`` calls ``train()`` again after steps, as at the start of each epoch: then evaluation belongs
        between epochs, and what it leaves in the middle of one does not matter."""
        if not self._inside_only(cut, group) or group.kind != "mode":
            return False
        record = cut.without.record
        first = next((step.at for step in record.of(Step)), math.inf)
        return any(call.on and call.at > first for call in record.of(ModeCall))

    def _line(self, cut: _Cut, paths: Sequence[str]) -> str:
        place = cut.interposed.up_to_cut().run(watched=paths).seen.place
        return str(place) if place.file else ""


def _inference_mode_left(run: Run) -> Left:
    raised = run.halves.record.raised
    return Left(
        "switch_left",
        component="inference mode",
        paths=("torch.is_inference_mode_enabled()",),
        before="False",
        after="True",
        raised=raised.summary.partition(". ")[0] if raised else "",
        shown_by="it is on after evaluate(), was off before it, and without evaluate() training is another",
    )


def _shown_by(cut: _Cut, group: Group, raises: bool) -> str:
    when = {
        "between": "between two calls of fit",
        "first": "before the first step",
        "inside": "between two steps of one fit",
    }[cut.moment]
    without = "raises, and without it it does not" if raises else "ends elsewhere than without it"
    return (
        f"with evaluate() {when} training {without}; with {group.in_words} put back after evaluate() it ends where it "
        "does without it"
    )


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and same_bits(a, b)


def _largest(end: Mapping[str, torch.Tensor], cut: _Cut) -> tuple[str, float]:
    """The weight that differs by most at the end, relative to its largest entry."""
    found = ("", 0.0)
    for name in sorted(cut.trained):
        mine, other = end.get(name), cut.end.get(name)
        if mine is None or other is None or mine.shape != other.shape or cut.same(mine, other):
            continue
        scale = float(other.abs().max()) or 1.0
        change = float((mine.double() - other.double()).abs().max()) / scale
        if change > found[1] or not found[0]:
            found = (name, change)
    return found
