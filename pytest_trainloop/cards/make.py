"""The card of one loop, from its evidence and the results of its checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_trainloop.cards import batch, gradients, loss, model, rates, state, step
from pytest_trainloop.cards.facts import Facts
from pytest_trainloop.cards.measured import Measured
from pytest_trainloop.cards.page import Card, Line
from pytest_trainloop.errors import BrokenRun, CannotDecide, TimeRanOut, UsageError, UserCodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_trainloop.battery import Subject
    from pytest_trainloop.finding import Result

LINES: tuple[Callable[[Facts], Iterator[Line]], ...] = (
    model.model,
    model.optimizer,
    step.one_step,
    batch.batch,
    gradients.clip,
    rates.schedule,
    loss.loss,
    loss.terms,
    gradients.gradient,
    model.precision,
    gradients.units,
    state.moves,
    batch.data,
    state.evaluation,
    state.checkpoint,
    state.decided,
)
"""Each gives the lines of one label, in the order of the page."""


def card_of(subject: Subject, results: Mapping[str, Result] | None = None, *, base: Path | None = None) -> Card:
    """The card of this loop; ``results`` are those of the checks that were run, by check, and ``base`` is the
    folder that files are shown relative to (default: the working directory).

    A loop that cannot be run has a card of one line that says why.
    """
    try:
        evidence = subject.evidence
        record = evidence.run()
    except (UsageError, UserCodeError, TimeRanOut, BrokenRun, CannotDecide) as reason:
        return Card((Line(label="run", text=f"none seen: {str(reason).splitlines()[0]}", odd=True),))
    facts = Facts(evidence, record, evidence.shared(Measured.of), dict(results or {}), base or Path.cwd())
    lines = [line for kind in LINES for line in kind(facts)]
    if record.raised is not None:
        text = f"fit raised {record.raised.summary} *"
        lines.insert(0, Line(label="run", text=text, where=facts.where(record.raised.place), odd=True))
    return Card(tuple(lines))
