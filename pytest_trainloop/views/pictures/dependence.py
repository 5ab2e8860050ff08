"""Which rows, positions or segments of the inputs an output depends on, where it depends on some that it must not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop.instruments.gradients.reached import MOST_PARTS
from pytest_trainloop.views.pictures.picture import Axis, Picture, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_trainloop.instruments.gradients.reached import Reached
    from pytest_trainloop.views.loop_facts.facts import Facts
    from pytest_trainloop.views.pictures.report_inputs import ReportInputs

LEAST_SHARE = 1e-6
"""Share of the largest gradient that is drawn as the smallest: what is smaller has one shade, which
differs from that of 0."""


def rows_reached(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The rows that outputs depend on, where ``batch_independence`` found that rows interact in the model."""
    from pytest_trainloop.checks.batch.batch_independence.outputs import OutputRows

    found = facts.ask(OutputRows) if facts.findings("batch_independence") else None
    if found is not None:
        yield from _table(
            facts,
            found.reached,
            key="rows_reached",
            part="row",
            title="Which rows an output depends on",
            look="Only the diagonal has a value: an output row has a gradient in its own input row alone.",
            check="batch_independence",
        )


def positions_reached(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The positions that outputs depend on, where ``causality`` found that some see what they predict."""
    from pytest_trainloop.checks.batch.causality.causal_probe import CausalPasses

    found = facts.ask(CausalPasses) if facts.findings("causality") else None
    if found is not None:
        yield from _table(
            facts,
            found.reached,
            key="positions_reached",
            part="position",
            title="Which positions an output depends on",
            look="Nothing has a value right of the diagonal: an output has a gradient in the inputs up to its own "
            "position only.",
            check="causality",
        )


def segments_reached(facts: Facts, _looked: ReportInputs) -> Iterator[Picture]:
    """The segments that outputs depend on, where ``segment_independence`` found that some meet in the model."""
    from pytest_trainloop.checks.batch.segment_independence.segment_probe import SegmentPasses

    found = facts.ask(SegmentPasses) if facts.findings("segment_independence") else None
    if found is not None:
        yield from _table(
            facts,
            found.reached,
            key="segments_reached",
            part="segment",
            title="Which segments an output depends on",
            look="Only the diagonal has a value: outputs of a segment have a gradient in its own inputs alone.",
            check="segment_independence",
        )


def _table(
    facts: Facts, reached: Reached, *, key: str, part: str, title: str, look: str, check: str
) -> Iterator[Picture]:
    known = [at for at, sizes in enumerate(reached.sizes) if sizes is not None and any(sizes)]
    if not known:
        return
    cells = [[_shade(size) for size in reached.sizes[at] or ()] for at in known]
    place = next((finding.where for finding in facts.findings(check) if finding.where), "")
    yield Picture(
        key=key,
        kind="map",
        title=title,
        look=look,
        of=f"one forward pass of {check} over {reached.parts} {part}s",
        checks=(check,),
        where=facts.where(place),
        x=Axis(title=f"{part} of the inputs"),
        y=Axis(title=f"{part} of the outputs"),
        labels=tuple(f"output {at}" for at in known),
        columns=tuple(range(len(cells[0]))),
        cells=tuple(tuple(number(size) for size in row) for row in cells),
        colour=Axis(title="|gradient|, over the largest of the output", scale="log"),
        note=f"the first {MOST_PARTS} of {reached.parts} {part}s" if reached.parts > MOST_PARTS else "",
    )


def _shade(size: float) -> float | None:
    """None for an exact 0, which has no colour."""
    return max(size, LEAST_SHARE) if size else None
