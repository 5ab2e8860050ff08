"""Whether rows of a model's outputs meet, and what lets them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.checks.batch.batch_independence.few_rows import COUNTS, FewRows, few_rows
from pytest_trainloop.checks.batch.batch_independence.row_gradients import Judged
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.tracing.forward_pass import Op, Pass
from pytest_trainloop.tracing.operation_fixes import cures, in_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.runs.run import RunPlan

Why = Literal["softmax", "normalised", "data_normalised", "views", "turned", "batch_norm", "unknown"]


_WAYS: tuple[tuple[bool, tuple[int, ...]], ...] = ((True, COUNTS), (True, ()), (False, COUNTS))
"""Whether the model's arguments are made leaves, and how many rows it is given: it may refuse inputs that require a
gradient, or be made for so many rows."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Output row ``output`` depends on input row ``input`` of ``rows``, because of ``why``: at which ``ops``. ``told``
    says whether these are rows for sure."""

    output: int
    input: int
    rows: int
    told: bool
    why: Why
    ops: tuple[Op, ...]


class Rows:
    """The passes behind ``batch_independence``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._run = evidence.run(), evidence.plan(), evidence.rerun
        self._few: FewRows | None = None
        self._ways = list(_WAYS)

    def meeting(self) -> Meeting | None:
        """What lets rows meet, if they do. Raises ``CannotDecide`` where it cannot be seen."""
        judged, ops = self._judged(look_closer=False)
        if judged.meets is None:
            _require_seen(judged)
            return None
        judged, ops = self._judged(look_closer=True)
        if judged.meets is None or self._few is None:
            raise CannotDecide("two identical passes differ in whether rows of the model's outputs meet")
        why, culprits = self._why(judged, ops)
        return Meeting(*judged.meets, judged.rows, self._few.told, why, culprits)

    def _why(self, judged: Judged, ops: list[Op]) -> tuple[Why, tuple[Op, ...]]:
        for cure in cures(ops, judged.mixing, judged.rows):
            without, _ = self._judged(look_closer=True, changes=cure.changes)
            if not without.apart:
                continue
            if cure.kind != "statistics":
                return cure.kind, cure.ops
            scaled = without.scaled_by
            if scaled is None:
                return "unknown", cure.ops
            return "normalised" if without.behind_weights else "data_normalised", (scaled,)
        sequences = in_sequence(judged.mixing, judged.rows)
        layers = frozenset(op.module for op in sequences)
        if sequences and self._judged(turned=layers)[0].apart:
            return "turned", tuple(sequences)
        return "unknown", tuple(judged.mixing[:1])

    def _judged(self, *, look_closer: bool = False, **changed: Any) -> tuple[Judged, list[Op]]:
        """The pass, made in the first of the ways in which the model gives something."""
        while True:
            judged, ops = self._once(look_closer, changed)
            if judged.outputs or judged.pairwise or changed or len(self._ways) == 1:
                return judged, ops
            self._ways.pop(0)

    def _once(self, look_closer: bool, changed: Mapping[str, Any]) -> tuple[Judged, list[Op]]:
        judged, ops = Judged(0, look_closer=look_closer), list[Op]()
        opens, counts = self._ways[0]

        def look(seen: Pass, output: Any) -> None:
            judged.look(seen, output)
            if judged.meets is not None and not ops:
                ops.extend(seen.ops)

        def stream(loop: TrainLoop) -> Iterator[Any]:
            self._few = few_rows(loop, [size for p in self._seen.parameters for size in p.shape], counts)
            judged.rows = self._few.rows
            return itertools.repeat(self._few.batch)

        seen = Pass(at_end=look, evaluating=True, opens=opens, **changed)
        self._run(seen.plan(self._with(stream)))
        return judged, ops

    def _with(self, stream: Callable[[TrainLoop], Iterator[Any]]) -> RunPlan:
        return replace(self._plan, stream=stream)


def _require_seen(judged: Judged) -> None:
    if judged.refused:
        raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {judged.refused}")
    if judged.not_a_number:
        raise CannotDecide("gradients of the model's outputs are NaN (see finite)")
    if not judged.outputs:
        what = "all have two axes of rows" if judged.pairwise else f"none has one axis of {judged.rows} rows"
        raise CannotDecide(
            f"of the outputs of the model {what}: rows cannot be told apart; give batch_dim= if they stand elsewhere"
        )
