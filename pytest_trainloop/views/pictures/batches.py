"""How long the rows of the batches are, and how much of them is padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.views.loop_facts.words import numbered, percent
from pytest_trainloop.views.pictures.picture import Axis, Bar, Picture, curve, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.report_inputs import Fed, ReportInputs

MOST_BINS = 16
"""Bars of the lengths."""

PADDING = Axis(title="share of the positions that are padding", unit="%")


def padding(facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    """Padding of each different batch, and the lengths of the rows."""
    known = _different(facts, looked)
    lengths = [n for fed in known for n in fed.lengths]
    positions = sum(len(fed.lengths) * fed.padded_to for fed in known)
    if not lengths or sum(lengths) == positions:
        return
    share = 1 - sum(lengths) / positions
    first = next(fed for fed in known if fed.lengths)
    yield Picture(
        key="padding",
        kind="bars",
        title="Padding of the batches",
        look="Little is padding; batches of rows of like length have less, and train faster for it.",
        of=f"{numbered(len(known), 'different batch')} of a run like the watched one",
        checks=("padding_invariance", "edge_batches"),
        where=facts.field("padding") or facts.field("batches") or facts.field("batch"),
        x=PADDING,
        labels=tuple(f"batch {n}" for n in range(1, len(known) + 1)),
        bars=(Bar(name="padding", values=tuple(_share(fed) for fed in known)),),
        note=f"{percent(share)} of all positions; {first.reason}",
    )
    yield _lengths(known, lengths)


def _different(facts: Facts, looked: ReportInputs) -> list[Fed]:
    """The batches that say which of their positions are padding, each different one once."""
    found: dict[str, Fed] = {}
    for item, fed in zip(facts.measured.items, looked.batches, strict=False):
        if fed.lengths:
            found.setdefault(item.identity, fed)
    return list(found.values())


def _share(fed: Fed) -> float | None:
    return number(100 * (1 - sum(fed.lengths) / (len(fed.lengths) * fed.padded_to)))


def _lengths(known: Sequence[Fed], lengths: Sequence[int]) -> Picture:
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // MOST_BINS))
    starts = range(low, high + 1, width)
    labels = [str(at) if width == 1 else f"{at} to {min(at + width - 1, high)}" for at in starts]
    return Picture(
        key="lengths",
        kind="bars",
        title="Lengths of the rows",
        look="Lengths are spread over what the batch is padded to; one row far longer than all others pads them all.",
        of=f"{numbered(len(lengths), 'row')} of {numbered(len(known), 'different batch')}",
        checks=("padding_invariance", "edge_batches", "segment_independence"),
        x=Axis(title="rows"),
        labels=tuple(labels),
        bars=(Bar(name="rows", values=tuple(float(sum(at <= n < at + width for n in lengths)) for at in starts)),),
        note=f"padded to {', '.join(map(str, sorted({fed.padded_to for fed in known})[:4]))} positions",
    )


def shapes(facts: Facts, looked: ReportInputs) -> Iterator[Picture]:
    """The sizes of the axes that differ from batch to batch, where the batches say nothing about padding."""
    if _different(facts, looked) or len(looked.batches) < 2:
        return
    leaves: dict[tuple[str, int], dict[int, int]] = {}
    for at, fed in enumerate(looked.batches, 1):
        for name, shape in fed.shapes:
            for axis, size in enumerate(shape):
                leaves.setdefault((name, axis), {})[at] = size
    moving = {key: sizes for key, sizes in leaves.items() if len(set(sizes.values())) > 1}
    by_sizes: dict[tuple[int, ...], tuple[str, int]] = {}
    for key, sizes in moving.items():
        by_sizes.setdefault(tuple(sizes.values()), key)
    if by_sizes:
        yield Picture(
            key="shapes",
            kind="curves",
            title="Sizes of the batches",
            look="Rows are as many in each batch but the last; lengths differ as the data do.",
            of=f"{numbered(len(looked.batches), 'batch')} of a run like the watched one",
            checks=("edge_batches", "accumulation_equivalence", "data_order"),
            where=facts.field("batches") or facts.field("batch"),
            x=Axis(title="batch"),
            y=Axis(title="entries along the axis"),
            curves=tuple(
                curve(f"{name} axis {axis}", moving[name, axis], moving[name, axis].values(), "each", stepped=True)
                for name, axis in list(by_sizes.values())[:6]
            ),
        )
