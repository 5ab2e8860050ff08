"""Facts about tensors, taken on their device and read once, after the run: no synchronisation while the loop runs."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.observe.record import Fact
from pytest_trainloop.observe.torch_internals import is_functorch

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRIES = 64
"""Sampled entries a tensor: their bytes tell whether it was changed, and they are linear in it (RULINGS R1)."""


class Reader:
    """Collects device scalars and samples; ``resolve`` reads them with one transfer a device."""

    def __init__(self) -> None:
        self._facts: list[tuple[Fact, torch.Tensor, torch.Tensor]] = []
        self._scalars: list[tuple[Callable[[float], None], torch.Tensor]] = []
        self._empty = torch.empty(0)

    def fact(self, tensor: torch.Tensor) -> Fact:
        """The tensor's peak and sample as they are now."""
        fact = Fact()
        if is_functorch(tensor):
            return fact
        values = _dense(tensor.detach())
        if values.numel() == 0 or values.is_meta:
            fact.peak = 0.0
            return fact
        peak = torch.linalg.vector_norm(values, ord=math.inf)
        self._facts.append((fact, peak, sample(values)))
        return fact

    def sample_only(self, tensor: torch.Tensor) -> Fact:
        """A fact without its peak: enough to see a change, at a third of the cost."""
        fact = Fact()
        values = _dense(tensor.detach())
        if values.numel() and not values.is_meta:
            self._facts.append((fact, self._empty, sample(values)))
        return fact

    def scalar(self, tensor: torch.Tensor, use: Callable[[float], None]) -> None:
        """Hand the value of a one-element tensor to ``use`` once it is read; never where it lives inside a functorch
        transform."""
        if not is_functorch(tensor):
            self._scalars.append((use, tensor.detach().clone()))

    def resolve(self) -> None:
        """Read everything that is pending."""
        peaks = _read([peak for _, peak, _ in self._facts])
        chunks = _read_bytes([s for _, _, s in self._facts])
        for (fact, _, _), peak, chunk in zip(self._facts, peaks, chunks, strict=True):
            fact.sample = chunk
            if peak is not None:
                fact.peak = peak
        for (use, _), value in zip(self._scalars, _read([t for _, t in self._scalars]), strict=True):
            use(math.nan if value is None else value)
        self._facts.clear()
        self._scalars.clear()


def sample(values: torch.Tensor) -> torch.Tensor:
    """Up to 64 entries at even spacing, copied."""
    flat = _flat(values)
    n = flat.numel()
    return flat[:: max(1, n // ENTRIES)][:ENTRIES].clone()


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
