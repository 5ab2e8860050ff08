"""How many entries of each row count: rows in an order that makes micro-batches as uneven as they can be.

A loop that averages over tokens can weigh micro-batches wrongly only where their counts differ. The order of the rows
is the only thing that is chosen; what counts is read off what the batch itself ignores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trainloop.declare import nested
from pytest_trainloop.instruments.batches.padding import Proof, counted_entries, read_paddings
from pytest_trainloop.instruments.batches.values import plain, whole
from pytest_trainloop.recording.events import LossCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pytest_trainloop.declare.loop import Padding
    from pytest_trainloop.recording.record import Record


TORCHS_OWN = -100
"""The default ``ignore_index`` of torch's losses; hand-written losses use it as well, and it is no class or id."""


@dataclass(frozen=True, slots=True)
class ValidTargets:
    """How many entries of each row count, and the rows in an order that makes micro-batches uneven."""

    order: tuple[int, ...]
    """All rows, those with the fewest valid entries first; in their own order where all have as many, or some none."""
    counts: tuple[tuple[int, ...], ...]
    """The number of valid entries of each row, once for each tensor that may say so."""

    def explaining(self, weights: Sequence[float], parts: Sequence[Sequence[int]]) -> list[int] | None:
        """The valid entries of each of these parts, which are given by their rows, by the counts that explain the
        weights; None where no counts do."""
        for counts in self.counts:
            valid = [sum(counts[row] for row in rows) for rows in parts]
            if all(abs(w / sum(weights) - n / sum(valid)) < 1e-6 for w, n in zip(weights, valid, strict=True)):
                return valid
        return None


def valid_targets(batch: Any, count: int, axis: int, padding: Padding | None, seen: Record) -> ValidTargets:
    """The valid entries of a batch with ``count`` rows along ``axis``; ``seen`` is a run of the loop on it."""
    found = dict.fromkeys(_counts(batch, count, axis, padding, _ignored(padding, seen)))
    uneven = [c for c in found if len(set(c)) > 1 and min(c) > 0]
    order = sorted(range(count), key=lambda row: uneven[0][row]) if uneven else list(range(count))
    return ValidTargets(tuple(order), tuple(uneven))


def _ignored(padding: Padding | None, seen: Record) -> list[int]:
    """Values that mean no label or no token: what the loss calls ignore first, then what was declared."""
    found = [call.ignore_index for call in seen.of(LossCall)]
    declared = [] if padding is None else [padding.ignore_index, padding.pad_id]
    return [v for v in dict.fromkeys([*found, *declared]) if v is not None]


def rows_without(batch: Any, count: int, axis: int, padding: Padding | None, seen: Record) -> dict[int, int]:
    """Rows of which nothing counts, while others of the batch do: by row, how many entries it has that could; first
    those of which most tensors say so."""
    ignored = list(dict.fromkeys([*_ignored(padding, seen), TORCHS_OWN]))
    masks = [rows for mask in counted_entries(batch, count, axis, ignored) for rows in _shifted(mask)]
    masks += [
        (leaf != value)[:, None]
        for leaf in nested.tensors(batch)
        for value in ignored
        if leaf.shape == (count,) and plain(leaf) and whole(leaf) and bool((leaf == value).any())
    ]
    entries: dict[int, list[int]] = {}
    for mask in masks:
        if mask.shape[1] and bool(mask.any()):
            for row in (~mask.any(1)).nonzero().flatten().tolist():
                entries.setdefault(row, []).append(mask.shape[1])
    return {row: found[0] for row, found in sorted(entries.items(), key=lambda item: -len(item[1]))}


def _shifted(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All entries, and those without the first or last position, which a loss on shifted targets drops."""
    return mask, mask[:, 1:], mask[:, :-1]


def _counts(
    batch: Any, count: int, axis: int, padding: Padding | None, ignored: list[int]
) -> Iterator[tuple[int, ...]]:
    """Valid entries by row, then lengths that are given as such, how many entries the tensors have that are in a list
    with one item for each row, and the positions that are no padding."""
    for mask in counted_entries(batch, count, axis, ignored):
        for rows in _shifted(mask):
            yield tuple(int(n) for n in rows.sum(1))
    for leaf in nested.tensors(batch):
        if leaf.shape == (count,) and plain(leaf) and whole(leaf):
            yield tuple(int(n) for n in leaf)
    for listed in nested.lists_of_rows(batch, count):
        yield from zip(*([len(t) for t in nested.tensors(row) if t.dim()] for row in listed), strict=False)
    for found in read_paddings(batch, at_least=Proof.EMPTY, batch_dim=axis, declared=padding):
        yield found.lengths
