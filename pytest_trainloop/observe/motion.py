"""When parameters change, and through whom: samples of all of them, compared after the run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.observe.facts import _bytes_of, _dense, sample
from pytest_trainloop.observe.record import Move, Step

if TYPE_CHECKING:
    from pytest_trainloop.observe.watch import Watch


@dataclass(slots=True)
class _Look:
    at: int
    step: Step | None
    counts: list[int]
    vectors: dict[torch.device, torch.Tensor]
    order: dict[torch.device, list[int]]


class Motion:
    """``look`` is called before each backward and around each step; the change between two looks belongs to what ran
    between."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._looks: list[_Look] = []

    def look(self) -> None:
        """Sample every watched parameter; nothing in light density."""
        watch = self._watch
        if not watch.full:
            return
        chunks: dict[torch.device, list[torch.Tensor]] = {}
        order: dict[torch.device, list[int]] = {}
        counts = [0] * len(watch.book.tensors)
        for index, tensor in enumerate(watch.book.tensors):
            if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
                continue
            chunk = _bytes_of(sample(_dense(tensor.detach())))
            counts[index] = chunk.numel()
            chunks.setdefault(chunk.device, []).append(chunk)
            order.setdefault(chunk.device, []).append(index)
        vectors = {device: torch.cat(parts) for device, parts in chunks.items()}
        step = watch.optimizers.open[-1] if watch.optimizers.open else None
        self._looks.append(_Look(watch.tick(), step, counts, vectors, order))

    def resolve(self) -> list[Move]:
        """The moves, in order; each step's relative updates are noted on it."""
        moves: list[Move] = []
        before: dict[int, bytes] = {}
        since = 0
        for look in self._looks:
            now = _split(look)
            moved = tuple(i for i, chunk in now.items() if i in before and before[i] != chunk)
            if moved:
                moves.append(Move(since, look.at, moved, look.step.optimizer if look.step else None))
                if look.step is not None:
                    self._note_updates(look.step, moved, before, now)
            before, since = {**before, **now}, look.at
        self._looks.clear()
        return moves

    def _note_updates(
        self, step: Step, moved: tuple[int, ...], before: dict[int, bytes], now: dict[int, bytes]
    ) -> None:
        for i in moved:
            dtype = self._watch.book.tensors[i].dtype
            old, new = _values(before[i], dtype), _values(now[i], dtype)
            if old.shape == new.shape:
                size = float((new - old).abs().max() / old.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
                step.updates[i] = max(step.updates.get(i, 0.0), size)


def _split(look: _Look) -> dict[int, bytes]:
    chunks: dict[int, bytes] = {}
    for device, vector in look.vectors.items():
        joined = vector.cpu().contiguous()
        raw = ctypes.string_at(joined.data_ptr(), joined.numel())
        start = 0
        for index in look.order[device]:
            chunks[index] = raw[start : start + look.counts[index]]
            start += look.counts[index]
    return chunks


def _values(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    values = torch.frombuffer(bytearray(raw), dtype=dtype)
    return (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64)
