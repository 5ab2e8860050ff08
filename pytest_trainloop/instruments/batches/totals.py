"""What all rows of a batch share: how many there are, how many tokens count, offsets, weights.

A loop that divides by such a number is given a wrong one where rows are taken from the batch. Where a number is the
total of something that is known for each row, it is recomputed for the rows that are left; on what else the gradient
may depend is measured by doubling it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_trainloop.declare import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from pytest_trainloop.declare.nested import Path


def shared_by_rows(batch: Any, rows: int) -> dict[Path, float]:
    """Numbers, and tensors that have no entry for each row (NaN in place of a number), by their path."""
    found: dict[Path, float] = {}

    def number(path: Path, value: float) -> float:
        found[path] = value
        return value

    def tensor(path: Path, value: torch.Tensor) -> torch.Tensor:
        found[path] = float("nan")
        return value

    _changed(batch, rows, number, tensor)
    return found


def doubled(batch: Any, rows: int, among: Container[Path]) -> Any:
    """The batch with the values at these paths doubled."""
    return _changed(
        batch, rows, lambda path, n: 2 * n if path in among else n, lambda path, t: 2 * t if path in among else t
    )


def recounted(batch: Any, rows: int, chosen: Sequence[int], totals: Mapping[Path, Sequence[int]]) -> Any:
    """The batch with the numbers that are totals over rows recomputed for the chosen ones."""

    def count(path: Path, value: float) -> float:
        return sum(totals[path][row] for row in chosen) if path in totals else value

    return _changed(batch, rows, count, lambda _path, value: value)


def _changed(
    batch: Any,
    rows: int,
    number: Callable[[Path, float], float],
    tensor: Callable[[Path, torch.Tensor], torch.Tensor],
) -> Any:
    """The batch with what ``number`` makes of every plain number and tensor of one entry, and ``tensor`` of every
    tensor that has no entry for each row. What holds nothing that changes stays the same object."""

    listed = {id(found) for found in nested.lists_of_rows(batch, rows)}

    def has_rows(value: Any) -> bool:
        return id(value) in listed or nested.knows_its_rows(value)

    def is_leaf(value: Any) -> bool:
        return has_rows(value) or isinstance(value, (int, float, torch.Tensor)) or hasattr(value, "__array__")

    def change(path: Path, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_meta or value.is_nested or value.dtype is torch.bool or value.is_complex():
                return value
            if value.numel() != 1:
                return value if rows in value.shape else tensor(path, value)
            old = value.item()
        elif (
            isinstance(value, bool)
            or id(value) in listed
            or nested.knows_its_rows(value)
            or getattr(value, "ndim", 0) > 0
        ):
            return value
        else:
            old = value
        new = number(path, old)
        if new == old:
            return value
        return torch.full_like(value, new) if isinstance(value, torch.Tensor) else type(value)(new)

    return nested.mapped(batch, change, is_leaf)


def totals(found: Mapping[Path, float], rows: int, known: Sequence[Sequence[int]]) -> dict[Path, Sequence[int]]:
    """Of what each number is the total: of the rows, of something that is known for each row, or of as much in every
    row."""
    candidates = [[1] * rows, *known]
    explained: dict[Path, Sequence[int]] = {}
    for path, value in found.items():
        each = next((c for c in candidates if sum(c) == value), None)
        if each is None and value > rows and value % rows == 0:
            each = [int(value // rows)] * rows
        if each is not None:
            explained[path] = each
    return explained
