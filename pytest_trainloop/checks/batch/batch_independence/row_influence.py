"""What each row of the batch gives the loss, its share, and whether that changes with the other rows.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.

A row's share is the gradient of what the loop backpropagates with respect to what entered the model of this row. In a
sum of losses of rows it depends on this row alone, and on counts, which scale all shares by one factor. So other values
in some rows must leave the shares of all others as they are, or scale them by one number.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.checks.batch.batch_independence.few_rows import COUNTS, few_rows
from pytest_trainloop.checks.batch.batch_independence.other_values import (
    OtherOrder,
    OtherValues,
    changes,
    entries_that_change,
    has_rows,
    roll,
    rows_that_differ,
)
from pytest_trainloop.checks.batch.batch_independence.row_fixes import Crossing, RowFix, crossings, row_fixes
from pytest_trainloop.core.errors import CannotDecide, Refused
from pytest_trainloop.core.whose import reraise_raised
from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.own_data import makes_own_data
from pytest_trainloop.instruments.gradients.tolerances import ROUNDING
from pytest_trainloop.instruments.tracing.row_tape import RowTape, Tape, TapedCall, leads_to
from pytest_trainloop.recording.torch_names import TRANSPOSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_trainloop.checks.batch.batch_independence.few_rows import FewRows
    from pytest_trainloop.checks.batch.batch_independence.other_values import Change
    from pytest_trainloop.declare.loop import TrainLoop
    from pytest_trainloop.declare.nested import Path
    from pytest_trainloop.instruments.tracing.forward_pass import Replacement
    from pytest_trainloop.runs.evidence import Evidence

    Patch = tuple[str, Mapping[int, Replacement]]
    """A name, and other results in place of operations, by their number."""

    Places = dict[int, frozenset[int]]
    """By the number of a share: positions in it."""

AS_IT_IS = OtherValues(())
AS_CALLED: Patch = "", {}
_COUNTS = tuple(n for n in COUNTS if n > 3)
"""Two rows change, and at least two do not."""

MOST_ROWS = 9
"""Rows up to which each one's place is looked for."""

_WAYS: tuple[tuple[bool, tuple[int, ...], bool], ...] = (
    (True, _COUNTS, True),
    (True, (), True),
    (False, _COUNTS, True),
    (True, (), False),
)
"""Whether the model's arguments are made leaves, the numbers of rows to try, and whether the step is in float64."""


@dataclass(frozen=True, slots=True)
class Shift:
    """How shares differ between two steps."""

    factor: float
    """What scales all of them, by least squares."""
    rest: float
    """The largest part that it leaves of any one's length, over the longest."""
    rows: tuple[int, ...]
    """The positions at which it leaves one."""
    bound: float

    @property
    def independent(self) -> bool:
        """Whether the shares are the same but for one factor."""
        return self.rest <= self.bound

    @property
    def equal(self) -> bool:
        return self.independent and abs(self.factor - 1.0) <= self.bound


