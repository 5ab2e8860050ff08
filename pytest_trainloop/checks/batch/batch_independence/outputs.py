"""Whether an output of the model depends on other rows of the batch than its own, by exact gradients.

See docs/how-it-decides.md#rows-and-positions-by-exact-gradients.

In evaluation mode the gradient of output row i with respect to input row j is exactly 0 for i other than j: products
with zero rows give zeros, whatever the order of summation. There is no tolerance.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.batch_independence.causes import found
from pytest_trainloop.checks.batch.batch_independence.few_rows import COUNTS, few_rows, few_rows_of_call
from pytest_trainloop.checks.batch.batch_independence.other_masks import by_other_mask
from pytest_trainloop.checks.batch.batch_independence.other_places import by_place, cut_to_rows
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.batches.row_axis import rows_known
from pytest_trainloop.instruments.gradients.reached import Reached
from pytest_trainloop.instruments.tracing.forward_pass import ForwardPass, Op, axis_of, grads, recomputed, weighted_sum
from pytest_trainloop.instruments.tracing.operation_fixes import (
    axes_of_fix,
    folded_sequences,
    in_sequence,
    normalising,
    operation_fixes,
)
from pytest_trainloop.instruments.tracing.provenance_queries import ancestors
from pytest_trainloop.recording.function_mode import tensors_in
from pytest_trainloop.recording.torch_names import ATTENTION, EXTREMES, PRODUCTS, RECURRENT, SCATTERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_trainloop.checks.batch.batch_independence.few_rows import FewRows
    from pytest_trainloop.core.finding import Finding
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.runs.evidence import Evidence

_WAYS: tuple[tuple[bool, tuple[int, ...]], ...] = ((True, COUNTS), (True, ()), (False, COUNTS))
"""Whether the model's arguments are made leaves, and the numbers of rows to try: a model may refuse inputs that require
a gradient, or take one number of rows only."""

_INTENDED = (PRODUCTS - {"linear"}) | ATTENTION | SCATTERS | EXTREMES | {"__matmul__", "baddbmm", "cdist", "median"}
"""Operations that join rows on purpose where nothing else is known: products of rows, sums over edges, pooling. A
linear layer takes each row alone."""

_CAUSES = {
    "softmax": ("softmax_over_rows", "with the softmax along another axis"),
    "normalised": ("normalised_over_rows", "with each row normalised alone, or by constants,"),
    "data_normalised": ("normalised_over_rows", "with each row normalised alone, or by constants,"),
    "views": ("view_mixes_rows", "with the axes swapped by a transpose"),
    "batch_first": ("rows_as_positions", "with the other value of batch_first"),
}
"""By what makes rows independent: the cause that this proves, and the experiment in words."""


def in_the_model(evidence: Evidence) -> Iterator[Finding]:
    """Rows that meet on the way to the model's outputs. Raises ``CannotDecide`` where that is not known, or where
    nothing says whether they are to meet."""
    made, declared = evidence.shared(OutputRows), evidence.declared("rows_interact")
    made.judge()
    if made.meet is None or (made.why == "batch_norm" and declared is None):
        return
    ops = made.culprits
    named = ops[0].named if ops else "an unknown operation"
    facts: dict[str, Any] = {"output": made.meet[0], "input": made.meet[1], "fix": "", "through": named}
    cause, level = "rows_interact", "fault"
    if made.why in _CAUSES and made.few is not None and made.few.rows_known:
        cause, facts["fix"] = _CAUSES[made.why][0], _fix_in_words(made.why, ops[0], made.few.rows)
        # a data set in one batch is standardised on the way in (odd: table_that_is_one_batch)
        level = "advice" if made.why == "data_normalised" and declared is None else "fault"
        one_layer = cause in ("rows_as_positions", "softmax_over_rows") and len({op.module for op in ops}) == 1
        facts["change"] = "" if one_layer else "\n".join(dict.fromkeys(str(op.place) for op in ops))
    elif declared is None:
        through = f", through {named} ({ops[0].place})" if ops else ""
        if made.few is None or not made.few.rows_known:
            raise CannotDecide(
                f"entries of the batch's first axis interact in the model{through}, and whether these are rows or "
                "positions is not known: give batch_dim=0 if they are rows, batch_dim=1 if the second axis holds them",
                needs="batch_dim=",
            )
        if not ops or ops[0].name in _INTENDED:
            raise CannotDecide(
                f"rows interact in the model{through}: declare rows_interact=True if that is intended, "
                "rows_interact=False if not",
                needs="rows_interact=",
            )
        level = "advice"
    names = tuple(dict.fromkeys(op.named for op in ops))
    facts |= {"level": level, "declared": declared is False}
    finding = found(cause, ops[0] if ops else "", names, **facts)
    yield replace(finding, smallest=f"{made.rows} rows")


def without_gradient(evidence: Evidence) -> Iterator[Finding]:
    """Output rows that change with the mask of another row, or with their place, where no gradient joins rows."""
    made, declared = evidence.shared(OutputRows), evidence.declared("rows_interact")
    met = by_other_mask(evidence, made.few) if made.few is not None and made.few.rows_known and made.alone else None
    if met is not None:
        through, names = ("", ()) if met.op is None else (met.op.named, (met.op.named,))
        facts: dict[str, Any] = {"output": met.row, "input": met.other, "mask": nested.shown(met.path), "by": met.by}
        facts |= {"through": through, "counted": met.counted, "declared": declared is False}
        facts["level"] = "advice" if declared is None and not met.counted else "fault"
        yield replace(found("mask_of_other_rows", met.op or "", names, **facts), smallest=f"{made.rows} rows")
    elif made.few is not None and made.cut and (placed := by_place(evidence, made.few)) is not None:
        op, positions, steps = placed
        facts = {"through": op.named, "table": positions, "steps": steps}
        yield replace(found("positions_by_row", op, (op.named,), **facts), smallest=f"{made.rows} rows")


def _fix_in_words(why: str, op: Op, rows: int) -> str:
    """What makes rows independent, with the arguments that were changed where these are known."""
    axes = axes_of_fix(op, rows)
    if axes is not None and why in ("softmax", "normalised"):
        return f"with dim={axes[1]} in place of dim={axes[0]}"
    unpacked = bool(op.inputs) and op.inputs[0].dim() == 3
    if op.name in RECURRENT and unpacked and op.args and isinstance(op.args[-1], bool):
        return f"{op.module or 'the layer'} has batch_first={op.args[-1]}; with batch_first={not op.args[-1]}"
    return _CAUSES[why][1]


class OutputRows:
    """The passes of one loop over a few rows, until it is known whether rows meet and why."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._own_data = evidence.shared(makes_own_data)
        self._batch_dim = evidence.fresh_loop().batch_dim if self._own_data else None
        self._ways = list(_WAYS)
        self.few: FewRows | None = None
        self._has_rows = False
        """Whether some output of a model has an axis of as many entries as the batch has rows."""
        self.meet: tuple[int, int] | None = None
        """An output row, and another input row with a gradient between them."""
        self.rows = 0
        self.why = ""
        """What makes rows independent: a key of ``_CAUSES``, "batch_norm" or "unknown"."""
        self.culprits: tuple[Op, ...] = ()
        """The operations that let rows meet."""
        self.alone = False
        """Whether outputs were judged, and no gradient joins rows."""
        self.cut = False
        """Whether a table is cut to the number of rows there."""
        self.reached = Reached()
        """Which rows each output row depends on, where some interact."""

    def judge(self) -> None:
        """Look whether rows meet, and why. Raises ``CannotDecide`` where it cannot be seen."""
        if self.why:
            return
        seen = self._pass()
        if seen.meet is None:
            self._require_seen(seen)
            self.alone, self.rows = not self._own_data, seen.rows
            self.cut = self.alone and seen.cut
            return
        seen = self._pass(closer=True)
        if seen.meet is None:
            raise CannotDecide("two identical passes differ in whether rows of the model's outputs interact")
        self.meet, self.rows, self.reached = seen.meet, seen.rows, seen.reached
        self.why, self.culprits = self._why(seen)

    def _why(self, seen: _Pass) -> tuple[str, tuple[Op, ...]]:
        for fix in operation_fixes(seen.ops, seen.mixing, seen.rows):
            without = self._pass(closer=True, replacements=fix.replacements)
            if without.independent and fix.kind != "statistics":
                return fix.kind, fix.ops
            if without.independent and without.scaled_by is None:
                return "unknown", fix.ops
            if without.independent and without.scaled_by is not None:
                return "normalised" if without.behind_weights else "data_normalised", (without.scaled_by,)
        sequences = in_sequence(seen.mixing, seen.rows) or folded_sequences(seen.ops, seen.rows)
        if sequences and self._pass(flipped=frozenset(op.module for op in sequences)).independent:
            return "batch_first", tuple(sequences)
        return "unknown", tuple(seen.mixing[:1])

    def _require_seen(self, seen: _Pass) -> None:
        if seen.refused:
            raise CannotDecide(f"no gradient can be taken of the model's outputs alone: {seen.refused}")
        if seen.has_nan:
            raise CannotDecide("gradients of the model's outputs are NaN (see finite)")
        if not (seen.outputs or seen.pairwise or self._has_rows):
            raise CannotDecide(
                f"no output of the model has an axis of {seen.rows} rows, as where fit draws minibatches of its own: "
                "rows of their outputs cannot be identified"
            )
        if not seen.outputs:
            what = "all have two axes of rows" if seen.pairwise else f"none has one axis of {seen.rows} rows"
            raise CannotDecide(
                f"of the outputs of the model {what}: rows cannot be identified; give batch_dim= if they are on "
                "another axis",
                needs="batch_dim=",
            )

    def _pass(self, *, closer: bool = False, **changed: Any) -> _Pass:
        """A pass in the first of the ways in which the model returns something to judge."""
        while True:
            seen = self._once(_Pass(closer=closer), changed)
            if seen.outputs or seen.pairwise or changed:
                return seen
            if len(self._ways) == 1:
                self._evidence.require_returned(*self._last)
                return seen
            self._ways.pop(0)

    def _once(self, made: _Pass, changed: dict[str, Any]) -> _Pass:
        open_inputs, counts = self._ways[0]
        sizes = [size for p in self._evidence.run().parameters for size in p.shape]
        given: list[Any] = []

        def look(seen: ForwardPass, output: Any) -> None:
            made.look(seen, output)
            self._has_rows = self._has_rows or any(made.rows in t.shape for t in tensors_in(output))

        def stream(loop: TrainLoop) -> Iterator[Any]:
            self.few = few_rows(loop, sizes, counts)
            made.rows = self.few.rows
            return itertools.repeat(self.few.batch)

        def take_few(arguments: Any) -> Any:
            few = few_rows_of_call(arguments, self._batch_dim, sizes, counts)
            if few is None or (made.rows and few.rows != made.rows):
                return arguments
            if not made.rows:
                given.append(arguments)
                self.few, made.rows = few, few.rows
            return few.batch

        def look_at_targets(_seen: ForwardPass, _name: str, *call: Any) -> None:
            """Labels show rows as well, and no model is called with them."""
            targets = [t for t in tensors_in(*call) if not t.requires_grad]
            if given and self.few is not None and not self.few.rows_known:
                known = any(rows_known([given[0], target], self.few.axis) for target in targets)
                self.few = replace(self.few, rows_known=known)

        seen, base = ForwardPass(at_end=look, eval_mode=True, open_inputs=open_inputs, **changed), self._evidence.plan()
        if self._own_data:
            seen.at_call, seen.at_loss = take_few, look_at_targets
            plan = seen.plan(base, varied="with few rows in each call of the model", varying=None)
        else:
            plan = seen.plan(replace(base, stream=stream))
        self._last = plan, self._evidence.rerun(plan)
        return made


