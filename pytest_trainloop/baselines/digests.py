"""Digests of tensors, computed in float64 on their device and read once, after the run."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.baselines.trajectory import Digest
from pytest_trainloop.recording.samples import as_real, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SAMPLED = 1 << 16
"""Entries that ``Digest.ordered`` looks at, at most, at even spacing."""

_GOLDEN = 0.6180339887498949


class Digests:
    """Collects numbers on their devices; ``resolve`` reads all of them, with one transfer a device."""

    def __init__(self) -> None:
        self._numbers: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        self._uses: dict[torch.device, list[tuple[int, Callable[[list[float]], None]]]] = defaultdict(list)

    def take(self, tensors: Iterable[torch.Tensor], use: Callable[[Digest], None]) -> None:
        """Call ``use`` with the digest of the tensors joined as they are now, when the numbers are read."""
        parts = [(number, flat) for number, t in enumerate(tensors) if (flat := _entries(t)) is not None]
        parts = [(number, flat) for number, flat in parts if flat.device == parts[0][1].device]
        if not parts:
            use(Digest(0.0, 0.0, 0.0, 0.0))
            return
        sums = [torch.stack(_sums(flat, factor=number + 1)) for number, flat in parts]
        joined = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        self._keep(joined, lambda numbers: use(Digest(*numbers)))

    def norm(self, tensor: torch.Tensor, use: Callable[[float], None]) -> None:
        """Call ``use`` with the Euclidean norm of a tensor as it is now, when the numbers are read."""
        flat = _entries(tensor)
        if flat is None:
            use(0.0)
            return
        self._keep(torch.linalg.vector_norm(flat).reshape(1), lambda numbers: use(numbers[0]))

    def _keep(self, numbers: torch.Tensor, use: Callable[[list[float]], None]) -> None:
        self._numbers[numbers.device].append(numbers)
        self._uses[numbers.device].append((numbers.numel(), use))

    def resolve(self) -> None:
        """Read everything that is pending."""
        for device, kept in self._numbers.items():
            numbers = torch.cat(kept).tolist() if kept else []
            start = 0
            for count, use in self._uses[device]:
                use(numbers[start : start + count])
                start += count
        self._numbers.clear()
        self._uses.clear()


def _entries(tensor: torch.Tensor) -> torch.Tensor | None:
    """The entries in float64, in rows of the first dimension; None where there are none that can be read."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach().coalesce()
    if tensor.is_meta or tensor.is_nested or not (tensor.is_sparse or readable(tensor)):
        return None
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() == 0:
        return None
    values = as_real(values)
    if values.device.type == "mps":  # it has no float64
        values = values.cpu()
    return values.to(torch.float64).reshape(values.shape[0] if values.dim() > 1 else values.numel(), -1)


def _sums(rows: torch.Tensor, *, factor: int) -> list[torch.Tensor]:
    """The four numbers of a digest; ``factor`` tells the tensors of one digest apart."""
    flat = rows.reshape(-1)
    count = flat.numel()
    sampled = flat[:: -(-count // SAMPLED)]
    total = flat.sum()
    by_row = torch.dot(rows.sum(0), _weights(rows.shape[1], rows.device)) if rows.shape[1] > 1 else total
    ordered = torch.dot(sampled, _weights(sampled.numel(), flat.device)) * factor
    return [torch.dot(flat, flat), total, ordered, by_row]


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Fixed numbers between -1 and 1 by position: those of any two positions differ. Exact on every machine, since only
    products and differences of float64 numbers are taken."""
    with torch.inference_mode(False):
        position = torch.arange(1, count + 1, dtype=torch.float64, device=device)
        turns = position * position * _GOLDEN
        return 2.0 * (turns - turns.floor()) - 1.0
