"""Right loops in which the id of the padding is not that of the model's table."""

from __future__ import annotations

from pytest_trainloop.loop import TrainLoop
from tests.checks.batch.padding_invariance.faults_ids import texts
from tests.loops.odd import odd


@odd(notes="rows are filled with 0 where the table's padding_idx is 1, and padding is known by lengths")
def filled_with_another_id_beside_lengths() -> TrainLoop:
    return texts(0, by_lengths=True)()
