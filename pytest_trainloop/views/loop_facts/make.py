"""The card of one loop, from its evidence and the results of its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import BrokenRun, CannotDecide, TimeRanOut, UsageError, UserCodeError
from pytest_trainloop.views.loop_facts import batch, gradients, learning_rates, loss, model, ranks, state, step
from pytest_trainloop.views.loop_facts.facts import Facts
from pytest_trainloop.views.loop_facts.measured import Measured
from pytest_trainloop.views.loop_facts.page import Card, Line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.judging.battery import Subject
    from pytest_trainloop.runs.evidence import Evidence

LINES: tuple[Callable[[Facts], Iterator[Line]], ...] = (
    model.model,
    model.optimizer,
    step.one_step,
    batch.batch,
    gradients.clip,
    learning_rates.schedule,
    loss.loss,
    loss.terms,
    gradients.gradient,
    model.precision,
    gradients.units,
    state.moves,
    batch.data,
    state.evaluation,
    state.checkpoint,
    ranks.ranks,
    state.decided,
)
"""Each gives the lines of one label, in the order of the page."""

CANNOT_RUN = (UsageError, UserCodeError, TimeRanOut, BrokenRun, CannotDecide)
"""What says that a loop cannot be run, and why."""


def card_of(subject: Subject, results: Mapping[str, Result] | None = None, *, base: Path | None = None) -> Card:
    """The card of this loop; ``results`` are those of the checks that were run, by check, and ``base`` is the
    folder that files are shown relative to (default: the working directory).

    A loop that cannot be run has a card of one line that says why.
    """
    try:
        facts = facts_of(subject, results, base=base)
    except CANNOT_RUN as reason:
        return card_of_none(reason)
    return card_from(facts)


def facts_of(
    subject: Subject,
    results: Mapping[str, Result] | None = None,
    *,
    base: Path | None = None,
    measured: Callable[[Evidence], Measured] = lambda evidence: evidence.shared(Measured.of),
) -> Facts:
    """What the lines are made from. Raises one of ``CANNOT_RUN`` for a loop that cannot be run."""
    evidence = subject.evidence
    record = evidence.run()
    return Facts(evidence, record, measured(evidence), dict(results or {}), base or Path.cwd())


def card_of_none(reason: Exception) -> Card:
    """The card of a loop that cannot be run."""
    return Card((Line(label="run", text=f"none seen: {str(reason).splitlines()[0]}", odd=True),))


def card_from(facts: Facts) -> Card:
    lines = [line for kind in LINES for line in kind(facts)]
    if (raised := facts.record.raised) is not None:
        text = f"fit raised {raised.summary} *"
        lines.insert(0, Line(label="run", text=text, where=facts.where(raised.place), odd=True))
    return Card(tuple(lines))
