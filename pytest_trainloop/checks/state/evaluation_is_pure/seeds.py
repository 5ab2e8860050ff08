"""Evaluation that leaves a global random generator in one state, whatever it was before: ``evaluate()``, and what
``fit`` itself evaluates.

An evaluation inside ``fit`` is not taken out. The generators' states are noted after each optimizer step and before the
next training pass. Where an evaluation comes between the two and leaves one and the same state, although it found
another each time, it seeds. Training that seeds itself leaves that state without an evaluation, too.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.evaluation_is_pure.calls_in_fit import CallsInFit
from pytest_trainloop.checks.state.evaluation_is_pure.causes import found
from pytest_trainloop.checks.state.evaluation_is_pure.interposed import SEEDS, Run, global_states, noted_calls
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.hooks import after_modules, after_steps, before_modules
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import hooked
from pytest_trainloop.runs.split_run import halves

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Collection, Iterable, Iterator

    from torch import nn

    from pytest_trainloop.checks.state.evaluation_is_pure.calls_in_fit import Key
    from pytest_trainloop.checks.state.evaluation_is_pure.interposed import Call, Cut
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

OTHER = 10
"""Added to the seed at the cut: no half of a run has this seed."""

EPOCH, EPOCHS = 3, 3
"""Steps of an epoch in the run that is looked at, so that it has several."""


def seeded_between(cut: Cut, first: Run, other: Run | None) -> Iterator[Finding]:
    """What ``evaluate()`` does to the global generators, from two runs that called it at different steps.

    It is a fault where training differs between two random states at the cut, and no longer does once ``evaluate()``
    is called there, by a seed that is the same at every step.
    """

    def left_alike(names: Iterable[str], another: Run | None) -> list[str]:
        if another is None:
            return []
        differ = [name for name in names if first.entering[name] != another.entering.get(name)]
        return [name for name in differ if first.leaving[name] == another.leaving.get(name)]

    candidates = [name for name in first.entering if first.entering[name] != first.leaving[name]]
    if not candidates or not (first.seeded or left_alike(candidates, other)):
        return
    if not (names := left_alike(candidates, cut.run(to_cut=True, cut_seed=OTHER))):
        return
    constant, parts, variant = bool(left_alike(names, other)), list[str](), ""
    if not constant:
        variant = "another seed each time"
    else:
        without = halves(cut.evidence, double=cut.without.double, cut_seed=OTHER)
        if not (parts := without.differ(cut.end, sorted(cut.trained))):
            variant = "nothing draws"
        else:
            mine, theirs = (cut.run(cut_seed=seed, seed_after=False).halves for seed in (0, OTHER))
            variant = "another generator" if mine.differ(theirs.end, cut.trained) else ""
    seed = next((s for s in reversed(first.seeded) if s.generator == names[0]), None)
    facts = {"which": names[0], "constant": constant, "parts": "".join(parts[:1])}
    call, level = seed.name if seed else "evaluate()", "advice" if variant else "fault"
    yield found("reseeds", seed.where if seed else "", (call,), variant, level=level, **facts)


@dataclass(slots=True)
class Interval:
    """From an optimizer step to the training pass that follows it."""

    entering: dict[str, object]
    leaving: dict[str, object] = field(default_factory=dict)
    after_training: dict[str, object] = field(default_factory=dict)
    """The states after the step of that pass."""
    evaluated: bool = False
    seeded_first: bool = False
    """Whether a seed was set before a pass that evaluates: after it, training may have set its own."""
    seeds: list[Call] = field(default_factory=list)


class SeedsInFit:
    """Notes the states of the global generators around what comes between training steps."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self.evaluations: Collection[Key] = ()
        """The functions of the project's that only evaluate."""
        self.evaluates = False
        """Whether a model that trains is called without gradients and in evaluation mode."""
        self._depth = 0

    @classmethod
    def of(cls, evidence: Evidence) -> SeedsInFit:
        """The watched run made again, with short epochs where it evaluates once; of a run that cannot be repeated,
        what its instrument saw."""
        seen, calls = cls(), CallsInFit()
        record = evidence.rerun(
            **changes_of_plan(evidence), contexts=lambda watch: (*seen.contexts(watch), *calls.contexts(watch))
        )
        seen.evaluations, seen.evaluates = calls.evaluations(record)
        return seen

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if not watch.is_suspended and watch.full:
                states = global_states()
                if self.intervals and self.intervals[-1].leaving and not self.intervals[-1].after_training:
                    self.intervals[-1].after_training = states
                self.intervals.append(Interval(states))

        def called(module: nn.Module, _args: Any) -> None:
            self._depth += 1
            if self._depth > 1 or watch.is_suspended or not self.intervals or not watch.full:
                return
            now = self.intervals[-1]
            if not trains(module) or not torch.is_grad_enabled():
                now.evaluated = now.evaluated or not now.leaving
                now.seeded_first = now.seeded_first or bool(now.seeds)
            elif not now.leaving:
                now.leaving = global_states()

        def left(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._depth = max(0, self._depth - 1)

        def seeded(seed: Call) -> None:
            if self.intervals and not self.intervals[-1].leaving and not watch.is_suspended:
                self.intervals[-1].seeds.append(seed)

        hooks = hooked(after_steps(stepped), before_modules(called), after_modules(left, always_call=True))
        return hooks, noted_calls(SEEDS, seeded)


def seeded_inside(evidence: Evidence) -> list[Finding]:
    """A generator that the evaluations inside ``fit`` leave in one state."""
    record = evidence.run()
    if record.raised is not None or (evidence.repeatable and not evaluates(record)):
        return []
    whole = [interval for interval in evidence.shared(SeedsInFit.of).intervals if interval.leaving]
    evaluated = [interval for interval in whole if interval.evaluated]
    others = [interval for interval in whole if not interval.evaluated]
    for name in evaluated[0].entering if len(evaluated) > 1 else ():
        left = {interval.leaving[name] for interval in evaluated}
        if len(left) > 1 or len({interval.entering[name] for interval in evaluated}) == 1:
            continue
        if any(interval.leaving[name] in left for interval in others):
            continue  # training seeds itself
        if not others or not all(interval.seeded_first for interval in evaluated):
            variant = "inside, not shown"
        elif any(i.after_training and i.after_training[name] != i.entering[name] for i in others):
            variant = "inside"
        else:
            variant = "inside, nothing draws"
        seed = next((s for i in evaluated for s in i.seeds if s.generator == name), None)
        facts = {"level": "fault" if variant == "inside" else "advice", "which": name, "evaluations": len(evaluated)}
        call = seed.name if seed else "fit"
        return [found("reseeds", seed.where if seed else "", (call,), variant, constant=True, **facts)]
    return []


def changes_of_plan(evidence: Evidence) -> dict[str, Any]:
    """Short epochs for a run that evaluates once."""
    record = evidence.run()
    if len(evaluated_after(record)) > 1:
        return {}
    count = EPOCH * max(1, round(record.items / max(record.rounds, 1)))
    return {"count": count, "enough": lambda r: r.rounds >= EPOCH * EPOCHS}


def evaluates(record: Record) -> bool:
    """Whether something was evaluated after a step, or switched to evaluation mode when passes were no longer seen."""
    return record.evaluates_late or bool(evaluated_after(record))


def evaluated_after(record: Record) -> set[int]:
    """The numbers of steps after which there is a pass that evaluates: in evaluation mode or without gradients, and
    answered by no backward pass."""
    steps = [step.at for step in record.of(Step) if not step.nested]
    passes = [f.at for f in record.root_forwards() if not (f.training and f.grad_enabled) and not f.answered]
    return {bisect.bisect(steps, at) for at in passes} - {0}
