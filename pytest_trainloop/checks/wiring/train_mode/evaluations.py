"""Evaluations in training mode: forward passes whose results are used, and not for a gradient.

Further runs decide whether they are: with other results in their place the loop backpropagates the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_trainloop.checks.wiring.train_mode.line_probe import LineProbe
from pytest_trainloop.checks.wiring.train_mode.phases import phases
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.recording.events import Backward, Event, Move, Step
from pytest_trainloop.runs.run import fit_of
from pytest_trainloop.runs.user_traceback import user_error
from pytest_trainloop.whose import reraise_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.finding import Level, UserError
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.events import Forward, Place
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Forward passes on one line in training mode that no backward pass follows."""

    modules: tuple[str, ...]
    """Modules below the model that act differently in the two modes."""
    calls: int
    steps: int
    """Optimizer steps of the same run."""
    place: Place
    site: object

    @property
    def in_phases(self) -> bool:
        """Whether they do not simply come once with each step, as a second look at the training batch would."""
        return abs(self.calls - self.steps) > 1


def evaluations(evidence: Evidence) -> Iterator[tuple[Evaluation, Level]]:
    """Evaluations inside ``fit`` that run in training mode, each with its level."""
    if not evidence.repeatable:
        if passes := without_backward(evidence.run()):
            raise CannotDecide(
                f"whether the forward passes at {str(passes[0].place).partition('   ')[0]}, after which nothing is "
                "backpropagated, evaluate takes further runs: return a TrainLoop from a marked test"
            )
        return
    known: set[object] = set()
    for record, plan in phases(evidence):
        for found in without_backward(record):
            level = None if found.site in known else _level(evidence, found, record, plan)
            known.add(found.site)
            if level:
                yield found, level


def without_backward(record: Record) -> list[Evaluation]:
    """Such passes of a model with parameters (one that trains, or an average of it), by the line that makes them."""
    by_site: dict[object, list[Forward]] = {}
    for f in record.root_forwards():
        checkpointed = any("checkpoint" in file for file, _ in f.site)
        if f.training and f.in_training and f.below and not checkpointed:
            by_site.setdefault(f.site, []).append(f)
    steps = sum(1 for s in record.of(Step) if s.full and not s.nested)
    return [
        Evaluation(fs[0].in_training, len(fs), steps, fs[0].place, site)
        for site, fs in by_site.items()
        if not any(f.answered for f in fs)
    ]


def _level(evidence: Evidence, found: Evaluation, first: Record, plan: RunPlan) -> Level | None:
    """Whether the passes evaluate: a score is made of their results, and no gradient.

    With other results in their place the loop backpropagates the same, at least until they make it set another learning
    rate or put other weights in place. None where the mode changes nothing, or where the same input is given several
    times (dropout as a sample). Advice where they come once with each step, or from the batch that was trained on; and
    where training mode may be meant: the model returns another structure then (losses), or draws by a flag of its own.
    """
    replaced = LineProbe(found.site, "other results")
    training, evaluating = LineProbe(found.site), LineProbe(found.site, "evaluation mode")
    other = evidence.rerun(plan, contexts=replaced.contexts, may_raise=True)
    used = replaced.scored or replaced.taken_out
    if other.raised is not None or not used or not _same_until_steered(first, other):
        return None
    evidence.rerun(plan, contexts=training.contexts)
    if evidence.rerun(plan, contexts=evaluating.contexts, may_raise=True).raised is not None:
        return None
    if training.same_result(evaluating) or (training.samples and not training.normed):
        return None
    if not replaced.scored and not training.held_out:
        return None
    meant = training.shape != evaluating.shape or not (training.dropped or training.normed)
    return "advice" if meant or replaced.on_training_batch or not found.in_phases else "fault"


def trained_on(evidence: Evidence, site: object, first: Record, plan: RunPlan) -> bool:
    """Whether what the loop backpropagates depends on the results of the forward passes on a line: rollouts, targets
    and pseudo-labels are no evaluation."""
    other = evidence.rerun(plan, contexts=LineProbe(site, "other results").contexts, may_raise=True)
    return not _same_until_steered(first, other)


def _same_until_steered(first: Record, other: Record) -> bool:
    """Whether two runs backpropagate the same, until one sets another learning rate or writes weights."""
    for mine, theirs in zip(_course(first), _course(other), strict=False):
        if isinstance(mine, Backward) and isinstance(theirs, Backward):
            if [r.value for r in mine.roots] != [r.value for r in theirs.roots]:
                return False
        elif isinstance(mine, Step) and isinstance(theirs, Step):
            if mine.lrs != theirs.lrs:
                return True
        else:
            return isinstance(mine, Move) or isinstance(theirs, Move)
    return True


def _course(record: Record) -> list[Event | Move]:
    """Backward passes, steps, and writes of weights outside steps, in order."""
    events: list[Event | Move] = [*record.of(Backward), *record.of(Step), *(m for m in record.moves if m.by is None)]
    return sorted(events, key=lambda event: event.at)


def declared_evaluation(evidence: Evidence) -> tuple[Forward, Level] | None:
    """The first forward pass in training mode that the declared ``evaluate`` makes, where it makes a score of it and
    trains nothing of its own. Advice where neither dropout nor a norm of torch's was active: a detector that gives its
    losses in training mode only is asked for them so.

    Raises ``CannotDecide`` where it raises: that is for ``evaluation_is_pure`` to say.
    """
    watches: list[Watch] = []
    since: list[int] = []
    raised: list[UserError] = []

    def then_evaluate(loop: TrainLoop) -> Callable[[Any], Any]:
        own, evaluate = fit_of(loop), loop.evaluate

        def fit(batches: Any) -> None:
            own(batches)
            since.append(watches[-1].tick())
            if evaluate is not None:
                try:
                    evaluate()
                except Exception as error:  # of the project's evaluate: evaluation_is_pure says so
                    reraise_ours(error)
                    raised.append(user_error(error, "evaluate"))

        return fit

    whole = replace(evidence.plan(), prepare=watches.append, fit=then_evaluate)
    plan = replace(whole, enough=lambda r: r.rounds >= 1)
    record = evidence.rerun(plan)
    if not since:  # fit raised: it may not stand so few batches
        plan, record = whole, evidence.rerun(whole)
    if raised:
        raise CannotDecide(f"evaluate raised {raised[0].summary} (see evaluation_is_pure)")
    if not since or any(b.at > since[0] for b in record.of(Backward)):
        return None
    forwards = [f for f in record.root_forwards() if f.at > since[0]]
    found = next((f for f in forwards if f.training and f.in_training and f.below), None)
    if found is None:
        return None
    probe = LineProbe(found.site, "other results")
    evidence.rerun(plan, contexts=probe.contexts, may_raise=True)
    if not probe.scored:
        return None
    return found, "fault" if probe.dropped or probe.normed else "advice"
