"""The loop on rows with padding, against the loop on the same rows with less of it.

Both runs are made in float64, from the same weights, without dropout and with running statistics. What their first
steps consume must agree but for rounding (the bound is that of ``accumulation``): nothing that is real was changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop import nested
from pytest_trainloop.batches.grids import time_axes
from pytest_trainloop.batches.padding import PaddingMask, Proof, padding_ids, read_paddings
from pytest_trainloop.batches.values import plain
from pytest_trainloop.checks.batch.padding_invariance.counterfactuals import WAYS, Closed, Met, Seen
from pytest_trainloop.checks.batch.padding_invariance.slices import Part, cut, parts
from pytest_trainloop.errors import CannotDecide, Unreliable, UsageError
from pytest_trainloop.gradients.compare import Agreement, agreement, optimizers
from pytest_trainloop.gradients.tolerances import RESEEDED, ROUNDING
from pytest_trainloop.gradients.vectors import consumed, vectors
from pytest_trainloop.runs.batch_stream import first_batches
from pytest_trainloop.runs.process_state import preserved
from pytest_trainloop.runs.same_start import SameStart, varied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_trainloop.loop import TrainLoop
    from pytest_trainloop.recording.record import Record
    from pytest_trainloop.runs.evidence import Evidence

LOOKED_AT = 4
"""Batches of the loop that are looked at for their lengths."""

BOUNDS = {d: ROUNDING * torch.finfo(getattr(torch, d)).eps for d in ("float64", "float32")}
"""Within which two orders of summation agree, by the precision that a loop is run in."""

OPEN: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Compared:
    """One part with its padding (``part``) against the same trimmed (``less``): how far the gradients agree that the
    first step consumes, and the losses of both."""

    part: Part
    less: Part
    agreement: Agreement
    losses: tuple[float, float]
    parameters: int
    precision: str = "float64"

    @property
    def equal(self) -> bool:
        return self.agreement.difference <= BOUNDS[self.precision]

    @property
    def factor(self) -> float:
        """The share of real positions, where the gradient with padding is exactly so much of the one without: of all
        positions, or of all but one (targets that are shifted). 0 otherwise."""
        total, real = self.part.stop - self.part.start, self.less.stop - self.less.start
        shares = [real / total, (real - 1) / (total - 1)] if real > 1 else [real / total]
        bound = BOUNDS[self.precision]
        parallel = self.agreement.cosine > 1 - bound
        return next((s for s in shares if parallel and abs(self.agreement.ratio / s - 1) <= bound), 0.0)


class PaddingRuns:
    """The runs behind ``padding_invariance``, each made once.

    ``reason`` says what proves the padding; ``sure`` that the project itself marks it as such, or that its batches
    are not all of one length (``varying``)."""

    def __init__(
        self,
        batch: Any,
        padded: PaddingMask,
        window: int,
        evidence: Evidence,
        *,
        declared: bool,
        varying: bool,
    ) -> None:
        self._batch = batch
        self._padded = padded
        self._window = window
        self._plan, self._run_plan = evidence.plan(), evidence.rerun
        self._start = SameStart()
        self._runs: dict[object, tuple[Record, Seen]] = {}
        self._count: int | None = None
        self._precision = "float64"
        self._works = False
        self._declared = declared
        self.varying = varying
        self.refused = ""

    @classmethod
    def of(cls, evidence: Evidence) -> list[PaddingRuns]:
        """One for each length to which something in the first padded batch is padded. Raises ``CannotDecide`` where no
        padding is known, before the loop is run."""
        loop = evidence.fresh_loop()
        with preserved():
            try:
                return cls._of(evidence, loop)
            except UsageError:
                evidence.run()  # which is refused in the same words for every check
                raise

    @classmethod
    def _of(cls, evidence: Evidence, loop: TrainLoop) -> list[PaddingRuns]:
        given = first_batches(loop, LOOKED_AT)
        known = [(batch, [p for p in _padding(loop, batch) if parts(p)]) for batch in given]
        found = [(batch, padded) for batch, padded in known if padded]
        if not found:
            raise CannotDecide(
                "no padding is known in the batch: give one with rows of unequal lengths and pass "
                "padding=Padding(pad_id=...)"
                if loop.padding is None or loop.padding.pad_id is None
                else f"no row of the batch ends or begins with the declared pad_id {loop.padding.pad_id} where nothing "
                "else stands: give a batch with rows of unequal lengths"
            )
        record = evidence.run()
        if not record.rounds:
            raise CannotDecide("the loop makes no optimizer step, so that no gradient is consumed")
        window = max(1, round(record.items / record.rounds))
        batch, declared = nested.copy(found[0][0]), loop.padding is not None
        return [
            cls(batch, p, window, evidence, declared=declared, varying=len(_lengths(given, batch, p)) > 1)
            for p in found[0][1]
        ]

    @property
    def reason(self) -> str:
        return self._padded.reason

    @property
    def sure(self) -> bool:
        """Whether the project itself says that this is padding; a mask beside features may be of observations."""
        by_batch = self._padded.source == "lengths" or (self._padded.source == "mask" and self._padded.of_ids)
        return self._declared or self.varying or by_batch

    @property
    def by_lengths(self) -> bool:
        return self._padded.source == "lengths" and not self._declared

    @property
    def left(self) -> bool:
        return self._padded.side == "left"

    def first_difference(self) -> Compared | None:
        """The first part whose gradient changes with its padding. Raises ``CannotDecide`` where none could be compared.

        The first padded position may be the end of a text, which is to be predicted: what does not change once it is
        kept, and comes in by no other way, is no difference.
        """
        compared = 0
        for part in parts(self._padded):
            found = self.compare(part)
            if found is None:
                continue
            compared += 1
            if not found.equal and (not self._ends_a_text(found) or self._comes_in(found)):
                return found
        if not compared:
            raise CannotDecide(self.refused or "the gradient of rows with padding is zero: nothing is compared")
        return None

    def compare(self, part: Part, *, keep: int = 0, ways: frozenset[str] = OPEN) -> Compared | None:
        """The part with its padding and with ``keep`` positions of it, these ways closed in both; None where the loop
        cannot be run so (``refused`` says why), or no gradient comes."""
        less = part.trimmed(keep)
        both = [self._gradients(p, ways) for p in (part, less)]
        if None in both and not self._works and self._otherwise(part):
            return self.compare(part, keep=keep, ways=ways)
        self._works = self._works or None not in both
        if both[0] is None or both[1] is None:
            return None
        (record, more), (other, fewer) = both[0], both[1]
        pairs = [(o, agreement(*vectors([fewer[o], more[o]]))) for o in fewer if o in more]
        moving = [(o, a) for o, a in pairs if any(bool(g.any()) for g in (*fewer[o].values(), *more[o].values()))]
        if not moving:
            return None
        chosen, worst = max(moving, key=lambda pair: pair[1].difference)
        return Compared(part, less, worst, (_loss(record), _loss(other)), len(fewer[chosen]), self._precision)

    def _otherwise(self, part: Part) -> bool:
        """Whether there is another way to run a loop that did not run through: with as many rows as ever, and then in
        float32, since a kernel of its own may know no other."""
        rows = nested.rows(self._batch, self._padded.grid.batch_dim)
        if self._count is None and len(part.rows) < rows:
            self._count = rows
        elif self._precision == "float64":
            self._precision = "float32"
        else:
            return False
        self._runs.clear()
        self._start = SameStart()
        return True

    def _ends_a_text(self, found: Compared) -> bool:
        """Whether one padded position makes the difference, and more of them none."""
        kept = self.compare(found.part, keep=1) if found.part.padded > 1 else None
        return kept is not None and kept.equal

    def _comes_in(self, found: Compared) -> bool:
        ways = (frozenset({way}) for way in WAYS)
        return self.seen(found).inverted is not None or any(self.closes(found, way) is not None for way in ways)

    def closes(self, found: Compared, ways: frozenset[str]) -> Compared | None:
        """The comparison with these ways closed, if both gradients then agree: with what is left of the padding none,
        or one position, where that alone does not make them agree."""
        for keep in (0,) if self._ends_a_text(found) or found.part.padded < 2 else (0, 1):
            closed = self.compare(found.part, keep=keep, ways=ways)
            if closed is not None and closed.equal and closed.losses[0] == closed.losses[0]:
                return closed
        return None

    def seen(self, found: Compared, ways: frozenset[str] = OPEN) -> Seen:
        """What the run with padding met."""
        return self._made(found.part, ways)[1]

    def require_comparable(self, found: Compared) -> None:
        """Raises where two runs of the loop differ by more than the padding: by what they draw."""
        drawn = [self._made(part, OPEN)[1].drawn for part in (found.part, found.less)]
        if drawn[0] != drawn[1]:
            name = next(
                (d[0] for d in (*drawn[0], *drawn[1]) if d not in drawn[0] or d not in drawn[1]), drawn[0][0][0]
            )
            raise CannotDecide(
                f"the loop draws random numbers by the length of the batch ({name}): no two are comparable"
            )
        for fit_seed, refused in (
            (None, Unreliable("two identical runs of the loop differ: see determinism, and seed what draws there")),
            (
                RESEEDED,
                CannotDecide("the loop draws random numbers from python's or numpy's generators: draw with torch"),
            ),
        ):
            first, again = self._made(found.part, OPEN)[0], self._run(found.part, OPEN, fit_seed)[0]
            if any(_apart(first, again, o) > BOUNDS[self._precision] for o in optimizers(first)):
                raise refused

    def cut(self, found: Compared, ways: frozenset[str]) -> Compared | None:
        """The comparison without the gradient of padded outputs, if then only a factor is left of the difference: the
        share of real positions, or none."""
        for keep in (0, 1):
            without = self.compare(found.part, keep=keep, ways=ways) if keep < found.part.padded else None
            if without is not None and (without.equal or without.factor):
                return without
        return None

    def touched(self, found: Compared) -> list[Met]:
        """Calls of any way that padding takes part in."""
        return self._made(found.part, frozenset(WAYS))[1].closed

    def backward(self, found: Compared) -> str:
        """The line where the loss is backpropagated."""
        record = self._made(found.part, OPEN)[0]
        return next((str(b.place) for b in record.backwards()), "")

    def smallest(self, found: Compared, holds: Callable[[Compared], bool]) -> Compared | None:
        """The same difference, by the same cause, on one row and four positions or less; None where it is not there."""
        for part in _smaller(found.part, self.left):
            other = self.compare(part)
            if other is not None and not other.equal and holds(other):
                return other
        return None

    def _gradients(self, part: Part, ways: frozenset[str]) -> tuple[Record, dict[int, dict[str, torch.Tensor]]] | None:
        record = self._made(part, ways)[0]
        if record.raised is not None:
            self.refused = f"fit raised {record.raised.summary} on rows that are all padded, or cut to their length"
            return None
        low = [p.name for p in record.parameters if p.dtype in ("float16", "bfloat16")]
        if (self._precision == "float64" and not record.double) or low:
            self.refused = f"the loop computes in a low precision all the same ({', '.join((*record.lower, *low)[:1])})"
            return None
        found = {o: g for o in optimizers(record) if (g := consumed(record, o, 0))}
        if not found:
            self.refused = "the loop makes no optimizer step on these rows"
            return None
        return record, found

    def _made(self, part: Part, ways: frozenset[str]) -> tuple[Record, Seen]:
        key = (part, ways)
        if key not in self._runs:
            self._runs[key] = self._run(part, ways)
        return self._runs[key]

    def _run(self, part: Part, ways: frozenset[str], fit_seed: int | None = None) -> tuple[Record, Seen]:
        closed = Closed(part.span, ways)
        plan = varied(
            self._plan,
            self._start,
            lambda _loop: [cut(self._batch, self._padded, part, count=self._count)] * self._window,
        )
        plan = replace(plan, double=self._precision == "float64", enough=lambda r: r.rounds >= 1)
        record = self._run_plan(replace(plan, contexts=closed.contexts, fit_seed=fit_seed))
        return record, closed.seen


def _padding(loop: TrainLoop, batch: Any) -> list[PaddingMask]:
    time_first = loop.padding is not None and loop.padding.dim == 0
    return read_paddings(
        batch,
        at_least=Proof.EMPTY,  # rows are cut there, and all tensors with them
        batch_dim=loop.batch_dim if isinstance(loop.batch_dim, int) else int(time_first),
        declared=loop.padding,
        pad_ids=padding_ids(loop.modules.values()),
    )


def _lengths(given: list[Any], batch: Any, padded: PaddingMask) -> set[int]:
    """How long batches are where this one is padded."""
    grid = padded.grid
    for number, tensor in enumerate(_plain(batch)):
        axes = time_axes(tensor, grid.batch_dim, grid.rows, grid.length, grid.time_dim)
        if axes:
            same = [t for other in given for t in _plain(other)[number : number + 1] if t.dim() == tensor.dim()]
            return {t.shape[axes[0]] for t in same}
    return set()


def _plain(batch: Any) -> list[torch.Tensor]:
    return [t for t in nested.tensors(batch) if plain(t)]


def _loss(record: Record) -> float:
    """The first value that is backpropagated."""
    return next((root.value for b in record.backwards() for root in b.roots), float("nan"))


def _apart(first: Record, again: Record, optimizer: int) -> float:
    pair = [consumed(record, optimizer, 0) or {} for record in (first, again)]
    return agreement(*vectors(pair)).difference


def _smaller(part: Part, left: bool) -> Iterator[Part]:
    """One row of a part with four positions or less, the shortest first, and then as long as it is."""
    one = replace(part, rows=part.rows[:1])
    for real, padded in ((1, 1), (2, 1), (2, 2), (3, 1)):
        if real > part.last - part.first or padded > part.padded:
            continue
        if left:
            yield replace(one, start=part.first - padded, stop=part.first + real, last=part.first + real)
        else:
            yield replace(one, start=part.last - real, first=part.last - real, stop=part.last + padded)
    yield one
