"""Whether rows of a model's outputs interact, and through which operation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.batches.row_axis import rows_known
from pytest_trainloop.checks.batch.batch_independence.few_rows import (
    COUNTS,
    FewRows,
    few_rows,
    few_rows_of_call,
)
from pytest_trainloop.checks.batch.batch_independence.row_gradients import RowGradients
from pytest_trainloop.errors import CannotDecide
from pytest_trainloop.gradients.reached import Reached
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.tracing.forward_pass import ForwardPass, Op
from pytest_trainloop.tracing.operation_fixes import folded_sequences, in_sequence, operation_fixes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

Why = Literal["softmax", "normalised", "data_normalised", "views", "batch_first", "batch_norm", "unknown"]

_WAYS: tuple[tuple[bool, tuple[int, ...]], ...] = ((True, COUNTS), (True, ()), (False, COUNTS))
"""Whether the model's arguments are made leaves, and the numbers of rows to try: a model may refuse inputs that require
a gradient, or take one number of rows only."""


@dataclass(frozen=True, slots=True)
class RowInteraction:
    """Output row ``output`` depends on input row ``input`` of ``rows``."""

    output: int
    input: int
    rows: int
    rows_known: bool
    """Whether the axis is one of rows for sure, and not of positions."""
    why: Why
    ops: tuple[Op, ...]
    """The operations that let rows interact."""


class RowPasses:
    """The passes behind ``batch_independence``."""

    def __init__(self, evidence: Evidence) -> None:
        self._seen, self._plan, self._evidence = evidence.run(), evidence.plan(), evidence
        self._own_data = evidence.shared(makes_own_data)
        self._batch_dim = evidence.fresh_loop().batch_dim if self._own_data else None
        self._few: FewRows | None = None
        self.reached = Reached()
        """Which rows each output row depends on, where some interact."""
        self._has_rows = False
        """Whether some output of a model has an axis of as many entries as the batch has rows."""
        self._ways = list(_WAYS)

    def interaction(self) -> RowInteraction | None:
        """Two rows that interact, and why; None where none do. Raises ``CannotDecide`` where it cannot be seen."""
        judged, ops = self._judged(look_closer=False)
        if judged.interacting is None:
            if not (judged.refused or judged.has_nan or judged.outputs or judged.pairwise or self._has_rows):
                raise CannotDecide(
                    f"no output of the model has an axis of {judged.rows} rows, as where fit draws minibatches of its "
                    "own: rows of their outputs cannot be told apart"
                )
            _require_seen(judged)
            return None
        judged, ops = self._judged(look_closer=True)
        if judged.interacting is None or self._few is None:
            raise CannotDecide("two identical passes differ in whether rows of the model's outputs interact")
        self.reached = judged.reached
        why, culprits = self._why(judged, ops)
        return RowInteraction(*judged.interacting, judged.rows, self._few.rows_known, why, culprits)

    def _why(self, judged: RowGradients, ops: list[Op]) -> tuple[Why, tuple[Op, ...]]:
        for fix in operation_fixes(ops, judged.mixing, judged.rows):
            without, _ = self._judged(look_closer=True, replacements=fix.replacements)
            if not without.apart:
                continue
            if fix.kind != "statistics":
                return fix.kind, fix.ops
            scaled = without.scaled_by
            if scaled is None:
                return "unknown", fix.ops
            return "normalised" if without.behind_weights else "data_normalised", (scaled,)
        sequences = in_sequence(judged.mixing, judged.rows) or folded_sequences(ops, judged.rows)
        layers = frozenset(op.module for op in sequences)
        if sequences and self._judged(flipped=layers)[0].apart:
            return "batch_first", tuple(sequences)
        return "unknown", tuple(judged.mixing[:1])

    def _judged(self, *, look_closer: bool = False, **changed: Any) -> tuple[RowGradients, list[Op]]:
        """What the pass shows, in the first of the ways in which the model returns something to judge."""
        while True:
            judged, ops = self._once(look_closer, changed)
            if judged.outputs or judged.pairwise or changed:
                return judged, ops
            if len(self._ways) == 1:
                self._evidence.require_returned(*self._last)
                return judged, ops
            self._ways.pop(0)

    def _once(self, look_closer: bool, changed: Mapping[str, Any]) -> tuple[RowGradients, list[Op]]:
        judged, ops = RowGradients(0, look_closer=look_closer), list[Op]()
        open_inputs, counts = self._ways[0]

        def look(seen: ForwardPass, output: Any) -> None:
            judged.look(seen, output)
            self._has_rows = self._has_rows or any(judged.rows in t.shape for t in tensors_in(output))
            if judged.interacting is not None and not ops:
                ops.extend(seen.ops)

        def stream(loop: TrainLoop) -> Iterator[Any]:
            self._few = few_rows(loop, sizes, counts)
            judged.rows = self._few.rows
            return itertools.repeat(self._few.batch)

        def take_few(arguments: Any) -> Any:
            few = few_rows_of_call(arguments, self._batch_dim, sizes, counts)
            if few is None or (judged.rows and few.rows != judged.rows):
                return arguments
            if not judged.rows:
                given.append(arguments)
                self._few, judged.rows = few, few.rows
            return few.batch

        def look_at_targets(_seen: ForwardPass, _name: str, *call: Any) -> None:
            """Labels show rows as well, and no model is called with them."""
            targets = [t for t in tensors_in(*call) if not t.requires_grad]
            if given and self._few is not None and not self._few.rows_known:
                known = any(rows_known([given[0], target], self._few.axis) for target in targets)
                self._few = replace(self._few, rows_known=known)

        given: list[Any] = []
        sizes = [size for p in self._seen.parameters for size in p.shape]
        seen = ForwardPass(at_end=look, eval_mode=True, open_inputs=open_inputs, **changed)
        if self._own_data:
            seen.at_call, seen.at_loss = take_few, look_at_targets
            plan = seen.plan(self._plan, varied="with few rows in each call of the model", varying=None)
        else:
            plan = seen.plan(replace(self._plan, stream=stream))
        self._last = plan, self._evidence.rerun(plan)
        return judged, ops


def _require_seen(judged: RowGradients) -> None:
    if judged.refused:
        raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {judged.refused}")
    if judged.has_nan:
        raise CannotDecide("gradients of the model's outputs are NaN (see finite)")
    if not judged.outputs:
        what = "all have two axes of rows" if judged.pairwise else f"none has one axis of {judged.rows} rows"
        raise CannotDecide(
            f"of the outputs of the model {what}: rows cannot be identified; give batch_dim= if they stand elsewhere",
            needs="batch_dim=",
        )
