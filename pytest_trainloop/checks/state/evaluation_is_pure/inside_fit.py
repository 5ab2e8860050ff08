"""Evaluations inside ``fit`` that seed a global generator with a constant.

Such an evaluation cannot be taken out of ``fit``. What it does to the generators shows all the same: their states are
noted after each optimizer step and before the next training pass. Where evaluation comes between the two, and leaves
one and the same state although it found another each time, it seeds; training that seeds itself would leave it where
no evaluation comes between them, too.
"""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.state.evaluation_is_pure.generators import generator_of, global_states, noted_seeds
from pytest_trainloop.checks.state.evaluation_is_pure.reseeding import Reseeding
from pytest_trainloop.recording.events import Step
from pytest_trainloop.recording.hooks import after_modules, after_steps, before_modules
from pytest_trainloop.recording.train_mode import trains
from pytest_trainloop.runs.hooks import hooked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from pytest_trainloop.checks.state.evaluation_is_pure.generators import Seed
    from pytest_trainloop.finding import Level
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.recording.watch import Watch
    from pytest_trainloop.runs.evidence import Evidence

EPOCH = 3
"""Steps of an epoch in the run that is looked at, so that it has several."""

EPOCHS = 3


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
    seeds: list[Seed] = field(default_factory=list)


class SeedsInFit:
    """Notes the states of the global generators around what comes between training steps."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._depth = 0

    @classmethod
    def of(cls, evidence: Evidence) -> SeedsInFit:
        """The watched run made again, with short epochs where it evaluates once; of a run that cannot be repeated,
        what its instrument saw."""
        record = evidence.run()
        count = EPOCH * max(1, round(record.items / max(record.rounds, 1)))
        found = cls()
        if len(evaluated_after(record)) > 1:
            evidence.rerun(contexts=found.contexts)
        else:
            evidence.rerun(count=count, enough=lambda r: r.rounds >= EPOCH * EPOCHS, contexts=found.contexts)
        return found

    def contexts(self, watch: Watch) -> Iterable[contextlib.AbstractContextManager[Any]]:
        return (self._watching(watch),)

    @contextlib.contextmanager
    def _watching(self, watch: Watch) -> Iterator[None]:
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

        def seeded(seed: Seed) -> None:
            if self.intervals and not self.intervals[-1].leaving and not watch.is_suspended:
                self.intervals[-1].seeds.append(seed)

        hooks = hooked(after_steps(stepped), before_modules(called), after_modules(left, always_call=True))
        with hooks, noted_seeds(seeded):
            yield

    def found(self) -> Reseeding | None:
        """A generator that evaluations leave in one state."""
        whole = [interval for interval in self.intervals if interval.leaving]
        evaluated = [interval for interval in whole if interval.evaluated]
        for name in evaluated[0].entering if len(evaluated) > 1 else ():
            same = {interval.leaving[name] for interval in evaluated}
            if len(same) > 1 or len({interval.entering[name] for interval in evaluated}) == 1:
                continue
            others = [interval for interval in whole if not interval.evaluated]
            if any(interval.leaving[name] in same for interval in others):
                continue  # training seeds itself
            return self._described(name, evaluated, others)
        return None

    @staticmethod
    def _described(name: str, evaluated: list[Interval], others: list[Interval]) -> Reseeding:
        draws = any(i.after_training and i.after_training[name] != i.entering[name] for i in others)
        by_evaluation = all(i.seeded_first for i in evaluated)
        level: Level = "fault" if draws and by_evaluation else "advice"
        seed = next((s for i in evaluated for s in i.seeds if generator_of(s.call) == name), None)
        if level == "fault":
            shown = (
                f"the training pass after each of {len(evaluated)} evaluations finds it in one state, those after no "
                "evaluation in others; training draws from it"
            )
        elif not by_evaluation or not others:
            shown = (
                "no step without an evaluation before it was seen, or no seed before its passes; training may seed too"
            )
        else:
            shown = "training draws nothing from it: nothing depends on it yet"
        return Reseeding(
            which=name,
            level=level,
            constant=True,
            call=seed.call if seed else "fit",
            where=str(seed.place) if seed and seed.place.file else "",
            measured=f"{len(evaluated)} evaluations inside fit found {name} in different states and left it in one",
            shown_by=shown,
        )


def reseeding_inside(evidence: Evidence) -> Reseeding | None:
    """What evaluations inside ``fit`` do to the global generators."""
    record = evidence.run()
    if record.raised is not None or (evidence.repeatable and not evaluated_after(record)):
        return None
    return evidence.shared(SeedsInFit.of).found()


def evaluated_after(record: Record) -> set[int]:
    """The numbers of steps after which there is a pass that evaluates: in evaluation mode or without gradients, and
    answered by no backward pass."""
    steps = [step.at for step in record.of(Step) if not step.nested]
    passes = [f.at for f in record.root_forwards() if not (f.training and f.grad_enabled) and not f.answered]
    return {bisect.bisect(steps, at) for at in passes} - {0}
