"""The first step with other labels at the places to be ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.checks.loss.ignored_labels_do_not_count.causes import found
from pytest_trainloop.checks.loss.ignored_labels_do_not_count.label_edits import LabelEdits
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import require_given_data
from pytest_trainloop.instruments.gradients.compare import first_step_difference, optimizers
from pytest_trainloop.runs.batch_stream import first_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

USUAL = -100
"""The label that torch's class losses leave out by default."""

UNKNOWN = -1
"""What many data sets have for "no label"; others have it for a class."""

EQUAL = 1e-9
"""Relative difference of two gradients in float64 up to which they are one: 1e3 eps and more rounding than the sums of
a small model make. A place that counts is one of at most some thousands."""

LINES = 4


@dataclass(frozen=True, slots=True)
class Ignored:
    """The label of one tensor that is to be ignored, how many there are, and whether that is a promise."""

    label: float
    count: int
    promised: bool


def ignored_labels(evidence: Evidence) -> dict[str, Ignored]:
    """The tensors of the batch that hold labels to be ignored, by name."""
    if not evidence.repeatable:
        return {}
    loop = evidence.fresh_loop()
    declared = None if loop.padding is None else loop.padding.ignore_index
    labels: dict[str, Ignored] = {}
    for path, tensor in nested.paths(first_batch(loop)):
        if tensor.dtype not in (torch.int64, torch.int32, torch.int16) or tensor.numel() < 2:
            continue
        values = set(torch.unique(tensor)[:4096].tolist())
        for label in dict.fromkeys((USUAL, USUAL if declared is None else declared, UNKNOWN)):
            others = values - {label}
            # flags of 0 and 1 are masks, whatever is declared; ids may hold the declared label too
            if label in values and others and min(others) >= 0 and not (label >= 0 and values <= {0, 1}):
                promised = label in (USUAL, declared)
                labels[nested.shown(path)] = Ignored(label, int((tensor == label).sum()), promised)
                break
    return labels


def counted_labels(evidence: Evidence) -> Iterator[Finding]:
    if evidence.repeatable:
        require_given_data(evidence, "no label of it is seen")
    labels = evidence.shared(ignored_labels)
    if not labels:
        return
    if evidence.run().raised is not None:
        raise CannotDecide("fit raises, so that no step is compared")
    whole = _edited(evidence, LabelEdits({}))
    named: set[str] = set()
    for tensor, ignored in labels.items():
        given, edits = {tensor: ignored.label}, LabelEdits({tensor: ignored.label})
        difference = _differs(whole, _edited(evidence, edits))
        # what is never compared with the label holds ids or counts (odd: counts_that_hold_the_ignored_label)
        if not difference or (ignored.label >= 0 and not edits.asked):
            continue
        for line in list(edits.edited)[:LINES]:
            placeholder = line in edits.placeholders
            # a class of its own is used as such (odd: three_way_labels_from_minus_one)
            if line in named or not (ignored.promised or placeholder):
                continue
            only = frozenset({line})
            difference = _differs(whole, _edited(evidence, LabelEdits(given, only)))
            if not difference:
                continue
            elsewhere = LabelEdits(given, only, others=True)
            inverted = not _differs(whole, _edited(evidence, elsewhere)) and bool(elsewhere.edited)
            facts = {"tensor": tensor, "label": f"{ignored.label:g}", "difference": difference}
            if inverted:
                masks = edits.compared - {line} or edits.compared
                facts |= {"change": next(iter(masks))} if len(masks) == 1 else {}
                yield found("only_ignored_labels_count", line, (tensor,), **facts)
            else:
                facts |= {"count": ignored.count} | ({} if ignored.promised else {"level": "advice"})
                variant = "placeholders" if placeholder else "the label itself"
                yield found("ignored_labels_count", line, (tensor,), variant, **facts)
            named.add(line)
            break


def _edited(evidence: Evidence, edits: LabelEdits) -> Record:
    """The first step, with these edits of the labels."""
    return evidence.rerun(
        double=True,
        enough=lambda record: record.rounds >= 1,
        contexts=edits.contexts,
        before_item=edits.take,
        may_raise=True,
        varied="with other labels at ignored places",
    )


def _differs(whole: Record, edited: Record) -> float:
    """The largest relative difference of the gradients that an optimizer's first step reads; 0 where it is rounding, or
    where the loop refuses the labels."""
    if edited.raised is not None:
        return 0.0
    found = [first_step_difference(whole, edited, optimizer) for optimizer in optimizers(whole)]
    largest = max((d for d in found if d == d), default=0.0)
    return largest if largest > EQUAL else 0.0
