"""The lines "batch" and "data"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.recording.events import LossCall
from pytest_trainloop.views.loop_facts.facts import none_seen
from pytest_trainloop.views.loop_facts.page import Line
from pytest_trainloop.views.loop_facts.step import backwards_a_step, batches_a_step
from pytest_trainloop.views.loop_facts.words import marked, numbered, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.loop_facts.measured import Item

MOST_LEAVES = 4
"""Tensors of a batch that are shown."""


def batch(facts: Facts) -> Iterator[Line]:
    items = facts.measured.items
    if not items:
        yield none_seen("batch", facts.measured.why)
        return
    first = items[0]
    passes = backwards_a_step(facts.record)
    usual = passes.most_common(1)[0][0] if passes else 1
    rows = sorted({item.rows for item in items})
    parts = []
    if rows and rows[-1]:
        of = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else str(rows[0])
        taken = min(batches_a_step(facts.record) or usual, usual) or 1  # those between two steps of one optimizer
        passes_too = f" in {usual} backward passes" if taken < usual else ""
        several = f"{taken} x {of} = {taken * rows[-1]}" if taken > 1 else of
        parts.append(f"{several} rows a step{passes_too}")
    leaves = [f"{path} {list(shape)} {dtype}" for path, shape, dtype in first.leaves[:MOST_LEAVES]]
    more = len(first.leaves) - MOST_LEAVES
    parts.append(", ".join(leaves) + (f" and {more} more" if more > 0 else ""))
    if counted := _counted(facts, items):
        parts.append(counted)
    others = [f"{often} of {passes.total()} steps on {n}" for n, often in sorted(passes.items()) if n != usual]
    if others:
        parts.append(f"backward passes a step: {usual}, but {', '.join(others)} *")
    yield Line(label="batch", text="; ".join(parts), where=facts.field("batch"), odd=bool(others))


def _counted(facts: Facts, items: Sequence[Item]) -> str:
    """How many targets count, by the label that the loss ignores."""
    labels = {call.ignore_index for call in facts.record.of(LossCall) if call.ignore_index is not None}
    for label in sorted(labels):
        for path, shape, _ in items[0].leaves:
            ignored = [item.counts.get(label, {}).get(path, 0) for item in items]
            if any(ignored) and shape:
                sizes = [_size(s) for item in items for p, s, _ in item.leaves if p == path]
                counted = sum(sizes) - sum(ignored)
                return f"{counted:,} of {sum(sizes):,} entries of {path} counted ({percent(counted / sum(sizes))})"
    return ""


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def data(facts: Facts) -> Iterator[Line]:
    items = facts.measured.items
    if not items:
        yield none_seen("data", facts.measured.why)
        return
    own = "batches" in facts.measured.given
    first = items[: facts.measured.length or len(items)]
    different = len({item.identity for item in first})
    repeats = own and different < len(first)
    parts = [marked(f"{different} different in {numbered(len(first), 'batch')}", repeats)]
    parts.append(facts.measured.loader if own else "made from batch=: give batches= to see the project's own")
    found = facts.findings("data_order")
    parts.extend(f"{_short(finding)} *" for finding in found)
    loader = facts.where(facts.measured.made.loader()) if facts.measured.loader else ""
    where = loader or facts.field("batches" if own else "batch")
    yield Line(label="data", text="; ".join(filter(None, parts)), where=where, odd=repeats or bool(found))


def _short(finding: Finding) -> str:
    return f"{finding.cause}: {', '.join(finding.culprits[:2])}" if finding.culprits else finding.cause
