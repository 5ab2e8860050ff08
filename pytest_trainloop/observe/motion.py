"""When parameters change, and through whom: samples of all of them, compared after the run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.observe.facts import _bytes_of, _dense, readable, sample
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
    dtypes: dict[int, torch.dtype]


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
        watch.hook_gradients(watch.book.settle())
        chunks: dict[torch.device, list[torch.Tensor]] = {}
        order: dict[torch.device, list[int]] = {}
        counts = [0] * len(watch.book.tensors)
        dtypes: dict[int, torch.dtype] = {}
        for index, tensor in enumerate(watch.book.tensors):
            if not readable(tensor):
                continue
            dtypes[index] = tensor.dtype
            chunk = _bytes_of(sample(_dense(tensor.detach())))
            counts[index] = chunk.numel()
            chunks.setdefault(chunk.device, []).append(chunk)
            order.setdefault(chunk.device, []).append(index)
        vectors = {device: torch.cat(parts) for device, parts in chunks.items()}
        step = watch.thread.open[-1] if watch.thread.open else None
        self._looks.append(_Look(watch.tick(), step, counts, vectors, order, dtypes))

    def resolve(self) -> list[Move]:
        """The moves, in order; each step's relative updates are noted on it."""
        moves: list[Move] = []
        before: dict[int, _Chunk] = {}
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
        self, step: Step, moved: tuple[int, ...], before: dict[int, _Chunk], now: dict[int, _Chunk]
    ) -> None:
        for i in moved:
            if (before[i][0], len(before[i][1])) == (now[i][0], len(now[i][1])):
                old, new = _values(*before[i]), _values(*now[i])
                size = float((new - old).abs().max() / old.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
                step.updates[i] = max(step.updates.get(i, 0.0), size)


_Chunk = tuple[torch.dtype, bytes]


def _split(look: _Look) -> dict[int, _Chunk]:
    chunks: dict[int, _Chunk] = {}
    for device, vector in look.vectors.items():
        joined = vector.cpu().contiguous()
        raw = ctypes.string_at(joined.data_ptr(), joined.numel())
        start = 0
        for index in look.order[device]:
            chunks[index] = look.dtypes[index], raw[start : start + look.counts[index]]
            start += look.counts[index]
    return chunks


def _values(dtype: torch.dtype, raw: bytes) -> torch.Tensor:
    values = torch.frombuffer(bytearray(raw), dtype=dtype)
    return (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64)
