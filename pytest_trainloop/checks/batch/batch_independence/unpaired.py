"""What has one entry for each row and lost its rows before it met them: averaged weights, and sums over all pairs.

See docs/how-it-decides.md#rows-that-meet-outside-of-the-model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_trainloop import nested
from pytest_trainloop.checks.batch.batch_independence.shares import AS_IT_IS, RowShares
from pytest_trainloop.tracing.crossed_rows import summed_only
from pytest_trainloop.tracing.row_tape import changed, changed_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_trainloop.nested import Path
    from pytest_trainloop.runs.evidence import Evidence
    from pytest_trainloop.tracing.crossed_rows import Crossing
    from pytest_trainloop.tracing.row_tape import Tape, TapedCall

_NAMED = re.compile(r"weight|importance", re.IGNORECASE)
_AVERAGED = re.compile(
    r"\w*(weight|importance)\w*\.(mean|sum)\(|\b(mean|sum)\(\w*(weight|importance)\w*\)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Entries that any other row could have: "weights", one for each row, or one "side" of a table of all pairs."""

    kind: Literal["weights", "side"]
    rows: int
    call: TapedCall | None
    named: str = ""
    """The tensor of the batch that holds the weights."""


def unpaired(evidence: Evidence) -> Unpaired | None:
    """What is found first; None where everything keeps its rows, or where that cannot be seen."""
    shares = evidence.shared(RowShares.of)
    if shares is None or shares.few is None or shares.axis != 0:
        return None
    return next(_averaged(shares), None) or next(_crossed(shares), None)


def _averaged(shares: RowShares) -> Iterator[Unpaired]:
    """Weights of which the step reads the sum alone, while rows are apart otherwise: in any order they give the same
    shares, and other ones scale all shares by the quotient of the sums."""
    base = shares.tape(AS_IT_IS)
    for path, weights in _weights(shares):
        only = frozenset({path})
        alone = shares.independence(among=only)
        other = shares.tape(shares.change(only))
        if base is None or other is None or alone is None or alone.equal or not alone.apart:
            continue
        readers = list(_readers(base, other))
        name = next((key for key in reversed(path) if isinstance(key, str)), "")
        if not (_NAMED.search(name) or any(_AVERAGED.search(call.place.code) for call in readers)):
            continue
        moved = shares.at_other_places(only)
        by_inputs = shares.independence(among=shares.inputs())
        if moved is None or by_inputs is None or not (moved.equal and by_inputs.equal):
            continue
        if abs(alone.factor - _quotient(shares, path, weights)) <= shares.bound(base, other) * abs(alone.factor):
            yield Unpaired("weights", shares.rows, readers[-1] if readers else None, nested.shown(path))


def _readers(base: Tape, other: Tape) -> Iterator[TapedCall]:
    """The calls that change with the weights, up to the one where they meet a gradient."""
    for one, two in zip(base.calls, other.calls, strict=True):
        if changed(one, two):
            yield one
            if one.carries_gradient:
                return


def _weights(shares: RowShares) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of several values that hold one number for each row and never enter the model."""
    targets = shares.targets()
    for path, tensor in nested.paths(shares.few.batch) if shares.few is not None else ():
        one_each = path in targets and tensor.is_floating_point() and tensor.numel() == shares.rows
        if one_each and float(tensor.max()) > float(tensor.min()) >= 0.0:
            yield path, tensor


def _quotient(shares: RowShares, path: Path, weights: torch.Tensor) -> float:
    """By how much the sum of the weights changes where some rows have others."""
    batch = shares.few.batch if shares.few is not None else None
    changed_batch = shares.change(frozenset({path})).apply(batch, shares.rows, shares.axis)
    others = next(tensor for at, tensor in nested.paths(changed_batch) if at == path)
    return float(others.double().sum() / weights.double().sum())


def _crossed(shares: RowShares) -> Iterator[Unpaired]:
    """Tables of all pairs that are only summed: whichever row one side's entries belong to, no share changes."""
    base, other = shares.tape(AS_IT_IS), shares.tape(shares.change(None))
    if base is None or other is None or not base.comparable(other):
        return
    for found in shares.crossings.values():
        if not summed_only(base, found.at, shares.rows) or not _of_rows(shares, base, other, found):
            continue
        for number, rolled in enumerate(found.rolled):
            moved = shares.tape(AS_IT_IS, rolled, f"rolled {found.at} {number}")
            shift = shares.of_all(base, moved) if moved is not None and base.comparable(moved) else None
            if shift is not None and shift.equal:
                yield Unpaired("side", shares.rows, base.calls[found.at])
                break


def _of_rows(shares: RowShares, base: Tape, other: Tape, found: Crossing) -> bool:
    """Whether both sides have entries for rows: other values in some rows change those of one side and nothing else of
    it, and the other side too, or no other axis has the length of the rows (masks are not changed)."""
    some = set(shares.some)
    moved = [some if at < 0 else changed_rows(base.calls[at], other.calls[at], 0) for at in found.operands]
    return any(rows and rows <= some for rows in moved) and (all(moved) or _told_by_length(shares))


def _told_by_length(shares: RowShares) -> bool:
    """Whether no parameter and no other axis of the batch has as many entries as there are rows."""
    batch = shares.few.batch if shares.few is not None else None
    others = (n for t in nested.tensors(batch) if not t.is_nested for d, n in enumerate(t.shape) if d != shares.axis)
    return shares.rows not in {*others, *(n for p in shares.evidence.run().parameters for n in p.shape)}
