"""The loop on rows with their padding, compared with the loop on the same rows with less of it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_trainloop.checks.batch.padding_invariance.padded import Padded, Slice, padded, uneven
from pytest_trainloop.core.errors import CannotDecide
from pytest_trainloop.instruments.compositions.experiment import Difference, Experiment, Outcome
from pytest_trainloop.instruments.tracing.lockstep import Calls, Entry, Lockstep, Tape
from pytest_trainloop.recording.torch_names import (
    ATTENTION,
    LOSSES,
    MEAN_POOLS_1D,
    POOLS_1D,
    RECURRENT,
    REDUCTIONS,
    SOFTMAXES,
)
from pytest_trainloop.runs.shared_draws import first_unlike

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trainloop.instruments.gradients.compare import Agreement
    from pytest_trainloop.runs.evidence import Evidence

ATTENDED, POOLED, SHIFTED, TRAINED, DIVIDED, MIXED = "attention", "pooling", "positions", "targets", "divisors", "other"
"""The kinds of calls through which padding comes in."""

PATHS = (ATTENDED, POOLED, SHIFTED)
"""Those that a call of its own is at fault for, in the order in which they are tried."""

EVERY = frozenset({*PATHS, TRAINED, DIVIDED, MIXED})

MEANS = MEAN_POOLS_1D | {"mean", "nanmean", "embedding_bag"}
READS = frozenset({"__getitem__", "select"})
POOLS = RECURRENT | POOLS_1D | READS | {"embedding_bag"}

BY_FEATURE = 3
"""Axes that what is pooled has at least: rows, positions and features. With fewer it is a loss of each position."""

TAPES = 4
"""Tapes that are kept."""


def comparisons(evidence: Evidence) -> list[Compared]:
    """One for each padded group of tensors. Raises ``CannotDecide`` where no padding is known."""
    found = padded(evidence)
    experiment = Experiment(evidence, "rows that are all padded, or cut to their length")
    joint = {id(g.instead): Compared(g.instead, experiment) for g in found if g.instead is not None}
    return [Compared(group, experiment, joint.get(id(group.instead))) for group in found]


class Compared:
    """One padded group of tensors, with its padding and without. ``instead``: all groups of its width as one."""

    def __init__(self, group: Padded, experiment: Experiment, instead: Compared | None = None) -> None:
        self.group, self.experiment, self.instead = group, experiment, instead
        self.full: Slice | None = None
        """The slice whose gradient changes with its padding."""
        self.statistics = False
        """Whether it does with the statistics of the batch alone."""
        self._runs_through = False
        self._tapes: dict[Slice, Tape] = {}
        self._parts: dict[Slice, Outcome] = {}
        self._locksteps: dict[tuple[Slice, frozenset[str], int], tuple[Outcome, Lockstep]] = {}
        self._with_statistics: dict[Slice, Outcome] = {}

    def outcome(self, chosen: Slice) -> Outcome:
        """The step over a slice."""
        return self.experiment.arm((self, chosen), lambda: self.group.cut(chosen))

    def with_statistics(self, chosen: Slice) -> Outcome:
        """The same where batch norms take the statistics of the batch."""
        if chosen not in self._with_statistics:
            mode = Calls(statistics=True)
            made = self.experiment.arm((self, chosen, "statistics"), lambda: self.group.cut(chosen), mode)
            self._with_statistics[chosen] = made
        return self._with_statistics[chosen]

    def tape(self, part: Slice) -> Tape:
        """The calls of the step over a slice with less padding."""
        if part not in self._tapes:
            if len(self._tapes) >= TAPES:
                del self._tapes[next(iter(self._tapes))]
            tape = self._tapes[part] = Tape()
            self._parts[part] = self.experiment.arm((self, part), lambda: self.group.cut(part), tape)
        return self._tapes[part]

    def part(self, part: Slice) -> Outcome:
        """The step over a slice with less padding."""
        if part not in self._parts:
            self.tape(part)
        return self._parts[part]

    def in_step(self, full: Slice, kinds: frozenset[str] = frozenset(), keep: int = 0) -> tuple[Outcome, Lockstep]:
        """The slice with its padding, in step with the one that keeps so many padded positions. Results of calls of
        these kinds are replaced by those of that one."""
        key = full, kinds, keep
        if key not in self._locksteps:
            part = full.kept(keep)
            mode = Lockstep(self.tape(part), full.cut_to(part), lambda entry: self.kind(entry) in kinds)
            self._locksteps[key] = self.experiment.arm((self, *key), lambda: self.group.cut(full), mode), mode
        return self._locksteps[key]

    def kind(self, entry: Entry) -> str:
        """How padding comes in through a call."""
        if entry.op in ATTENTION | SOFTMAXES:
            return ATTENDED
        if entry.op in LOSSES:
            return TRAINED
        if not entry.joins or entry.moved:
            return SHIFTED if self.group.left else MIXED
        if entry.op in POOLS:
            return TRAINED if entry.met and entry.op in READS else POOLED
        if entry.op not in REDUCTIONS:
            return MIXED
        if entry.axes >= BY_FEATURE and not entry.met and entry.lost < entry.axes:
            # over rows too: a statistic of the batch (odd: experts_balanced_over_all_tokens)
            return POOLED if entry.lost <= 1 else MIXED
        return DIVIDED if entry.zeros and entry.op in MEANS else TRAINED

    def difference(
        self, full: Slice, keep: int = 0, kinds: frozenset[str] = frozenset(), *, statistics: bool = False
    ) -> Difference | None:
        """The slice compared with the one that keeps so many padded positions; None without a gradient."""
        if statistics:
            return self.experiment.difference(*(self.with_statistics(each) for each in (full.kept(keep), full)))
        more = self.in_step(full, kinds, keep)[0] if kinds else self.outcome(full)
        return self.experiment.difference(self.part(full.kept(keep)), more)

    def without_outputs(self, full: Slice, keep: int) -> Difference | None:
        """The same where padded outputs get no gradient in either."""
        real = full.kept(0)

        def made(chosen: Slice) -> Outcome:
            if chosen == real:
                return self.part(real)
            mode = Lockstep(self.tape(real), chosen.cut_to(real), lambda entry: False, silent=True)
            return self.experiment.arm((self, chosen, "without outputs"), lambda: self.group.cut(chosen), mode)

        return self.experiment.difference(made(full.kept(keep)), made(full))

    def first_difference(self) -> Difference | None:
        """Of the first slice whose gradient changes with its padding. Raises ``CannotDecide`` where none can be
        compared. The first padded position may be the end of a text, which the model predicts: if nothing changes once
        it is kept, and padding takes no other path, there is no difference."""
        compared, refused, rounded = 0, "", 0.0
        # (odd: declared_padding_ends_each_text, declared_angles_of_a_table_in_float32)
        for full in [*self.group.slices, *uneven(self.group.mask)]:
            if full.uneven and (compared or refused):
                continue
            why = self._refused(full)
            found = None if why else self.difference(full)
            if found is None:
                refused = why or refused
                continue
            compared += 1
            self.full = full
            if not found.equal and found.within_float32 and not self._mixes(full):
                rounded = found.agreement.difference
            elif not found.equal and (not self._ends_a_text(full) or self._takes_a_path(full)):
                return found
            if self.group.declared and any(name == "batch_norm" for name, *_ in self.tape(full.kept(0)).calls):
                other = self.difference(full, statistics=True)
                if other is not None and not other.within_float32:
                    self.statistics = True
                    return other
        self.full = None
        self._tapes.clear()
        if rounded:
            raise CannotDecide(
                f"the gradient changes with padding by {rounded:.1e} only, as a table or a constant in float32 makes "
                "it: make these with torch, in the precision of the model, to have padding judged"
            )
        if not compared:
            raise CannotDecide(refused or "the gradient of rows with padding is zero: nothing is compared")
        return None

    def _refused(self, full: Slice) -> str:
        """Why there is no gradient to compare in any of the ways to run the loop: other groups of near widths cut too
        or not, as many rows as in the batch, float32 (a kernel of the project's own may take no other dtype)."""
        while True:
            more, fewer = self.outcome(full), self.part(full.kept(0))
            refused = fewer.refused or more.refused
            if not refused or self._runs_through:
                self._runs_through |= not refused
                return refused or self.experiment.not_finite(fewer, more)
            if self.group.near and not self.group.in_step:
                self.group.near = ()
            elif self.group.count is None and len(full.rows) < len(self.group.mask.lengths):
                self.group.count = len(self.group.mask.lengths)
            elif self.experiment.precision == "float64":
                self.experiment.in_float32()
            else:
                return refused
            self.experiment.forget(self)
            for made in (self._tapes, self._parts, self._locksteps, self._with_statistics):
                made.clear()

    def _ends_a_text(self, full: Slice) -> bool:
        """Whether one padded position makes the difference, and more of them none."""
        found = self.difference(full, keep=1) if full.padding > 1 else None
        return found is not None and found.equal

    def _mixes(self, full: Slice) -> bool:
        """Whether padding takes part by attention or pooling: exact, however small, as in a net at its start."""
        return any(self.explained(full, *kinds) for kinds in ((ATTENDED,), (POOLED,), (ATTENDED, POOLED)))

    def _takes_a_path(self, full: Slice) -> bool:
        return self.in_step(full)[1].looks_elsewhere is not None or any(self.explained(full, kind) for kind in PATHS)

    def explained(self, full: Slice, *kinds: str) -> bool:
        """Whether both gradients agree with calls of these kinds replaced: without padding, or with one position of it,
        where that alone does not make them agree."""
        for keep in (0,) if self._ends_a_text(full) or full.padding < 2 else (0, 1):
            found = self.difference(full, keep, frozenset(kinds))
            if found is not None and found.equal and not math.isnan(found.losses[1]):
                return True
        return False

    def entries(self, full: Slice, kind: str) -> list[Entry]:
        """Calls of this kind through which padding comes in, where all others are as on the part."""
        return [entry for entry in self.in_step(full, EVERY)[1].entries if self.kind(entry) == kind]

    def require_comparable(self, full: Slice) -> None:
        """Raise ``CannotDecide`` or ``Unreliable`` where two runs differ by their random numbers as well."""
        again, seen = self.in_step(full)
        drawn = seen.drawn, self.tape(full.kept(0)).drawn
        sizes = [] if self.group.left else [full.total, full.real]
        if other := first_unlike(*drawn, sizes):
            raise CannotDecide(
                f"the loop draws random numbers by the length of the batch ({other}): no two are comparable"
            )
        self.experiment.require_repeatable((self, full), lambda: self.group.cut(full), again)

    def takes_for_padding(self, full: Slice, pad_id: int) -> bool:
        """Whether the gradient with this id in the padding is that without padding."""
        arm = self.experiment.arm((self, full, "id", pad_id), lambda: self.group.with_id(full, pad_id))
        found = self.experiment.difference(self.part(full.kept(0)), arm)
        return found is not None and found.equal

    def equal_with_masks_inverted(self, full: Slice) -> bool:
        """Whether both gradients are equal with masks inverted, and reach as many parameters as without padding."""
        wrong, real = self.group.inverted, full.kept(0)
        more, fewer = (
            self.experiment.arm((self, each, "inverted"), functools.partial(self.group.with_inverted, each, wrong))
            for each in (full, real)
        )
        found = self.experiment.difference(fewer, more)
        return found is not None and found.equal and fewer.reached >= self.part(real).reached

    def masks_unread(self, full: Slice) -> bool:
        """Whether the batch has masks, and the gradient is the same with all of them inverted."""
        masks = self.group.masks
        if not masks:
            return False
        other = self.experiment.arm((self, full, "masks"), lambda: self.group.with_inverted(full, masks))
        found = self.experiment.difference(self.outcome(full), other)
        return found is not None and found.equal

    def equal_with_zeros(self, full: Slice, pad_id: int) -> bool:
        """Whether both gradients are equal with zeros in the row of ``padding_idx`` of the embeddings that have this
        id."""
        more, fewer = (
            self.experiment.arm(
                (self, chosen, "zeros"), functools.partial(self.group.cut, chosen), Calls(pad_row_zero=pad_id)
            )
            for chosen in (full, full.kept(0))
        )
        found = self.experiment.difference(fewer, more)
        return found is not None and found.equal

    def tensor_differences(self) -> dict[str, Agreement]:
        """The gradients without padding and with it at each parameter, where they differ."""
        if self.full is None:
            return {}
        made = self.with_statistics if self.statistics else self.outcome
        return self.experiment.by_tensor(made(self.full.kept(0)), made(self.full))

    def smallest(self, full: Slice, holds: Callable[[Slice], bool]) -> Slice:
        """One real and one padded position of one row, or as few more as show the same cause."""
        one = replace(full, rows=full.rows[:1])
        for real in () if full.uneven or self.group.mask.joint else (1, 2, 4):
            few = one.narrowed(real, 1, left=self.group.left)
            if real < full.real and self._shows(few, holds):
                return few
        return one if self._shows(one, holds) else full

    def _shows(self, few: Slice, holds: Callable[[Slice], bool]) -> bool:
        found = self.difference(few, statistics=self.statistics)
        return found is not None and not found.equal and holds(few)
