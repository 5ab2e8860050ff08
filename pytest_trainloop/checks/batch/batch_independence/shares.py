"""What each row of the batch gives the loss, its share, and whether that changes with the other rows.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.

A row's share is the gradient of what the loop backpropagates with respect to what entered the model of this row. In a
sum of losses of rows it depends on this row alone, and on counts, which scale all shares alike. So other values in some
rows must leave the shares of all others as they are, or scale them by one number.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.other_values import OtherOrder, OtherValues, changes, has_rows, roll, rows_that_differ
from pytest_trainloop.batches.own_data import makes_own_data
from pytest_trainloop.checks.batch.batch_independence.few_rows import COUNTS, few_rows
from pytest_trainloop.errors import CannotDecide, Refused
from pytest_trainloop.gradients.tolerances import ROUNDING
from pytest_trainloop.tracing.crossed_rows import Crossing, crossings
from pytest_trainloop.tracing.row_fixes import RowFix, row_fixes
from pytest_trainloop.tracing.row_tape import RowTape, Tape
from pytest_trainloop.whose import reraise_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_trainloop.batches.other_values import Change
    from pytest_trainloop.checks.batch.batch_independence.few_rows import FewRows
    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.nested import Path
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.forward_pass import Replacement

AS_IT_IS = OtherValues(())
_COUNTS = tuple(n for n in COUNTS if n > 3)
"""Two rows change, and at least two do not."""

Touched = tuple[int, int, int, int]
"""A share, the position in it, the row that stands there and which of the row's copies that is."""

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
    """How the shares of the rows that did not change differ between two steps.

    ``factor``: what scales all of them, by least squares; ``rest``: the largest part that it leaves of any one's
    length, over the longest. ``rows``: the positions at which it does.
    """

    factor: float
    rest: float
    rows: tuple[int, ...]
    bound: float

    @property
    def apart(self) -> bool:
        """Whether the shares are the same but for one factor."""
        return self.rest <= self.bound

    @property
    def equal(self) -> bool:
        return self.apart and abs(self.factor - 1.0) <= self.bound


