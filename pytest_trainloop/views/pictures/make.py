"""All pictures of one loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from pytest_trainloop.core.errors import BrokenCheck
from pytest_trainloop.views.loop_facts.make import CANNOT_RUN, card_from, card_of_none, facts_of
from pytest_trainloop.views.pictures import (
    batches,
    compared,
    dependence,
    gradients,
    learning_rates,
    losses,
    step,
    tensors,
)
from pytest_trainloop.views.pictures.report_inputs import ReportInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pytest_trainloop.core.finding import Result
    from pytest_trainloop.judging.battery import Subject
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.loop_facts.page import Card
    from pytest_trainloop.views.pictures.picture import Picture

KINDS: tuple[Callable[[Facts, ReportInputs], Iterator[Picture]], ...] = (
    step.one_step,
    dependence.rows_reached,
    dependence.positions_reached,
    dependence.segments_reached,
    losses.one_batch,
    losses.loss,
    losses.two_runs,
    compared.baseline,
    compared.resumed,
    compared.evaluated,
    compared.accumulated,
    compared.trimmed,
    compared.checkpointed,
    compared.parity,
    compared.graphs,
    learning_rates.lrs,
    learning_rates.lrs_ahead,
    gradients.gradient_norm,
    tensors.updates,
    gradients.loss_scale,
    tensors.units,
    tensors.output_sizes,
    tensors.gradient_sizes,
    tensors.weight_sizes,
    batches.padding,
    batches.shapes,
)
"""Each gives the pictures of one thing, none where the loop does not have it, in the order of the report."""


def card_and_pictures(
    subject: Subject, results: Mapping[str, Result], *, base: Path | None = None
) -> tuple[Card, list[Picture]]:
    """The card of this loop as ``card_of`` makes it, and its pictures, from one further run for both."""
    try:
        facts = facts_of(
            subject, results, base=base, measured=lambda evidence: evidence.shared(ReportInputs.of).measured
        )
    except CANNOT_RUN as reason:
        return card_of_none(reason), []
    card = card_from(facts)
    return card, pictures_of(facts, facts.evidence.shared(ReportInputs.of))


def pictures_of(facts: Facts, looked: ReportInputs) -> list[Picture]:
    """The pictures of the loop that these facts are about; one that cannot be made is a warning."""
    found: list[Picture] = []
    for kind in KINDS:
        try:
            found += kind(facts, looked)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"a picture could not be made; {reason}; please report it", BrokenCheck, stacklevel=2)
    if looked.why:
        warnings.warn(
            f"not all was looked at for the pictures; {looked.why}; please report it", BrokenCheck, stacklevel=2
        )
    return found