@dataclass(slots=True)
class _Pass:
    """What the gradients of single output rows show in one pass."""

    closer: bool = False
    """Whether operations are looked at as well."""
    rows: int = 0
    outputs: int = 0
    """Outputs of a model that have one axis of rows."""
    pairwise: int = 0
    """Outputs that have two."""
    meet: tuple[int, int] | None = None
    ops: list[Op] = field(default_factory=list)
    """All operations of the call in which rows meet."""
    mixing: list[Op] = field(default_factory=list)
    """Those that let rows meet."""
    reached: Reached = field(default_factory=Reached)
    cut: bool = False
    """Whether a table is cut to the number of rows."""
    refused: str = ""
    """Torch's message where no gradient could be taken."""
    has_nan: bool = False
    scaled_by: Op | None = None
    """What scales rows by a statistic over them, where no rows meet."""
    behind_weights: bool = False
    """Whether that scales activations, and not the data."""

    @property
    def independent(self) -> bool:
        """Whether there were outputs to judge, and no rows meet."""
        return self.outputs > 0 and self.meet is None and not self.refused and not self.has_nan

    def look(self, seen: ForwardPass, output: Any) -> None:
        """Judge what one outermost call of a model returned."""
        given = [t for t in nested.tensors(output) if t.requires_grad and t.is_floating_point()]
        judged = [(t, axis) for t in given if (axis := axis_of(t, self.rows)) is not None]
        self.pairwise += sum(1 for t in given if list(t.shape[:2]).count(self.rows) > 1)
        entries = [(e.leaf, axis) for e in seen.data_inputs if (axis := axis_of(e.leaf, self.rows)) is not None]
        if not judged or not entries or self.meet is not None:
            return
        self.outputs += len(judged)
        self.cut = self.cut or cut_to_rows(seen.ops, self.rows) is not None
        try:
            for row in sorted({0, self.rows // 2, self.rows - 1}):
                self._row(judged, entries, row)
            if self.meet is not None:
                self.ops.extend(seen.ops)
            if self.closer and self.meet is not None:
                self.mixing = [op for op in seen.ops if _mixes_rows(op, self.rows)]
                self.reached.note(self.rows, lambda row: _along_rows(judged, entries, row))
            elif self.closer:
                self.scaled_by = normalising(seen.ops, self.rows, lambda t: _reaches([t for t, _ in judged], t))
                if self.scaled_by is not None:
                    made_of = ancestors(seen.lineage.of(self.scaled_by.outputs[0]))
                    self.behind_weights = any(node.parameter for node in made_of)
        except RuntimeError as error:  # a re-entrant checkpoint refuses it, and some custom functions do
            reraise_raised(error)
            self.refused = str(error).partition("\n")[0]

    def _row(
        self, outputs: Sequence[tuple[torch.Tensor, int]], entries: Sequence[tuple[torch.Tensor, int]], row: int
    ) -> None:
        for by_row in _along_rows(outputs, entries, row):
            nonzero = by_row.reshape(len(by_row), -1)  # an input may have no other axis than its rows
            if bool(nonzero.isnan().any()):
                self.has_nan = True
                continue
            others = [j for j in (nonzero != 0).any(1).nonzero().flatten().tolist() if j != row]
            if others and self.meet is None:
                self.meet = (row, others[0])


def _along_rows(
    outputs: Sequence[tuple[torch.Tensor, int]], entries: Sequence[tuple[torch.Tensor, int]], row: int
) -> Iterator[torch.Tensor]:
    """The gradients of one output row with respect to what entered, their rows first."""
    total = _total([t.select(axis, row) for t, axis in outputs])
    gradients = grads(total, [leaf for leaf, _ in entries])
    return (g.movedim(axis, 0) for (_, axis), g in zip(entries, gradients, strict=True) if g is not None)


def _total(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their weighted sum; they may be on several devices."""
    sums = [weighted_sum(one) for one in outputs]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _reaches(outputs: Sequence[torch.Tensor], at: torch.Tensor) -> bool:
    """Whether a gradient of the outputs reaches a tensor."""
    (gradient,) = grads(_total(outputs), [at]) if at.requires_grad else (None,)
    return gradient is not None and bool((gradient != 0).any())


def _mixes_rows(op: Op, rows: int) -> bool:
    """Whether a row of the operation's outputs depends on another row of its inputs."""
    if not any(t.requires_grad and axis_of(t, rows) is not None for t in op.outputs):
        return False
    inputs, outputs = recomputed(op)
    inputs = [t for t in inputs if axis_of(t, rows) is not None]
    for out in outputs:
        to = axis_of(out, rows) if out.requires_grad else None
        for row in (0, rows - 1) if to is not None else ():
            for t, gradient in zip(inputs, grads(weighted_sum(out.select(to or 0, row)), inputs), strict=True):
                if gradient is not None:
                    nonzero = (gradient.movedim(axis_of(t, rows) or 0, 0).reshape(rows, -1) != 0).any(1)
                    if bool(nonzero[torch.arange(rows, device=nonzero.device) != row].any()):
                        return True
    return False