@dataclass(slots=True)
class RowShares:
    """The steps of one loop over a few rows, each made once."""

    evidence: Evidence
    few: FewRows | None = None
    _tapes: dict[tuple[Change, str, bool], Tape | None] = field(default_factory=dict)
    _ways: list[tuple[bool, tuple[int, ...], bool]] = field(default_factory=lambda: list(_WAYS))
    floats_only: bool = False
    """Whether whole numbers stay in changed rows, since the step is another one without them."""
    all_but_two: bool = False
    with_masks: bool = False
    """Whether masks and lengths change with the other values of a row."""
    chosen: tuple[int, ...] = ()
    """The rows of the few that a step is made over; none for all."""
    fixes: list[RowFix] = field(default_factory=list)
    """What runs over rows in the step as it is."""
    _refused: Refused | None = None
    crossings: dict[int, Crossing] = field(default_factory=dict)  # in the step as it is, by their place on the tape

    @classmethod
    def of(cls, evidence: Evidence) -> RowShares | None:
        """None where the loop cannot be run so, or nothing of the batch enters a model."""
        return evidence.shared(cls.tried)[0]

    @classmethod
    def require_taken(cls, evidence: Evidence) -> None:
        """Raise ``CannotDecide`` where the loop raised on a few of its rows, or on rows with other values, or gave NaN
        for these, and nothing could be seen therefore."""
        made, refused = evidence.shared(cls.tried)
        refused = refused if made is None else made._refused
        if refused is not None and (made is None or not made._moved(None, "")):
            raise refused
        tapes = [] if made is None else list(made._tapes.values())
        if any(math.isnan(value) for tape in tapes if tape is not None for value in tape.values):
            raise CannotDecide("the loss is NaN on few rows of the batch, or on rows with other values")

    @classmethod
    def tried(cls, evidence: Evidence) -> tuple[RowShares | None, Refused | None]:
        """The steps, or what the loop raised where it takes no few rows."""
        if evidence.shared(makes_own_data) or evidence.run().raised is not None:
            return None, None
        made = cls(evidence)
        while made._ways:
            base = made.tape(AS_IT_IS)
            if base is not None and base.shares and not base.refused and made.rows >= 4:
                return made, None
            made._ways.pop(0)
            made._tapes.clear()
            made.fixes.clear()
            made.crossings.clear()
        return None, made._refused

    @property
    def rows(self) -> int:
        return self.few.rows if self.few is not None else 0

    @property
    def axis(self) -> int:
        return self.few.axis if self.few is not None else 0

    @property
    def some(self) -> tuple[int, ...]:
        """The rows that are changed together: two, with others before, between and behind or beside them, or all but
        these; of chosen rows the last."""
        if self.chosen:
            return (self.rows - 1,)
        two = (1, self.rows // 2 + 1)
        return tuple(row for row in range(self.rows) if row not in two) if self.all_but_two else two

    def over(self, rows: tuple[int, ...]) -> RowShares:
        """The steps over these rows alone."""
        return RowShares(
            self.evidence,
            _ways=self._ways[:1],
            floats_only=self.floats_only,
            with_masks=self.with_masks,
            chosen=rows,
        )

    def tape(
        self,
        change: Change,
        replacements: Mapping[int, Replacement] | None = None,
        key: str = "",
        *,
        shared_draws: bool = False,
    ) -> Tape | None:
        """The step over the changed batch; None where it raised, or cannot be compared. ``shared_draws``: what is drawn
        is the same for every row."""
        known = (change, key, shared_draws)
        if known not in self._tapes:
            self._tapes[known] = self._made(change, replacements or {}, shared_draws=shared_draws)
        return self._tapes[known]

    def change(self, among: frozenset[Path] | None) -> OtherValues:
        """Other values in some rows of the tensors at these paths, or of all."""
        return OtherValues(self.some, among, floats_only=self.floats_only, spared=self.some, with_masks=self.with_masks)

    def independence(
        self,
        replacements: Mapping[int, Replacement] | None = None,
        key: str = "",
        *,
        among: frozenset[Path] | None = None,
    ) -> Shift | None:
        """What other values in some rows do to the shares of the others; None where that cannot be seen."""
        while True:
            base = self.tape(AS_IT_IS, replacements, key)
            other = self.tape(self.change(among), replacements, key)
            if base is not None and other is not None and base.comparable(other):
                if self.scattered(replacements, key):
                    return Shift(1.0, math.inf, tuple(row for row in range(self.rows) if row not in self.some), 0.0)
                return self.shift(base, other, self.rows_of(self.some, replacements, key))
            if self.floats_only or replacements:
                return None
            self.floats_only = True

    def shift(self, base: Tape, other: Tape, own: Mapping[int, frozenset[int]] | None) -> Shift | None:
        """The difference at the positions of each share that are not among its ``own``, over the shares that have any;
        None where one of them entered with another value, or where there is no such share."""
        if own is None:
            return None
        pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for number, (one, two) in enumerate(zip(base.shares, other.shares, strict=True)):
            for at in range(len(one.gradient)) if number in own else ():
                if at in own[number]:
                    continue
                if not torch.equal(one.value[at], two.value[at]):
                    return None
                pairs.append((at, one.gradient[at], two.gradient[at]))
        return _shift(pairs, self.bound(base, other))

    def meet_among_themselves(self, paths: frozenset[Path]) -> bool:
        """Whether other values in some rows of these tensors change the shares of other rows of the same."""
        if not paths:
            return False
        base, other = self.tape(AS_IT_IS), self.tape(self.change(paths))
        if base is None or other is None or not base.comparable(other):
            return True
        pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for one, two in zip(base.shares, other.shares, strict=True):
            moved = [not torch.equal(one.value[at], two.value[at]) for at in range(len(one.value))]
            if any(moved):
                pairs += [(at, one.gradient[at], two.gradient[at]) for at, is_moved in enumerate(moved) if not is_moved]
        shift = _shift(pairs, self.bound(base, other))
        return shift is not None and not shift.apart

    def has_masks(self) -> bool:
        """Whether a tensor with rows keeps its values where rows get others."""
        return self.few is not None and any(
            has_rows(tensor, self.rows, self.axis) and not changes(path, tensor, self.axis)
            for path, tensor in nested.paths(self.few.batch)
        )

    def rows_of(
        self, rows: tuple[int, ...], replacements: Mapping[int, Replacement] | None = None, key: str = ""
    ) -> dict[int, frozenset[int]] | None:
        """For each share the positions that these rows have in it: rows one by one, or batches one after the other, or
        each row several times. Shown by what entered where two rows held other values; None where it shows neither."""
        found: dict[int, frozenset[int]] = {}
        for number, (size, moved) in self._moved(replacements, key).items():
            way = next((w for w in _ways(size, self.rows) if moved <= w(self.some)), None)
            if way is None and rows != self.some:
                return None
            found[number] = moved if way is None else way(rows)
        return found or None

    def scattered(self, replacements: Mapping[int, Replacement] | None = None, key: str = "") -> bool:
        """Whether other values in some rows are other values in more rows of what enters the model."""
        return any(
            len(moved) > len(self.some) * max(1, size // self.rows)
            for size, moved in self._moved(replacements, key).values()
        )

    def _moved(self, replacements: Mapping[int, Replacement] | None, key: str) -> dict[int, tuple[int, frozenset[int]]]:
        """Of each share that some rows enter by their number: its length, and the positions where another value enters
        with other values in these rows. What none enters (noise, positions) says nothing of rows."""
        base, other = self.tape(AS_IT_IS, replacements, key), self.tape(self.change(None), replacements, key)
        if base is None or other is None or not base.comparable(other):
            return {}
        found: dict[int, tuple[int, frozenset[int]]] = {}
        for number, (one, two) in enumerate(zip(base.shares, other.shares, strict=True)):
            moved = frozenset(at for at in range(len(one.value)) if not torch.equal(one.value[at], two.value[at]))
            if moved:
                found[number] = len(one.value), moved
        return found

    def targets(self) -> frozenset[Path]:
        """The tensors with rows that never enter the model; none where it is not known what does."""
        base = self.tape(AS_IT_IS)
        if base is None or not base.entered or self.few is None:
            return frozenset()
        return frozenset(
            path
            for path, tensor in nested.paths(self.few.batch)
            if path not in base.entered and has_rows(tensor, self.rows, self.axis) and changes(path, tensor, self.axis)
        )

    def inputs(self) -> frozenset[Path]:
        """The tensors with rows that enter the model."""
        base = self.tape(AS_IT_IS)
        return frozenset(base.entered) if base is not None else frozenset()

    def at_other_places(self, paths: frozenset[Path]) -> Shift | None:
        """What it does to all shares that these tensors' rows are moved on by one; None where that changes no row, or
        cannot be seen."""
        if self.few is None:
            return None
        order = roll(self.rows)
        if not paths or not rows_that_differ(self.few.batch, order, paths, self.axis):
            return None
        base, other = self.tape(AS_IT_IS), self.tape(OtherOrder(order, paths))
        if base is None or other is None or not base.comparable(other):
            return None
        return self.of_all(base, other)

    def of_all(self, base: Tape, other: Tape) -> Shift | None:
        """The difference of all shares, those of the changed rows too."""
        aligned = self.rows_of(self.some)
        return None if aligned is None else self.shift(base, other, dict.fromkeys(aligned, frozenset()))

    def touched(self, change: OtherValues) -> set[Touched] | None:
        """What changes with some targets; None where that cannot be told."""
        base, other, places = self.tape(AS_IT_IS), self.tape(change), self._places()
        if base is None or other is None or places is None or not base.comparable(other):
            return None
        bound, found = self.bound(base, other), set[Touched]()
        for number, (one, two) in enumerate(zip(base.shares, other.shares, strict=True)):
            apart = (one.gradient - two.gradient).abs().amax(1)
            for at in (apart > bound * one.gradient.abs().max()).nonzero().flatten().tolist():
                for row, where in enumerate(places):
                    own = sorted(where.get(number, ()))
                    if at in own:
                        found.add((number, at, row, own.index(at)))
        return found

    def _places(self) -> list[dict[int, frozenset[int]]] | None:
        """The positions of each row in each share; where rows are in orders of their own, shown row by row."""
        by_row = [self.rows_of((row,)) for row in range(self.rows)]
        if all(places is not None for places in by_row):
            return [places or {} for places in by_row]
        shown = [self.entered_at(row) for row in range(self.rows)] if self.rows <= MOST_ROWS else []
        base = self.tape(AS_IT_IS)
        if base is None or not shown:
            return None
        for number in set().union(*shown):
            standing = [places.get(number, frozenset()) for places in shown]
            if any(len(at) != 1 for at in standing) or len(set(standing)) < len(standing):
                return None
        return shown

    def places_are_seen(self, rows: Iterable[int]) -> bool:
        """Whether what these rows hold enters at their positions in the shares, and nowhere else."""
        places = self._places()
        return places is not None and all(self.entered_at(row) == places[row] for row in dict.fromkeys(rows))

    def entered_at(self, row: int) -> dict[int, frozenset[int]]:
        """The positions of each share at which another value enters with other inputs of this row."""
        base, other = self.tape(AS_IT_IS), self.tape(OtherValues((row,), self.inputs(), floats_only=self.floats_only))
        if base is None or other is None or not base.comparable(other):
            return {}
        found: dict[int, frozenset[int]] = {}
        for number, (one, two) in enumerate(zip(base.shares, other.shares, strict=True)):
            moved = frozenset(at for at in range(len(one.value)) if not torch.equal(one.value[at], two.value[at]))
            if moved:
                found[number] = moved
        return found

    def repeats(self) -> bool:
        """Whether the same step made twice gives the same shares."""
        base, again = self.tape(AS_IT_IS), self.tape(AS_IT_IS, key="again")
        if base is None or again is None or not base.comparable(again):
            return False
        return all(torch.equal(a.gradient, b.gradient) for a, b in zip(base.shares, again.shares, strict=True))

    def bound(self, *tapes: Tape) -> float:
        """By how much shares may differ by the order of sums."""
        dtype = torch.float64 if all(t.double for t in tapes) else torch.float32
        return ROUNDING * torch.finfo(dtype).eps

    def _made(self, change: Change, replacements: Mapping[int, Replacement], *, shared_draws: bool) -> Tape | None:
        open_inputs, counts, double = self._ways[0]
        seen = self.evidence.run()
        sizes = [size for p in seen.parameters for size in p.shape]
        mode = RowTape(open_inputs=open_inputs, replacements=replacements, shared_draws=shared_draws)

        def stream(loop: TrainLoop) -> Iterator[Any]:
            self.few = few_rows(loop, sizes, counts)
            if self.chosen:
                batch = nested.take(self.few.batch, self.chosen, self.few.axis)
                self.few = replace(self.few, batch=batch, rows=len(self.chosen))
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
        plan = replace(plan, before_item=lambda _number, item: mode.take(item))
        try:
            record = self.evidence.rerun(plan)
        except CannotDecide:
            return None
        mode.tape.double = record.double
        if record.backwards() or mode.tape.shares:
            return mode.tape
        if record.raised is not None:
            given = (
                "on a few rows of the batch" if change == AS_IT_IS else "on rows with other values, or in another order"
            )
            self._refused = self._refused or Refused(f"fit raised {record.raised.summary} {given}")
        return None

    def _note_fixes(self, seen: RowTape) -> None:
        self.crossings.update((found.at, found) for found in crossings(seen))
        if not self.fixes and self.few is not None:
            self.fixes.extend(row_fixes(seen.ops, seen.rows, self.few.whole, seen.made_of))


def _ways(size: int, rows: int) -> tuple[Callable[[tuple[int, ...]], frozenset[int]], ...]:
    """Where rows may stand among ``size`` positions: batches one after the other, or each row several times."""
    each = max(1, size // rows)
    return (
        lambda chosen: frozenset(at for at in range(size) if at % rows in chosen),
        lambda chosen: frozenset(at for at in range(size) if at // each in chosen),
    )


def _shift(pairs: list[tuple[int, torch.Tensor, torch.Tensor]], bound: float) -> Shift | None:
    longest = max((float(a.norm()) for _, a, _ in pairs), default=0.0)
    finite = all(bool(a.isfinite().all() and b.isfinite().all()) for _, a, b in pairs)
    if not finite or longest == 0.0:
        return None
    length = sum(float(a @ a) for _, a, _ in pairs)
    factor = sum(float(a @ b) for _, a, b in pairs) / length
    rests = [(at, float((b - factor * a).norm()) / longest) for at, a, b in pairs]
    off = tuple(dict.fromkeys(at for at, rest in rests if rest > bound))
    return Shift(factor, max(rest for _, rest in rests), off, bound)
