"""Where rows meet outside of the model, and what that means: labels that stand at other rows, an operation along the
rows, or nothing that could be called a fault without a declaration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_trainloop import nested
from pytest_trainloop.batches.other_values import OtherValues
from pytest_trainloop.checks.batch.batch_independence.shares import AS_IT_IS, MOST_ROWS, RowShares, Shift, Touched
from pytest_trainloop.tracing.row_tape import changed, changed_rows, leads_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.nested import Path
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.row_fixes import RowFix
    from pytest_trainloop.tracing.row_tape import Tape, TapedCall

Why = Literal["every", "permuted", "operation", "unknown"]


@dataclass(slots=True)
class Meeting:
    """Rows whose shares depend on other rows.

    "every": each output is compared with the targets of all rows; "permuted": with those of another one, in no fixed
    order; "operation": ``fix`` keeps all rows apart; "unknown": none of these.
    """

    why: Why
    rows: int
    rows_known: bool
    changed: tuple[int, ...] = ()
    """The rows that were changed."""
    share: int = 0
    """A row whose share changed with them."""
    call: TapedCall | None = None
    """Where rows meet."""
    fix: RowFix | None = None
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """The row of a target, and the one whose share changes with it."""
    path: Path = ()
    """Where in the batch these targets are."""
    target: str = ""
    """The tensor of the batch that holds these targets."""


def meeting(evidence: Evidence) -> Meeting | None:
    """How rows meet in one step of the loop; None where all are apart, or where it cannot be seen."""
    shares = evidence.shared(RowShares.of)
    shift = shares.independence() if shares is not None else None
    if shares is not None and shift is not None and shift.apart and evidence.declared("rows_interact") is False:
        shares.all_but_two = True  # an extreme is taken of one row: that of the rows that were not changed
        shift = shares.independence()
    if shares is not None and shift is not None and shift.equal:
        return _at_masks(shares)
    if shares is None or shift is None or shares.few is None:
        return None
    found = Meeting("unknown", shares.rows, shares.few.rows_known, shares.some, next(iter(shift.rows), 0))
    _Judge(shares, found).judge(shift)
    return None if shift.apart and found.why == "unknown" else found


def _at_masks(shares: RowShares) -> Meeting | None:
    """Rows that meet the masks of other rows, by copies in another order."""
    if shares.few is None or not any(fix.of_layout for fix in shares.fixes) or not shares.has_masks():
        return None
    shares.with_masks = True
    shift = shares.independence()
    if shift is not None and not shift.apart:
        found = Meeting("unknown", shares.rows, shares.few.rows_known, shares.some, next(iter(shift.rows), 0))
        if _Judge(shares, found).by_operation(lambda fix: fix.of_layout):
            return found
    shares.with_masks = False
    return None


@dataclass(slots=True)
class _Judge:
    shares: RowShares
    found: Meeting

    def judge(self, shift: Shift) -> None:
        targets = sorted(self.shares.targets(), key=str)
        met = [path for path in targets if self._meets(path, shift)]
        for path in met:
            if self._meets_every(path):
                return
        if not shift.apart and self.by_operation(lambda fix: not fix.of_layout):
            return
        for path in [] if shift.apart else met:
            if self._permuted(path):
                return
        if not shift.apart and self.by_operation(lambda fix: fix.of_layout):
            return
        self.found.call = None if shift.apart else self._where_rows_meet()

    def by_operation(self, asked: Callable[[RowFix], bool]) -> bool:
        """Whether one of the fixes that are asked for keeps all shares apart. Copies must be of two tensors: rows of
        one may be compared with others of the same on purpose."""
        for fix in filter(asked, self.shares.fixes):
            without = self.shares.independence(fix.replacements, fix.kind)
            if without is None or not without.apart:
                continue
            sides = (fix.sources, self._others(fix)) if fix.kind in ("repeated", "interleaved") else ()
            if not any(self.shares.meet_among_themselves(side) for side in sides):
                self.found.why, self.found.fix = "operation", fix
                return True
        return False

    def _others(self, fix: RowFix) -> frozenset[Path]:
        few = self.shares.few
        return frozenset() if few is None else frozenset(p for p, _ in nested.paths(few.batch) if p not in fix.sources)

    def _meets(self, path: Path, shift: Shift) -> bool:
        """Whether targets of some rows change the shares of others, if only by a factor where all together do."""
        alone = self.shares.independence(among=frozenset({path}))
        return alone is not None and not (alone.equal if shift.apart else alone.apart)

    def _meets_every(self, path: Path) -> bool:
        """Whether the loss is a sum over all pairs of an output and a target: it stays the same where the targets of
        all rows change places, each target adds its part to the share of each row, and no input does. Where shares
        are scaled only, both must meet in a table of rows by rows: a product of two means is no such sum."""
        targets = frozenset({path})
        moved = self.shares.at_other_places(targets)
        if moved is None or not moved.equal:
            return False
        by_inputs = self.shares.independence(among=self.shares.inputs())
        call = self._first_compared(targets)
        if by_inputs is None or not by_inputs.equal or call is None:
            return False
        pairwise = any(list(shape).count(self.shares.rows) > 1 for shape in call.shapes)
        if not pairwise or not self._adds_up(targets):
            return False
        self._found("every", path, call)
        return True

    def _found(self, why: Why, path: Path, call: TapedCall | None) -> None:
        self.found.why, self.found.call = why, call
        self.found.path, self.found.target = path, nested.shown(path)

    def _adds_up(self, targets: frozenset[Path]) -> bool:
        """Whether two targets changed together change the shares of others by as much as one by one."""
        shares = self.shares
        both, own = shares.some, shares.rows_of(shares.some)
        tapes = [
            shares.tape(OtherValues(rows, targets, floats_only=shares.floats_only, spared=both))
            for rows in (both, both[:1], both[1:])
        ]
        base = shares.tape(AS_IT_IS)
        if base is None or own is None or any(t is None or not base.comparable(t) for t in tapes):
            return False
        for number, excluded in own.items():
            together, first, second = (
                t.shares[number].gradient - base.shares[number].gradient for t in tapes if t is not None
            )
            others = [at for at in range(len(together)) if at not in excluded]
            rest = (together - first - second)[others]
            size = max(float(base.shares[number].gradient.abs().max()), float(together.abs().max()))
            if float(rest.abs().max()) > shares.bound(base) * size:
                return False
        return True

    def _permuted(self, path: Path) -> bool:
        """Whether each target changes the share of one row, and that is another, in no fixed order: copies of the batch
        may each be shifted by a number of rows of their own. Nothing is said where all meet their own row in one of the
        shares: other shares are then other rows on purpose, as negatives are."""
        met = list(self._met(path))
        rows = self.shares.rows
        if any(found is None for _, found in met):
            return False
        places = [(label, at) for label, found in met for at in found or ()]
        if self._entries(path) == 1 and len({at[:2] for _, at in places}) < len(places):
            return False  # a position that several targets change
        pairs = [(label, row) for label, (_, _, row, _) in places]
        shifts: dict[tuple[int, int], set[int]] = {}
        for label, (number, _, row, copy) in places:
            shifts.setdefault((number, copy), set()).add((label - row) % rows)
        copies = {copy for _, copy in shifts}
        own = {number for number, _ in shifts} - {number for (number, _), by in shifts.items() if by != {0}}
        wrong = [(label, row) for label, row in pairs if label != row]
        if not wrong or max(map(len, shifts.values())) < 2 or len({label for label, _ in pairs}) < 2:
            return False
        if own or len(copies) >= rows or not self.shares.places_are_seen([label for label, _ in wrong]):
            return False
        self._found("permuted", path, self._first_compared(frozenset({path})))
        self.found.pairs = pairs
        self.found.changed, self.found.share = (wrong[0][0],), wrong[0][1]
        return True

    def _entries(self, path: Path) -> int:
        """How many targets a row has."""
        few = self.shares.few
        tensor = next((t for p, t in nested.paths(few.batch) if p == path), None) if few is not None else None
        return 0 if few is None or tensor is None else tensor.numel() // max(few.rows, 1)

    def _met(self, path: Path) -> Iterator[tuple[int, set[Touched] | None]]:
        """Targets by their row, and what each changes; None where that cannot be told, or is several rows of one copy.
        Ends with the first of these."""
        few, entries = self.shares.few, self._entries(path)
        if few is None or not entries:
            return
        chosen = range(few.rows) if entries == 1 else (0, few.rows // 2, few.rows - 1)
        for row in chosen if few.rows <= MOST_ROWS else ():
            for position in dict.fromkeys((0, entries // 2)):
                found = self.shares.touched(OtherValues((row,), frozenset({path}), position))
                copies = [(number, copy) for number, _, _, copy in found or ()]
                several = len(set(copies)) < len(copies)
                yield row, None if several else found
                if found is None or several:
                    return

    def _first_compared(self, targets: frozenset[Path]) -> TapedCall | None:
        """The first call that carries a gradient and depends on the targets."""
        base = self.shares.tape(AS_IT_IS)
        other = self.shares.tape(self.shares.change(targets))
        if base is None or other is None:
            return None
        reached = leads_to(base, base.roots)
        return next(
            (
                one
                for at, (one, two) in enumerate(zip(base.calls, other.calls, strict=True))
                if one.carries_gradient and changed(one, two) and (not reached or at in reached)
            ),
            None,
        )

    def _where_rows_meet(self) -> TapedCall | None:
        base, other = self.shares.tape(AS_IT_IS), self.shares.tape(self.shares.change(None))
        return None if base is None or other is None else first_meeting(base, other, self.shares.rows)


def first_meeting(base: Tape, other: Tape, rows: int) -> TapedCall | None:
    """The first call on the way to the root whose result changes at other rows than what it was given; where that was
    given a statistic, the call that took it."""
    reached = leads_to(base, base.roots)
    moved: dict[int, set[int]] = {}
    single: set[int] = set()
    for at, (one, two) in enumerate(zip(base.calls, other.calls, strict=True)):
        if not changed(one, two):
            continue
        axes = [d for sums in one.sums for d in sums if d >= 0 and len(sums[d]) == rows]
        found = set[int]().union(*(changed_rows(one, two, axis) for axis in axes))
        given = [before for before in one.inputs if before in moved or before in single]
        own = set[int]().union(*(moved[before] for before in given if before in moved))
        if not axes:
            single.add(at)
            continue
        moved[at] = found
        if at not in reached or found <= own:
            continue
        statistics = [before for before in given if before in single]
        if statistics or own:
            return base.calls[statistics[0]] if statistics else one
    return None
