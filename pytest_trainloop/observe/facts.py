"""Facts about tensors, taken on their device and read once, after the run: no synchronisation while the loop runs."""

from __future__ import annotations

import ctypes
import functools
import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytest_trainloop.observe.record import Fact
from pytest_trainloop.observe.torch_internals import is_functorch

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRIES = 64
"""Sampled entries of a tensor: their bytes tell whether it was changed, and they are linear in it (RULINGS R1)."""


_ORDERED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.bool}
)
_NORMED = frozenset({torch.complex64, torch.complex128})


class Reader:
    """Collects device scalars and samples; ``resolve`` reads them with one transfer a device."""

    def __init__(self) -> None:
        self._facts: list[tuple[Fact, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._scalars: list[tuple[Callable[[float], None], torch.Tensor]] = []
        self._empty = torch.empty(0)

    def fact(self, tensor: torch.Tensor) -> Fact:
        """The tensor's peak and sample as they are now."""
        fact = Fact()
        if not readable(tensor):
            return fact
        values = _dense(tensor.detach())
        if values.numel() == 0:
            fact.peak = 0.0
            return fact
        entries = spaced(values).clone()
        self._facts.append((fact, *_extremes(values, entries), entries))
        return fact

    def sample_only(self, tensor: torch.Tensor) -> Fact:
        """A fact without its peak: enough to see a change, at a third of the cost."""
        fact = Fact()
        values = _dense(tensor.detach())
        if values.numel():
            self._facts.append((fact, self._empty, self._empty, spaced(values).clone()))
        return fact

    def scalar(self, tensor: torch.Tensor, use: Callable[[float], None]) -> None:
        """Hand the value of a one-element tensor to ``use`` once it is read; never where it lives inside a functorch
        transform."""
        if not is_functorch(tensor):
            self._scalars.append((use, tensor.detach().clone()))

    def resolve(self) -> None:
        """Read everything that is pending."""
        lows = _read([low for _, low, _, _ in self._facts])
        highs = _read([high for _, _, high, _ in self._facts])
        chunks = _read_bytes([entries for _, _, _, entries in self._facts])
        for (fact, *_), low, high, chunk in zip(self._facts, lows, highs, chunks, strict=True):
            fact.sample = chunk
            if low is not None and high is not None:
                fact.peak = max(abs(low), abs(high))
        for (use, _), value in zip(self._scalars, _read([t for _, t in self._scalars]), strict=True):
            use(math.nan if value is None else value)
        self._facts.clear()
        self._scalars.clear()


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has entries of its own: not lazy, not on the meta device, not inside a functorch transform."""
    return not (nn.parameter.is_lazy(tensor) or tensor.is_meta or is_functorch(tensor))


def _extremes(values: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest entry; of the sampled ones only where torch cannot order the dtype (float8). One pass
    without a copy: the infinity norm takes twenty times as long on a CPU."""
    if values.dtype in _ORDERED:
        low, high = torch.aminmax(values)
        return low, high
    if values.is_complex():
        peak = (values if values.dtype in _NORMED else entries.to(torch.complex128)).abs().amax()
        return peak, peak
    low, high = torch.aminmax(entries.to(torch.float64))
    return low, high


def spaced(values: torch.Tensor) -> torch.Tensor:
    """All of up to 128 entries, at most 64 of more, at even spacing: a view where the layout allows."""
    flat = _flat(values)
    return flat[:: _spacing(flat.numel())]


@functools.lru_cache(maxsize=4096)
def _spacing(count: int) -> int:
    """The least spacing that leaves few enough entries and shares no factor with the count: one that does can run down
    a single column, whose input may always be zero."""
    spacing = 1 if count <= 2 * ENTRIES else -(-count // ENTRIES)
    while math.gcd(spacing, count) > 1:
        spacing += 1
    return spacing


def _flat(values: torch.Tensor) -> torch.Tensor:
    """All entries in memory order where that takes no copy, else in index order."""
    if not values.is_contiguous() and values.dim() > 1:
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
    return values.reshape(-1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _read(scalars: list[torch.Tensor]) -> list[float | None]:
    """One-element tensors as floats; None for empty ones."""
    values: list[float | None] = [None] * len(scalars)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, scalar in enumerate(scalars):
        if scalar.numel() == 1:
            by_device[scalar.device].append(i)
    for positions in by_device.values():
        wide = [_real(scalars[i]).reshape(()).to(torch.float64) for i in positions]
        for i, value in zip(positions, torch.stack(wide).tolist(), strict=True):
            values[i] = value
    return values


def _read_bytes(samples: list[torch.Tensor]) -> list[bytes]:
    chunks = [b""] * len(samples)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, one in enumerate(samples):
        by_device[one.device].append(i)
    for positions in by_device.values():
        raw = [_bytes_of(samples[i]) for i in positions]
        joined = torch.cat(raw).cpu()
        together = ctypes.string_at(joined.data_ptr(), joined.numel())
        start = 0
        for i, one in zip(positions, raw, strict=True):
            chunks[i] = together[start : start + one.numel()]
            start += one.numel()
    return chunks


def _bytes_of(one: torch.Tensor) -> torch.Tensor:
    if one.is_conj() or one.is_neg():
        one = one.resolve_conj().resolve_neg()
    return one.contiguous().view(torch.uint8)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() if tensor.is_complex() else tensor
