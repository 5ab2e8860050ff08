"""Single items of a map-style data set: whether fetching one changes it, and whether all get the same noise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from pytest_trainloop.checks.state.data_order.draws import NOISE, Draws
from pytest_trainloop.checks.state.data_order.held import Held
from pytest_trainloop.checks.state.data_order.rows import digest
from pytest_trainloop.runs.process_state import preserved, seed_all

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 1 << 28
"""Bytes of stored data that are copied, at most."""

DRAWN = 8
"""Random states under which an item is fetched."""

Copy: TypeAlias = tuple[str, Any, Any]
"""The path of what is stored, the object and a copy of it."""


@dataclass(frozen=True, slots=True)
class Changed:
    """An item that is another one each time it is fetched, since fetching writes into what is stored."""

    index: Any
    stored: tuple[str, ...]
    """What changed, by its path in the data set."""
    drawn: bool = False
    """Whether the change is drawn anew in each fetch, and the changes add up."""


def changed_in_place(dataset: Any, indices: Sequence[Any], seed: int) -> Changed | None:
    """Fetch an item three times under one random state, then once more with the stored tensors and arrays put back.
    Where that changes nothing fetch it under several random states, as a mask may be drawn in each fetch.

    What fetching changes besides is no fault: a counter (one entry), or statistics that all items are made with, so
    that another item is another one too.
    """
    return _changed_alike(dataset, indices, seed) or _changes_add_up(dataset, indices, seed)


def _changed_alike(dataset: Any, indices: Sequence[Any], seed: int) -> Changed | None:
    for index, other in itertools.pairwise([*indices, *indices[:1]]):
        if index == other:
            continue
        with preserved():
            before = _copies(Held.by(("dataset", dataset)))
            others = [_fetched(dataset, other, seed)]
            _put_back(before)
            found = [_fetched(dataset, index, seed) for _ in range(3)]
            changed = [(path, value, copy) for path, value, copy in before if _entries_changed(value, copy) > 1]
            others.append(_fetched(dataset, other, seed))
            _put_back(before)
            if found[0] == found[1] or found[1] == found[2] or others[0] != others[1]:
                continue
            if changed and _fetched(dataset, index, seed) == found[0]:
                return Changed(index, tuple(path for path, *_ in changed))
    return None


def _changes_add_up(dataset: Any, indices: Sequence[Any], seed: int) -> Changed | None:
    """An item that goes on to change with what each fetch draws, in what is stored."""
    with preserved():
        before = _copies(Held.by(("dataset", dataset)))
        if not before or not indices or not _written(dataset, indices[0], before, seed, least=1):
            return None
        for index, other in itertools.pairwise([*indices, *indices[:1]]):
            if index == other:
                continue
            _put_back(before)
            others, first = [_fetched(dataset, other, seed)], _fetched(dataset, index, seed)
            written = _written(dataset, index, before, seed, least=2)
            last = _fetched(dataset, index, seed)
            others.append(_fetched(dataset, other, seed))
            _put_back(before)
            again = _fetched(dataset, index, seed)
            added = [one[0] for one in written if _adds_up(dataset, index, one, seed)]
            _put_back(before)
            if added and last != first == again and others[0] == others[1]:
                return Changed(index, tuple(added), drawn=True)
    return None


def _written(dataset: Any, index: Any, before: list[Copy], seed: int, *, least: int) -> list[Copy]:
    """What changes in ``least`` entries while an item is fetched under several random states; not put back."""
    _put_back(before)
    for draw in range(1, DRAWN + 1):
        _fetched(dataset, index, seed + draw)
    return [one for one in before if _entries_changed(one[1], one[2]) >= least]


def _adds_up(dataset: Any, index: Any, one: Copy, seed: int) -> bool:
    """Whether a fetch leaves another content in a stored tensor than it finds, and than it leaves in the original one.

    A cache is left as it was found; a buffer, or the last view of an item, holds what the last fetch alone leaves.
    """
    _, value, _ = one
    _put_back([one])
    found = digest(value)
    for draw in range(1, DRAWN + 1):
        _fetched(dataset, index, seed + draw)
        left = digest(value)
        kept: Copy = ("", value, _copy(value))
        _put_back([one])
        _fetched(dataset, index, seed + draw)
        if draw > 1 and left not in (found, digest(value)):
            return True
        _put_back([kept])
        found = left
    return False


def _fetched(dataset: Any, index: Any, seed: int) -> int:
    seed_all(seed)
    return digest(dataset[index])


def _copies(held: Held) -> list[Copy]:
    room, copies = MOST_BYTES, list[Copy]()
    for path, value in held.stored:
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes <= room and _writable(value):
            room -= value.nbytes
            copies.append((path, value, _copy(value)))
    return copies


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _writable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable) and value.dtype != object
    return value.layout is torch.strided and not value.requires_grad and not value.is_inference()


def _entries_changed(value: Any, copy: Any) -> int:
    if isinstance(value, np.ndarray):
        return int((value != copy).sum())
    return int((value != copy).sum().item())


def _put_back(copies: list[Copy]) -> None:
    for _, value, kept in copies:
        if isinstance(value, np.ndarray):
            value[...] = kept
        else:
            value.copy_(kept)


def one_noise(dataset: Any, indices: Sequence[Any]) -> tuple[str, int] | None:
    """What torch draws in an item, where two items, each fetched twice, draw the same numbers; and how many."""
    if len(indices) < 2:
        return None
    drawn = []
    with preserved():
        for index in (*indices[:2], *indices[:2]):
            draws = Draws(NOISE)
            with draws:
                dataset[index]
            drawn.append(tuple(draws.seen))
    same = drawn[0] and len(set(drawn)) == 1
    return (drawn[0][0][0], len(drawn[0])) if same else None
