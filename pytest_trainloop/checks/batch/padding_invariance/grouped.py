"""The padded groups of a loop's first padded batch, each with its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_trainloop import nested
from pytest_trainloop.batches.groups import together
from pytest_trainloop.batches.own_data import require_given_data
from pytest_trainloop.checks.batch.padding_invariance.known import (
    is_configured,
    is_declared,
    lengths,
    looks_up,
    nothing_padded,
    read,
)
from pytest_trainloop.checks.batch.padding_invariance.other_id import taken_for_padding
from pytest_trainloop.checks.batch.padding_invariance.runs import PaddingRuns
from pytest_trainloop.checks.batch.padding_invariance.slices import slices
from pytest_trainloop.errors import CannotDecide, DoesNotApply, UsageError
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trainloop.batches.padding import PaddingMask
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

LOOKED_AT = 4
"""Batches of the loop that are looked at for their lengths."""


def padding_runs(evidence: Evidence) -> list[PaddingRuns]:
    """One for each length to which something in the first padded batch is padded. Raises ``CannotDecide`` where no
    padding is known, before the loop is run."""
    loop = evidence.fresh_loop()
    with preserved():
        try:
            return _padding_runs(evidence, loop)
        except UsageError:
            evidence.run()  # which is refused in the same words for every check
            raise


def _padding_runs(evidence: Evidence, loop: TrainLoop) -> list[PaddingRuns]:
    given = first_batches(loop, LOOKED_AT)
    for names in [] if loop.padding is None else loop.padding.names:
        nested.require_names(given, names, "TrainLoop.padding")
    known = [(batch, [p for p in read(loop, batch) if slices(p)]) for batch in given]
    found = [(batch, padded) for batch, padded in known if padded]
    nothing = None if found else nothing_padded(loop, given)
    if nothing is None or loop.padding is not None or (isinstance(nothing, DoesNotApply) and looks_up(loop)):
        require_given_data(evidence, "none with more or less padding can be composed")
    if nothing is not None:
        raise nothing
    record = evidence.run()
    if not record.rounds:
        raise CannotDecide("the loop makes no optimizer step, so that no gradient is used")
    window = max(1, round(record.items / record.rounds))
    batch = nested.copy(found[0][0])
    others = [] if loop.batches is None else given
    groups = found[0][1]

    def made(padded: PaddingMask, beside: Sequence[PaddingMask]) -> PaddingRuns:
        return PaddingRuns(
            batch,
            padded,
            window,
            evidence,
            declared=is_declared(loop, batch, padded),
            configured=is_configured(loop, batch, padded),
            lengths=lengths(others, batch, padded),
            others=beside,
            pad_ids=taken_for_padding(loop),
        )

    runs = [made(p, [g for g in groups if g is not p and p.grid.is_near(g.grid)]) for p in groups]
    for grid in dict.fromkeys(p.grid for p in groups if not p.alone):
        joint = together([p for p in groups if p.grid == grid])
        if joint is not None and slices(joint):
            instead = made(joint, ())
            for single in (r for r in runs if r.padded.grid == grid):
                single.instead = instead
    return runs