class RowInfluence:
    """The steps of one loop over a few rows, each made once."""

    few: FewRows

    def __init__(self, evidence: Evidence, whole: RowInfluence | None = None, chosen: tuple[int, ...] = ()) -> None:
        self.evidence = evidence
        self._ways: list[tuple[bool, tuple[int, ...], bool]] = list(_WAYS) if whole is None else whole._ways[:1]
        self._chosen = chosen
        """The rows of the few that a step is made over; none for all."""
        self._floats_only: bool = whole is not None and whole._floats_only
        """Whether whole numbers stay in changed rows, since the step is another one without them."""
        self.with_masks: bool = whole is not None and whole.with_masks
        """Whether masks and lengths change with the other values of a row."""
        self.all_but_two = False
        self.taken = whole is not None
        """Whether the loop takes few rows, and something of them enters a model."""
        self._refused: Refused | None = None
        self._tapes: dict[tuple[Change, str, bool], Tape | None] = {}
        self.fixes: list[RowFix] = []
        """What runs over rows in the step as it is."""
        self.crossings: dict[int, Crossing] = {}
        """The tables of all pairs of that step, by their place on the tape."""
        if whole is not None:
            self.few = replace(whole.few, rows=len(chosen))

    @classmethod
    def of(cls, evidence: Evidence) -> RowInfluence:
        """Those of a loop, in the first of the ways in which it can be run."""
        made = cls(evidence)
        while made._ways and not evidence.shared(makes_own_data) and evidence.run().raised is None:
            base = made.tape(AS_IT_IS)
            if base is not None and base.shares and not base.refused and made.few.rows >= 4:
                made.taken = True
                break
            made._ways.pop(0)
            made._tapes.clear()
            made.fixes.clear()
            made.crossings.clear()
        return made

    def over(self, rows: tuple[int, ...]) -> RowInfluence:
        """The steps over these rows alone."""
        return RowInfluence(self.evidence, self, rows)

    def require_taken(self) -> None:
        """Raise ``CannotDecide`` where the loop raised on a few of its rows, or on rows with other values, or gave NaN
        for these, and nothing could be seen therefore."""
        if self._refused is not None and not (self.taken and self._entered()):
            raise self._refused
        if self.taken and any(math.isnan(v) for tape in self._tapes.values() if tape is not None for v in tape.values):
            raise CannotDecide("the loss is NaN on few rows of the batch, or on rows with other values")

    @property
    def rows(self) -> int:
        return self.few.rows

    @property
    def some(self) -> tuple[int, ...]:
        """The rows that are changed together: two, with others before, between and after them, or all but
        these; of chosen rows the last."""
        if self._chosen:
            return (self.rows - 1,)
        two = (1, self.rows // 2 + 1)
        return tuple(row for row in range(self.rows) if row not in two) if self.all_but_two else two

    def change(self, among: frozenset[Path] | None = None, rows: tuple[int, ...] | None = None) -> OtherValues:
        """Other values in some rows of the tensors at these paths, or of all."""
        rows = self.some if rows is None else rows
        return OtherValues(rows, among, floats_only=self._floats_only, spared=self.some, with_masks=self.with_masks)

    def alone(self, row: int, among: frozenset[Path]) -> OtherValues:
        """Other values in one row."""
        return OtherValues((row,), among, floats_only=self._floats_only)

    def entries_that_change(self, path: Path, row: int) -> list[int]:
        """The entries of a row, counted through all axes, that other values in it change."""
        return entries_that_change(dict(nested.paths(self.few.batch))[path], row, self.few.axis)

    def tape(self, change: Change, patch: Patch = AS_CALLED, *, shared_draws: bool = False) -> Tape | None:
        """The step over the changed batch; None where it raised, or cannot be compared. ``shared_draws``: what is drawn
        is the same for every row."""
        known = (change, patch[0], shared_draws)
        if known not in self._tapes:
            self._tapes[known] = self._made(change, patch[1], shared_draws=shared_draws)
        return self._tapes[known]

    def both(self, change: Change, patch: Patch = AS_CALLED, *, shared_draws: bool = False) -> tuple[Tape, Tape] | None:
        """The step as it is and the one over the changed batch; None where they cannot be compared."""
        base, other = (self.tape(c, patch, shared_draws=shared_draws) for c in (AS_IT_IS, change))
        return (base, other) if base is not None and other is not None and base.comparable(other) else None

    def independence(self, patch: Patch = AS_CALLED, *, among: frozenset[Path] | None = None) -> Shift | None:
        """What other values in some rows do to the shares of the others; None where that cannot be seen."""
        while (tapes := self.both(self.change(among), patch)) is None:
            if self._floats_only or patch[1]:
                return None
            self._floats_only = True
        sizes = {number: len(tapes[0].shares[number].value) for number in self._entered(patch)}
        if any(len(at) > len(self.some) * max(1, sizes[n] // self.rows) for n, at in self._entered(patch).items()):
            return Shift(1.0, math.inf, tuple(row for row in range(self.rows) if row not in self.some), 0.0)
        return self.shift(*tapes, self.rows_of(self.some, patch))

    def shift(self, base: Tape, other: Tape, own: Mapping[int, frozenset[int]] | None) -> Shift | None:
        """The difference at the positions of each share that are not among its ``own``, over the shares that have any;
        None where one of them entered with another value, or where there is no such share."""
        pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for number in own or ():
            one, two = base.shares[number], other.shares[number]
            for at in sorted(set(range(len(one.gradient))) - (own or {})[number]):
                if not torch.equal(one.value[at], two.value[at]):
                    return None
                pairs.append((at, one.gradient[at], two.gradient[at]))
        longest = max((float(a.norm()) for _, a, _ in pairs), default=0.0)
        if longest == 0.0 or not all(bool(a.isfinite().all() and b.isfinite().all()) for _, a, b in pairs):
            return None
        factor = sum(float(a @ b) for _, a, b in pairs) / sum(float(a @ a) for _, a, _ in pairs)
        rests = [(at, float((b - factor * a).norm()) / longest) for at, a, b in pairs]
        bound = self.bound(base, other)
        off = tuple(dict.fromkeys(at for at, rest in rests if rest > bound))
        return Shift(factor, max(rest for _, rest in rests), off, bound)

    def of_all(self, base: Tape, other: Tape) -> Shift | None:
        """The difference of all shares, those of the changed rows too."""
        aligned = self.rows_of(self.some)
        return None if aligned is None else self.shift(base, other, dict.fromkeys(aligned, frozenset()))

    def at_other_places(self, path: Path) -> Shift | None:
        """What it does to all shares that a tensor's rows are moved on by one; None where that changes no row, or
        cannot be seen."""
        order, paths = roll(self.rows), frozenset({path})
        if not rows_that_differ(self.few.batch, order, paths, self.few.axis):
            return None
        tapes = self.both(OtherOrder(order, paths))
        return None if tapes is None else self.of_all(*tapes)

    def meet_among_themselves(self, paths: frozenset[Path]) -> bool:
        """Whether other values in some rows of these tensors change the shares of other rows of the same."""
        tapes = self.both(self.change(paths)) if paths else None
        shift = None if tapes is None else self.shift(*tapes, _moved(*tapes))
        return bool(paths) and (tapes is None or (shift is not None and not shift.independent))

    def has_masks(self) -> bool:
        """Whether a tensor with rows keeps its values where rows get others."""
        return any(
            has_rows(tensor, self.rows, self.few.axis) and not changes(path, tensor, self.few.axis)
            for path, tensor in nested.paths(self.few.batch)
        )

    def targets(self) -> list[Path]:
        """The tensors with rows that never enter the model; none where it is not known what does."""
        inputs = self.inputs()
        return [
            path
            for path, tensor in sorted(nested.paths(self.few.batch), key=lambda pair: str(pair[0]))
            if inputs and path not in inputs and has_rows(tensor, self.rows, self.few.axis)
            if changes(path, tensor, self.few.axis)
        ]

    def inputs(self) -> frozenset[Path]:
        """The tensors with rows that enter the model."""
        base = self.tape(AS_IT_IS)
        return frozenset(base.entered) if base is not None else frozenset()

    def rows_of(self, rows: tuple[int, ...], patch: Patch = AS_CALLED) -> Places | None:
        """For each share the positions that these rows have in it: rows one by one, or batches one after the other, or
        each row several times. Shown by what entered where two rows held other values; None where it shows neither."""
        found: Places = {}
        base = self.tape(AS_IT_IS, patch)
        for number, moved in self._entered(patch).items():
            size = len(base.shares[number].value) if base is not None else 0
            orders = ([at % self.rows for at in range(size)], [at // max(1, size // self.rows) for at in range(size)])
            rows_at = next((o for o in orders if all(o[at] in self.some for at in moved)), None)
            if rows_at is None and rows != self.some:
                return None
            found[number] = moved if rows_at is None else frozenset(at for at in range(size) if rows_at[at] in rows)
        return found or None

    def _entered(self, patch: Patch = AS_CALLED) -> Places:
        """The positions of each share at which another value enters with other values in some rows. What none enters
        (noise, positions) says nothing of rows."""
        tapes = self.both(self.change(), patch)
        return {} if tapes is None else _moved(*tapes)

    def entered_at(self, row: int) -> Places:
        """The positions of each share at which another value enters with other inputs of this row."""
        tapes = self.both(self.alone(row, self.inputs()))
        return {} if tapes is None else _moved(*tapes)

    def places(self) -> list[Places]:
        """The positions of each row in each share; where rows are in orders of their own, or mixed, shown row by row.
        Empty where that is not known."""
        by_row = [self.rows_of((row,)) for row in range(self.rows)]
        if all(by_row):
            return [places or {} for places in by_row]
        shown = [self.entered_at(row) for row in range(self.rows)] if self.rows <= MOST_ROWS else []
        for number in set().union(*shown):
            at_each = [places.get(number, frozenset()) for places in shown]
            alone = [at for at in at_each if len(at) == 1]
            if not all(0 < len(at) <= self.rows // 2 for at in at_each) or len(set(alone)) < len(alone):
                return []
        return shown

    def touched(self, change: OtherValues) -> Places | None:
        """The positions of each share at which the gradient changes; None where that is not known."""
        tapes = self.both(change)
        if tapes is None:
            return None
        found: Places = {}
        for number, (one, two) in enumerate(zip(tapes[0].shares, tapes[1].shares, strict=True)):
            by = (one.gradient - two.gradient).abs().amax(1)
            found[number] = frozenset((by > self.bound(*tapes) * one.gradient.abs().max()).nonzero().flatten().tolist())
        return found

    def turned(self, call: TapedCall) -> TapedCall | None:
        """The transpose on the way to a call, of the last six, without which all rows are independent."""
        tape = self.tape(AS_IT_IS)
        before = [] if tape is None else [tape.calls[at] for at in sorted(leads_to(tape, call.inputs), reverse=True)]
        for one in [one for one in before if one.name in TRANSPOSES][:6]:
            without = self.independence((f"turned {one.number}", {one.number: lambda op: op.inputs[0]}))
            if without is not None and without.independent:
                return one
        return None

    def repeats(self) -> bool:
        """Whether the same step made twice gives the same shares."""
        base, again = self.tape(AS_IT_IS), self.tape(AS_IT_IS, ("again", {}))
        if base is None or again is None or not base.comparable(again):
            return False
        return all(torch.equal(a.gradient, b.gradient) for a, b in zip(base.shares, again.shares, strict=True))

    def bound(self, *tapes: Tape) -> float:
        """By how much shares may differ by the order of sums."""
        dtype = torch.float64 if all(t.double for t in tapes) else torch.float32
        return ROUNDING * torch.finfo(dtype).eps

    def _made(self, change: Change, replacements: Mapping[int, Replacement], *, shared_draws: bool) -> Tape | None:
        open_inputs, counts, double = self._ways[0]
        sizes = [size for p in self.evidence.run().parameters for size in p.shape]
        mode = RowTape(open_inputs=open_inputs, replacements=replacements, shared_draws=shared_draws)

        def stream(loop: TrainLoop) -> Iterator[Any]:
            self.few = few_rows(loop, sizes, counts)
            if self._chosen:
                batch = nested.take(self.few.batch, self._chosen, self.few.axis)
                self.few = replace(self.few, batch=batch, rows=len(self._chosen))
            mode.rows = self.few.rows
            try:
                changed = change.apply(self.few.batch, self.few.rows, self.few.axis)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                reraise_raised(error)
                raise CannotDecide(f"rows of {nested.describe(self.few.batch)} cannot be exchanged") from error
            return itertools.repeat(changed)

        if change == AS_IT_IS and not replacements and not shared_draws:
            mode.at_root = self._note_fixes
        plan = mode.plan(replace(self.evidence.plan(), stream=stream, double=double))
        try:
            record = self.evidence.rerun(replace(plan, before_item=lambda _number, item: mode.take(item)))
        except CannotDecide:
            return None
        mode.tape.double = record.double
        if record.backwards() or mode.tape.shares:
            return mode.tape
        if record.raised is not None:
            given = "a few rows of the batch" if change == AS_IT_IS else "rows with other values, or in another order"
            self._refused = self._refused or Refused(f"fit raised {record.raised.summary} on {given}")
        return None

    def _note_fixes(self, seen: RowTape) -> None:
        self.crossings.update((table.at, table) for table in crossings(seen))
        if not self.fixes:
            self.fixes.extend(row_fixes(seen, self.few.whole))


def _moved(base: Tape, other: Tape) -> Places:
    """The positions of each share at which another value enters, of those in which any does."""
    found = {}
    for number, (one, two) in enumerate(zip(base.shares, other.shares, strict=True)):
        moved = frozenset(at for at in range(len(one.value)) if not torch.equal(one.value[at], two.value[at]))
        if moved:
            found[number] = moved
    return found
