"""Training and evaluation inside one loop: in which mode each of them runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.wiring.train_mode.evaluations import (
    Spoiled,
    ThenEvaluate,
    trained_on,
    verdict,
    without_backward,
)
from pytest_trainloop.checks.wiring.train_mode.modes import Kinds, matters, trained_in_eval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.checks.wiring.train_mode.evaluations import Evaluation, Verdict
    from pytest_trainloop.checks.wiring.train_mode.modes import InEval
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

EPOCH = 3
"""Steps of an epoch in a run that is to have several."""


class Phases:
    """The runs behind ``train_mode``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._brief: Record | None = None

    def in_eval(self) -> tuple[InEval | None, float, Verdict]:
        """Modules in evaluation mode in training passes, and by how much training mode changes what is
        backpropagated. Advice where the loop puts the model so to make its own training data (rollouts): it may want
        both passes alike."""
        for record, plan in self._phases():
            if not any(f.in_eval and f.grad_enabled for f in record.root_forwards()):
                continue
            kinds = Kinds()
            self._run(replace(plan, prepare=kinds, enough=lambda r: r.rounds >= 1))
            found = trained_in_eval(record, kinds.norms, kinds.own_train)
            if found:
                own = found.unscored is not None and trained_on(found.unscored, record, plan, self._run)
                change = matters(record, plan, self._run, found.modules)
                return found, change, "advice" if own else "fault"
        return None, 0.0, "fault"

    def evaluations(self) -> Iterator[tuple[Evaluation, Verdict]]:
        """Evaluations inside ``fit`` that run in training mode."""
        known: set[object] = set()
        for record, plan in self._phases():
            for found in without_backward(record):
                level = None if found.site in known else verdict(found, record, plan, self._run)
                known.add(found.site)
                if level:
                    yield found, level

    def _phases(self) -> Iterator[tuple[Record, RunPlan]]:
        """The watched run, and one over so few batches that its epochs and what follows them are watched as well."""
        record, plan = self._seen, self._plan
        yield record, plan
        if any(f.in_training or f.in_eval for f in record.root_forwards()) and record.rounds:
            count = EPOCH * max(1, round(record.items / record.rounds))
            brief = replace(plan, count=count, enough=lambda r: r.rounds >= 2 * EPOCH)
            if self._brief is None:
                self._brief = self._run(brief)
            yield self._brief, brief

    def evaluate_in_training_mode(self) -> tuple[tuple[str, ...], str]:
        """What acts by mode and is in training mode when the declared ``evaluate`` makes a score, and where it is
        called."""
        then = ThenEvaluate()
        plan = then.plan(self._plan)
        for forward in then.forwards(self._run(plan)):
            if forward.training and forward.in_training and forward.below:
                spoiled = Spoiled(forward.site)
                self._run(replace(plan, contexts=spoiled.contexts))
                return (forward.in_training, str(forward.place)) if spoiled.scored else ((), "")
        return (), ""
