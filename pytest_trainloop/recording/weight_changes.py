"""Changes of parameters, and what made them: samples of all parameters, compared after the run."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_trainloop.recording.events import Move, Step
from pytest_trainloop.recording.samples import _dense, as_real, readable, spaced
from pytest_trainloop.recording.shards import local
from pytest_trainloop.recording.torch_internals import past_dispatch_modes

if TYPE_CHECKING:
    from pytest_trainloop.recording.protocol import Observed
    from pytest_trainloop.recording.record import Parameter


@dataclass(slots=True)
class _Part:
    """The samples of all parameters of one device and dtype, concatenated."""

    entries: torch.Tensor
    order: list[int]
    counts: list[int]


@dataclass(slots=True)
class _Look:
    at: int
    step: Step | None
    parts: list[_Part]


class WeightChanges:
    """``look`` is called before each backward pass and around each step; the code in between made the changes between
    two looks."""

    def __init__(self, watch: Observed) -> None:
        self._watch = watch
        self._looks: list[_Look] = []

    def look(self) -> None:
        """Sample every watched parameter but those that another thread trains; nothing in light density."""
        watch = self._watch
        if not watch.full:
            return
        watch.hook_gradients(watch.table.settle())
        elsewhere = watch.trained.elsewhere()
        tensors = {i: local(t) for i, t in enumerate(watch.table.tensors) if i not in elsewhere}
        past = past_dispatch_modes()
        try:
            parts = _sampled(tensors)
        finally:
            del past
        step = watch.thread.open[-1] if watch.thread.open else None
        self._looks.append(_Look(watch.tick(), step, parts))

    def resolve(self) -> list[Move]:
        """The moves, in order; relative updates are noted on their steps."""
        moves: list[Move] = []
        states: list[tuple[dict[int, _Chunk], dict[int, _Chunk], bool]] = []
        before: dict[int, _Chunk] = {}
        copies = _Copies(self._watch.table.entries)
        since = 0
        for look in self._looks:
            now = _split(look)
            copies.note({i: chunk for i, chunk in now.items() if before.get(i) != chunk})
            moved = tuple(i for i, chunk in now.items() if i in before and before[i] != chunk)
            if moved:
                moves.append(Move(since, look.at, moved, look.step.optimizer if look.step else None))
                states.append((before, now, look.step is None or look.step.nested))
                if look.step is not None:
                    self._note_updates(look.step, moved, before, now)
            before, since = {**before, **now}, look.at
        self._looks.clear()
        copies.settle()
        self._note_values(moves, states)
        return moves

    def _note_values(self, moves: list[Move], states: list[tuple[dict[int, _Chunk], dict[int, _Chunk], bool]]) -> None:
        """The sampled values of weights that both steps and other code change, such as a step around another one: few
        loops have any."""
        changed: dict[bool, set[int]] = {True: set(), False: set()}
        for move, (_, _, by_hand) in zip(moves, states, strict=True):
            changed[by_hand].update(move.parameters)
        both = changed[True] & changed[False]
        for move, (before, now, _) in zip(moves, states, strict=True) if both else ():
            for i in both & set(move.parameters):
                if (before[i][0], len(before[i][1])) == (now[i][0], len(now[i][1])) and before[i][0].is_floating_point:
                    old, new = _values(*before[i]), _values(*now[i])
                    move.before[i] = tuple(old.tolist())
                    move.change[i] = tuple((new - old).tolist())

    def _note_updates(
        self, step: Step, moved: tuple[int, ...], before: dict[int, _Chunk], now: dict[int, _Chunk]
    ) -> None:
        """The relative updates of the parameters that a step moved, those of one dtype together."""
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i in moved:
            if (before[i][0], len(before[i][1])) == (now[i][0], len(now[i][1])):
                by_dtype[now[i][0]].append(i)
        for dtype, indices in by_dtype.items():
            old, new = (_rows(dtype, [chunks[i][1] for i in indices]) for chunks in (before, now))
            moved_by = new - old
            size = moved_by.abs().amax(1) / old.abs().amax(1).clamp_min(torch.finfo(torch.float64).tiny)
            lengths = torch.linalg.vector_norm(moved_by, dim=1) * torch.linalg.vector_norm(old, dim=1)
            along = torch.where(lengths == 0, 0.0, (moved_by * old).sum(1) / lengths)
            for i, relative, direction in zip(indices, size.tolist(), along.tolist(), strict=True):
                step.updates[i] = max(step.updates.get(i, 0.0), relative)
                step.along[i] = direction


class _Copies:
    """Which parameters had one and the same values, at the same moment or at different ones."""

    def __init__(self, entries: list[Parameter]) -> None:
        self._entries = entries
        self._by_values: dict[tuple[tuple[int, ...], _Chunk], set[int]] = defaultdict(set)

    def note(self, chunks: dict[int, _Chunk]) -> None:
        for index, (dtype, raw) in chunks.items():
            if raw != raw[: dtype.itemsize] * (len(raw) // dtype.itemsize):
                self._by_values[self._entries[index].shape, (dtype, raw)].add(index)
                self._entries[index].uniform = False

    def settle(self) -> None:
        for indices in self._by_values.values():
            for index in indices if len(indices) > 1 else ():
                self._entries[index].equals |= indices - {index}


def _sampled(tensors: dict[int, torch.Tensor]) -> list[_Part]:
    found: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = defaultdict(dict)
    for index, tensor in tensors.items():
        if readable(tensor):
            found[tensor.device, tensor.dtype][index] = spaced(_dense(tensor.detach()))
    return [_Part(torch.cat(list(p.values())), list(p), [e.numel() for e in p.values()]) for p in found.values()]


_Chunk = tuple[torch.dtype, bytes]


def _split(look: _Look) -> dict[int, _Chunk]:
    chunks: dict[int, _Chunk] = {}
    for part in look.parts:
        joined = part.entries.cpu()
        raw = ctypes.string_at(joined.data_ptr(), joined.numel() * joined.itemsize)
        start = 0
        for index, count in zip(part.order, part.counts, strict=True):
            end = start + count * joined.itemsize
            chunks[index] = joined.dtype, raw[start:end]
            start = end
    return chunks


def _values(dtype: torch.dtype, raw: bytes) -> torch.Tensor:
    values = torch.frombuffer(bytearray(raw), dtype=dtype)
    return as_real(values).to(torch.float64)


def _rows(dtype: torch.dtype, chunks: list[bytes]) -> torch.Tensor:
    """A row of values for each chunk, in float64, filled up with zeros."""
    values = _values(dtype, b"".join(chunks)).flatten()
    size = sum(map(len, chunks)) // len(values)
    counts = [len(chunk) // size for chunk in chunks]
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(values, counts)), batch_first=True)
