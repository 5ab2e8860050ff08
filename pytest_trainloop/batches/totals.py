"""What a batch carries beside its rows: how many there are, how many tokens count, offsets, weights.

A loop that divides by such a number is given a wrong one where rows are taken from the batch. Where a number is the
total of something that is known for each row, it is counted anew for the rows that are left; on what else the gradient
may depend is told by doubling it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Goes through a batch of so many rows: ``number`` is given every plain number and tensor of one entry, ``tensor``
    every tensor that has no entry for each row; what they give back stands in the new batch."""

    rows: int
    number: Callable[[Path, float], float]
    tensor: Callable[[Path, torch.Tensor], torch.Tensor]

    def changed(self, value: Any, path: Path = ()) -> Any:
        """What holds nothing that changes stays the same object."""
        if isinstance(value, (bool, str, bytes, type, torch.nn.Module)) or value is None:
            return value
        if isinstance(value, (int, float)) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0):
            return self._number(value, path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._held(value, dict(value), path)
        if isinstance(value, (list, tuple)):
            return self._sequence(value, path)
        return value if hasattr(value, "__array__") else self._held(value, _attributes(value), path)

    def _number(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        other = self.number(path, value)
        return value if other == value else type(value)(other)

    def _tensor(self, value: torch.Tensor, path: Path) -> torch.Tensor:
        if value.is_meta or value.is_nested or value.dtype is torch.bool or value.is_complex():
            return value
        if value.numel() == 1:
            number = value.item()
            other = self.number(path, number)
            return value if other == number else torch.full_like(value, other)
        return self.tensor(path, value) if self.rows not in value.shape else value

    def _sequence(self, value: Any, path: Path) -> Any:
        if isinstance(value, list) and len(value) == self.rows:
            return value
        made = [self.changed(v, (*path, i)) for i, v in enumerate(value)]
        if all(a is b for a, b in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)

    def _held(self, value: Any, entries: dict[Any, Any], path: Path) -> Any:
        new = {k: v for k, old in entries.items() if (v := self.changed(old, (*path, k))) is not old}
        if not new:
            return value
        made = copy.copy(value)
        for key, entry in new.items():
            if isinstance(made, Mapping):
                made[key] = entry  # type: ignore[index]
            else:
                object.__setattr__(made, key, entry)
        return made


def _attributes(value: Any) -> dict[str, Any]:
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                held[slot] = getattr(value, slot)
    return held


def beside_rows(batch: Any, rows: int) -> dict[Path, float]:
    """Numbers, and tensors that have no entry for each row (told by NaN), by where they stand."""
    found: dict[Path, float] = {}

    def number(path: Path, value: float) -> float:
        found[path] = value
        return value

    def tensor(path: Path, value: torch.Tensor) -> torch.Tensor:
        found[path] = float("nan")
        return value

    _Walk(rows, number, tensor).changed(batch)
    return found


def doubled(batch: Any, rows: int, among: Container[Path]) -> Any:
    """The batch with twice what stands at these places."""
    walk = _Walk(rows, lambda path, n: 2 * n if path in among else n, lambda path, t: 2 * t if path in among else t)
    return walk.changed(batch)


def recounted(batch: Any, rows: int, chosen: Sequence[int], totals: Mapping[Path, Sequence[int]]) -> Any:
    """The batch with the numbers that are totals over rows counted anew for the chosen ones."""

    def count(path: Path, value: float) -> float:
        return sum(totals[path][row] for row in chosen) if path in totals else value

    return _Walk(rows, count, lambda _path, value: value).changed(batch)


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
